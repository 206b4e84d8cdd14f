"""Contestants that are compared round by round."""

from collections.abc import Sequence
from math import comb

LEAST_ROUNDS = 6  # fewer have no interval


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Ends of an interval that holds the true median with 95%, however values are distributed; None
    for fewer than :data:`LEAST_ROUNDS`. Values are independent of each other."""
    if len(values) < LEAST_ROUNDS:
        return None
    ordered, total, outside = sorted(values), 2 ** len(values), 0.0
    for rank in range(len(ordered)):
        outside += 2 * comb(len(ordered), rank) / total
        if outside > 0.05:
            break
    return ordered[rank - 1], ordered[-rank]
