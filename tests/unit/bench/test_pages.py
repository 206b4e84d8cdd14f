"""What is made of the turns of two servers with own and with plain pages."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import NormalDist

import pytest

from bench.harness.report import write_picture
from bench.pages import Turn, compared, draw, median_interval, table_lines


@pytest.mark.parametrize(("count", "first"), [(6, 1), (8, 1), (9, 2), (15, 4), (20, 6)])
def test_the_ends_of_the_interval_are_those_of_the_sign_test(count: int, first: int) -> None:
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert median_interval(values) == (first, count + 1 - first)


def test_the_interval_holds_the_median_of_a_skewed_distribution_95_times_in_100() -> None:
    dice, held = random.Random(1), 0
    for _ in range(2000):
        low, high = median_interval([dice.expovariate(1.0) for _ in range(15)])
        held += low <= 0.6931 <= high
    chance = NormalDist(0.95, (0.95 * 0.05 / 2000) ** 0.5).inv_cdf(0.001)
    assert held / 2000 > chance


def results() -> dict[str, object]:
    """A machine that gets slower from round to round, and own pages that take a millisecond more.

    Restores by own pages take as long.
    """
    plain = [Turn(10.0 * n, 20.0 * n, 40.0 * n) for n in range(1, 10)]
    own = [Turn(one.backup + 1, one.load + 1, one.restore) for one in plain]
    turns = {"plain": plain, "own": own}
    return {
        "device": "a CPU",
        "tokens": 128,
        "turns_ms": turns,
        "compared": compared(turns),
    }


def test_turns_are_compared_with_those_of_the_same_round(tmp_path: Path) -> None:
    found = results()
    assert table_lines(found).splitlines()[2:] == [
        "| backup to host memory | 50.0 | 51.0 | +1.0 | 1.02 | 1.02 to 1.02 |",
        "| load from host memory | 100.0 | 101.0 | +1.0 | 1.01 | 1.01 to 1.01 |",
        "| restore from L3 | 200.0 | 200.0 | +0.0 | 1.00 | 1.00 to 1.00 |",
    ]
    write_picture(tmp_path / "it.png", found, draw)
    assert (tmp_path / "it.png").stat().st_size > 0
