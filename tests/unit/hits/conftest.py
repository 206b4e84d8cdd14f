"""A gate that tests of hits share."""

import pytest

from tests.unit.hits.gates import Gate, computing_a_thousand_a_second


@pytest.fixture
def gate() -> Gate:
    """It computes a thousand tokens per second, and as yet knows nothing of L3."""
    return computing_a_thousand_a_second(Gate())
