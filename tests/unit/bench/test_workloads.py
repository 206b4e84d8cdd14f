"""Workloads have the statistics they claim, the same for a seed, and can be made smaller."""

from statistics import mean, median

import pytest

from bench.workload.base import Session, Turn, Workload
from bench.workload.paper import leval, sharegpt4, zipf_contexts

WITHIN = 0.05
SEEDS = (0, 1, 2)


def turns_of(workload: Workload) -> list[Turn]:
    return [turn for session in workload.sessions for turn in session.turns]


@pytest.mark.parametrize("seed", SEEDS)
def test_sharegpt4_has_the_papers_statistics(seed: int) -> None:
    workload = sharegpt4(6000, seed)
    turns = turns_of(workload)
    histories = [workload.history(session) for session in workload.sessions]
    assert mean(turn.prompt for turn in turns) == pytest.approx(66.8, rel=WITHIN)
    assert mean(turn.output for turn in turns) == pytest.approx(358.8, rel=WITHIN)
    assert median(histories) == pytest.approx(2500, rel=WITHIN)
    assert 0.9 * 16384 < max(histories) <= 16384
    assert workload.interval_s == 30


@pytest.mark.parametrize("seed", SEEDS)
def test_leval_has_the_means_of_table_1(seed: int) -> None:
    workload = leval(3000, seed)
    context, prompt, output = 16340.2, 44.7, 50.2
    assert mean(workload.documents) == pytest.approx(context, rel=WITHIN)
    assert mean(turn.prompt for turn in turns_of(workload)) == pytest.approx(prompt, rel=WITHIN)
    assert mean(turn.output for turn in turns_of(workload)) == pytest.approx(output, rel=WITHIN)
    assert workload.max_parallel == 1


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_zipf_asks_for_contexts_by_their_rank(skew: float) -> None:
    workload = zipf_contexts(40_000, 0, skew, contexts=20)
    asked = [session.document for session in workload.sessions]
    weights = [(place + 1) ** -skew for place in range(20)]
    for place in (0, 1, 4):
        share = asked.count(place) / len(asked)
        assert share == pytest.approx(weights[place] / sum(weights), rel=WITHIN)


@pytest.mark.parametrize("make", [sharegpt4, leval, zipf_contexts])
def test_a_seed_decides_everything(make: object) -> None:
    assert callable(make)
    first, again, other = make(20, 5), make(20, 5), make(20, 6)
    assert first == again
    assert first.prompt_ids(3, 0, 1000) == again.prompt_ids(3, 0, 1000)
    assert first.prompt_ids(3, 0, 1000) != other.prompt_ids(3, 0, 1000)


def test_questions_differ_between_runs_and_documents_do_not() -> None:
    workload = leval(4, 0)
    assert workload.prompt_ids(0, 0, 1000, run=0) != workload.prompt_ids(0, 0, 1000, run=1)
    assert len(workload.prompt_ids(0, 0, 1000)) == workload.sessions[0].turns[0].prompt
    ids = workload.document_ids(0, 1000)
    assert ids == workload.document_ids(0, 1000) != workload.document_ids(1, 1000)
    assert len(ids) == workload.documents[0]
    assert set(ids) <= set(range(1000))


def test_a_scale_multiplies_lengths_and_waiting_times() -> None:
    workload = sharegpt4(300, 0)
    small = workload.scaled(0.1)
    assert small.describe()["output_mean"] == pytest.approx(35.9, rel=WITHIN)
    assert small.interval_s == pytest.approx(3)
    assert small.requests == workload.requests
    assert min(turn.prompt for turn in turns_of(small)) == 1


def test_a_limit_leaves_out_turns() -> None:
    talk = Session((Turn(10, 10), Turn(10, 10), Turn(10, 10)))
    about = Session((Turn(5, 5), Turn(5, 5)), document=0)
    rounds = Workload("test", (talk, about), (100,)).scaled(1.0, max_rounds=1)
    assert [len(session.turns) for session in rounds.sessions] == [1, 1]
    assert rounds.documents == (100,) and rounds.sessions[1].document == 0
    assert rounds.longest == 110
