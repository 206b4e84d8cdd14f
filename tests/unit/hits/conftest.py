"""A gate that tests of hits share."""

from __future__ import annotations

import pytest

from hcache_backend.prefetch.gate import HitGate
from tests.unit.hits.gates import Clock, new_gate


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> HitGate:
    """It computes a thousand tokens per second, and as yet knows nothing of L3."""
    gate = new_gate(clock)
    for _ in range(3):
        gate.prefilled(1000, 0, 0, 1.0)
    return gate
