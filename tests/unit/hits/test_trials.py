"""A disk that becomes slow, and good again: the effect of reads and trials."""

import pytest

from hcache_backend.prefetch.gate import LONGEST_TRIAL_SECONDS, TRIAL_SECONDS, TRIAL_SHARE
from hcache_backend.prefetch.hit import Recomputing
from tests.unit.hits.gates import STEP, Gate, at, judged, read, reading, slices, takes, turn


@pytest.fixture(params=[10.0])
def slow(gate: Gate, request: pytest.FixtureRequest) -> Gate:
    """L3 brought two hits in ten seconds each."""
    read(gate, request.param, times=2)
    return gate


@pytest.fixture
def due(slow: Gate) -> Gate:
    """The next hit is a trial of the slow L3."""
    slow.now += TRIAL_SECONDS + 1
    return slow


def trial(gate: Gate, name: str, seconds: float) -> bool:
    """A hit is read although L3 was slow, in ``seconds`` if it goes on. Returns whether it did."""
    assert takes(gate, name)
    ended: list[str] = []
    with reading(gate, name, 1000, step=100):
        for arrived in range(0, 1000, 100):
            gate.now += seconds / 10
            ended = turn(gate, at(gate, name, arrived, step=100))
            if ended:
                break
            gate.l3.part_arrived(100)
    turn(gate)
    return not ended


def test_a_disk_that_became_slow_is_noticed_by_two_reads(gate: Gate) -> None:
    read(gate, 0.1, times=30)
    read(gate, 10.0, times=2)
    assert not takes(gate, "a")


def test_a_disk_that_is_good_again_is_noticed_by_two_trials(slow: Gate) -> None:
    assert not takes(slow, "a")
    slow.now += TRIAL_SECONDS + 1
    for name in "bc":  # the second one follows at once
        assert trial(slow, name, 0.05)
    assert takes(slow, "d") and slow.prefetches.waiting["d"].trial is None


def test_only_one_trial_at_a_time(due: Gate) -> None:
    assert takes(due, "a") and not takes(due, "b")
    with reading(due, "a", 1000):
        assert not takes(due, "c")


def test_a_slow_disk_is_tried_less_and_less_often(slow: Gate) -> None:
    pause = TRIAL_SECONDS
    for name in "abcdefgh":
        slow.now += pause - 1
        assert not takes(slow, f"before {name}")
        slow.now += 2
        assert not trial(slow, name, 10.0)
        pause = min(2 * pause, LONGEST_TRIAL_SECONDS)
    assert pause == LONGEST_TRIAL_SECONDS


def test_a_hit_that_seemed_worth_it_makes_pauses_short_again(due: Gate) -> None:
    assert not trial(due, "a", 10.0)
    due.gpu.wanted = True  # then its time counts alone
    assert trial(due, "b", 10.0)
    due.gpu.wanted = False
    due.now += TRIAL_SECONDS + 1
    assert takes(due, "c")


def test_a_fast_disk_is_not_tried_for_a_hit_whose_load_is_slow(gate: Gate) -> None:
    read(gate, 0.4, times=2)
    gate.batch_ended(10, 1000, loaded=1000, seconds=2.0)
    gate.now += TRIAL_SECONDS + 1
    assert not takes(gate, "a")


@pytest.mark.parametrize("slow", [0.4], indirect=True)
def test_a_trial_counts_the_load_too(slow: Gate) -> None:
    """Reading alone would be sooner than computing, reading and loading are not."""
    slow.batch_ended(10, 1000, loaded=1000, seconds=0.81)
    assert not takes(slow, "a")
    slow.now += TRIAL_SECONDS + 1
    assert trial(slow, "b", 0.4)
    assert not takes(slow, "c"), "it was no good one"


