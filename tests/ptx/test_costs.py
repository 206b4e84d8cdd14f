"""Budgets of what matters over a bus. docs/research/launches.md has counts of real models."""

import pytest

from bench.gpu.shapes import Shape
from tests.ptx import launches
from tests.ptx.costs import DOCS, cases
from tests.ptx.memory import Span
from tests.ptx.watchers import SECTOR, Costs

SHAPE = Shape("small", 1, 512, 4, 0)
OVER_THE_BUS = {case.what: case for case in cases(SHAPE) if case.host}


@pytest.mark.parametrize("what", OVER_THE_BUS)
def test_host_memory_is_read_and_written_in_wide_accesses_and_whole_sectors(what: str) -> None:
    launch, host = OVER_THE_BUS[what].launch, OVER_THE_BUS[what].host
    costs = Costs([Span.of(host, launch.arguments[host])])
    launches.run(launch, 90, [costs])
    [(way, bytes_)] = [one for one in costs.bytes.items() if "host" in one[0]]
    assert costs.narrowest[way] == 16
    assert bytes_ == SECTOR * costs.sectors[way]


def test_the_cost_model_has_at_least_the_time_that_a_launch_takes() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if "| " in line]
    timed = {tuple(row[:2]): row[-2:] for row in rows if row[-1].replace(".", "").isdigit()}
    assert len(timed) > 20
    short = {name: times for name, times in timed.items() if float(times[0]) > float(times[1])}
    assert not short
