"""A gate that tests of hits share."""

from __future__ import annotations

import pytest

from hcache_backend.prefetch.gate import HitGate
from tests.unit.hits.gates import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> HitGate:
    """It computes a thousand tokens per second, and as yet knows nothing of L3."""
    gate = HitGate(None, "test", 1.0, clock)
    for _ in range(3):
        gate.prefilled(1000, 0, 0, 1.0)
    return gate