def test_a_trial_that_its_client_ends_says_nothing_of_the_disk(slow: Gate) -> None:
    for name in "ab":
        slow.now += TRIAL_SECONDS + 1
        assert takes(slow, name)
        with reading(slow, name, 1000):
            slow.now += 0.01
        turn(slow)


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("recomputing", [None, slices(1.0)])
def test_a_trial_of_a_slow_disk_takes_a_twentieth_of_the_time_to_compute_the_hit(
    due: Gate, recomputing: Recomputing | None, parts: bool
) -> None:
    assert takes(due, "a", recomputing=recomputing, parts=parts)
    with reading(due, "a", 1000, step=10):
        due.now += TRIAL_SHARE - 0.001
        assert turn(due, at(due, "a", whole=not parts, step=10)) == []
        due.now += 0.002
        assert turn(due, at(due, "a", whole=not parts, step=10)) == ["a"]
    assert not takes(due, "b")


@pytest.mark.parametrize("step", [STEP, 1024])
def test_a_trial_whose_part_comes_late_ends_before_it_took_as_long_as_computing(
    step: int, gate: Gate
) -> None:
    """L3 is ten times as slow as computing; without an end it would never be tried again."""
    read(gate, 10.0, tokens=1024, times=2)
    gate.now += TRIAL_SECONDS + 1
    assert judged(gate, "a", 1024, parts=False) == 1024
    began = gate.now
    with reading(gate, "a", 1024, step):
        while gate.now <= began + 1.05 and not turn(gate, at(gate, "a", whole=True, step=step)):
            gate.now += 0.01
        assert began < gate.now <= began + 1.05
    assert judged(gate, "b", 1024, parts=False) == 0


def test_a_disk_that_is_slow_again_after_a_good_trial_is_tried_later(due: Gate) -> None:
    assert trial(due, "a", 0.5)
    assert not trial(due, "b", 10.0)
    due.now += TRIAL_SECONDS - 1
    assert not takes(due, "c")
    due.now += 2
    assert takes(due, "d")


@pytest.mark.parametrize("seconds", [0.05, 1.5, 10.0])
def test_a_trial_whose_front_was_all_recomputed_says_nothing_of_the_disk(
    due: Gate, seconds: float
) -> None:
    """Otherwise every later hit is a trial of which nothing is read, for ever."""
    quick = slices(0.1)
    assert takes(due, "a", recomputing=quick, parts=False)
    rates = due.estimates.rates()
    with reading(due, "a", 1000):
        due.now += seconds
        due.l3.need_not_read(1000)
    assert due.estimates.rates() == rates, "nothing was read"
    turn(due)
    assert not takes(due, "b", recomputing=quick, parts=False)


def test_a_trial_is_judged_by_the_part_that_was_read(due: Gate) -> None:
    """Two of them show that L3 is fast again, although the front recomputed nearly all."""
    quick = slices(0.1)

    def tried(name: str, seconds: float) -> None:
        assert takes(due, name, recomputing=quick)
        assert due.prefetches.waiting[name].trial is not None
        with reading(due, name, 1000):
            due.now += seconds
            due.l3.part_arrived(100)
            due.l3.need_not_read(900)
        turn(due)

    tried("a", 0.01)
    tried("b", 0.01)
    assert due.estimates.read.seconds(1000) == pytest.approx(0.1)
    assert takes(due, "c", recomputing=quick)
    assert due.prefetches.waiting["c"].trial is None


def test_a_trial_whose_part_was_slow_is_a_bad_one(due: Gate) -> None:
    quick = slices(0.1)
    assert takes(due, "a", recomputing=quick)
    with reading(due, "a", 1000):
        due.now += 1.0
        due.l3.part_arrived(100)
        due.l3.need_not_read(900)
    turn(due)
    assert not takes(due, "b", recomputing=quick)


@pytest.mark.parametrize(
    ("before", "seconds", "arrived"),
    [(0.1, 1.0, 100), (0.1, 5.0, 0), (5.0, 0.001, 0)],
    ids=["slow and ended early", "slow and failed", "failed at once"],
)
def test_reads_that_end_early_are_no_fast_ones(
    before: float, seconds: float, arrived: int, gate: Gate
) -> None:
    """What came in time counts as if the rest had come at the same pace."""
    read(gate, before, times=30)
    for _ in range(2):
        with reading(gate, "a", 1000):
            gate.now += seconds
            gate.l3.part_arrived(arrived)
    assert not takes(gate, "b")
