"""Workloads have the statistics they claim, and are the same for a seed."""

from collections.abc import Callable
from statistics import mean, median

import pytest

from bench.workload.base import Turn, Workload
from bench.workload.paper import leval, sharegpt4, zipf_contexts

WITHIN = 0.05


def turns_of(workload: Workload) -> list[Turn]:
    return [turn for session in workload.sessions for turn in session.turns]


def test_sharegpt4_has_the_papers_statistics() -> None:
    workload = sharegpt4(6000, 0)
    histories = [workload.history(session) for session in workload.sessions]
    assert mean(turn.prompt for turn in turns_of(workload)) == pytest.approx(66.8, rel=WITHIN)
    assert mean(turn.output for turn in turns_of(workload)) == pytest.approx(358.8, rel=WITHIN)
    assert median(histories) == pytest.approx(2500, rel=WITHIN)


def test_leval_has_the_means_of_table_1() -> None:
    workload = leval(3000, 0)
    assert mean(workload.documents) == pytest.approx(16340.2, rel=WITHIN)
    assert mean(turn.prompt for turn in turns_of(workload)) == pytest.approx(44.7, rel=WITHIN)
    assert mean(turn.output for turn in turns_of(workload)) == pytest.approx(50.2, rel=WITHIN)


@pytest.mark.parametrize("make", [sharegpt4, leval, zipf_contexts])
def test_a_seed_decides_everything(make: Callable[[int, int], Workload]) -> None:
    first, again, other = make(20, 5), make(20, 5), make(20, 6)
    assert first == again
    assert first.prompt_ids(3, 0, 1000) == again.prompt_ids(3, 0, 1000)
    assert first.prompt_ids(3, 0, 1000) != other.prompt_ids(3, 0, 1000)
