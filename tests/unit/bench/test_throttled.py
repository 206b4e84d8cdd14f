"""What is made of restores by two codecs from a slow L3."""

from __future__ import annotations

import json

import pytest

from bench.record import RESULTS
from bench.throttled import RATES, compared, table_lines


def test_recorded_restores_take_at_most_0_80_of_what_plain_ones_take() -> None:
    found = json.loads((RESULTS / "throttled.json").read_text())
    assert set(found["compared"]) == set(map(str, RATES))
    assert all(row["ratio"] <= 0.80 for row in found["compared"].values())
    assert found["bytes"]["exp4"] <= 0.775 * found["bytes"]["none"]


def test_restores_are_compared_with_those_of_the_same_round() -> None:
    """The machine gets slower from round to round: medians of all rounds alone would not tell."""
    times = {"none": [100.0 * n for n in range(1, 8)], "exp4": [78.0 * n for n in range(1, 8)]}
    times["exp4"][5] = 2000.0
    found = {
        "device": "a CPU",
        "bytes": {"none": 1000, "exp4": 767},
        "times_ms": {"5": times},
        "compared": {"5": compared(times)},
    }
    assert found["compared"]["5"]["ratio"] == pytest.approx(0.78)
    assert table_lines(found).splitlines()[2:] == [
        "| 5 MB/s | 400 | 312 | 0.78 | 0.78 to 3.33 | 0.767 |"
    ]
