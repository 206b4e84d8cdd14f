"""Hits of which a part comes from the shared tier, at another rate."""

import pytest

from hcache_backend.prefetch.estimates import STALLED_SECONDS
from hcache_backend.prefetch.gate import TRIAL_SECONDS
from tests.unit.hits.gates import STEP, Gate, at, judged, read, reading, refused, takes, turn


def read_shared(gate: Gate, seconds: float, times: int = 1) -> None:
    """A hit that was taken brings all of its tokens from the shared tier, so many times."""
    for _ in range(times):
        assert judged(gate, "earlier", shared=1000) == 1000
        with reading(gate, "earlier", 1000):
            gate.now += seconds
            gate.l3.add_shared_read(1000, seconds)
            gate.l3.part_arrived(1000)
        turn(gate)


def nothing_comes(gate: Gate, name: str, seconds: float, *, gave_up: bool = False) -> None:
    """A hit behind, or a part of it, is read, and after ``seconds`` nothing has come."""
    part = judged(gate, name, shared=1000)
    assert part
    with reading(gate, name, part):
        gate.now += seconds
        gate.l3.add_shared_read(0, seconds, gave_up=gave_up)
    turn(gate)


@pytest.fixture
def slow_behind(gate: Gate) -> Gate:
    """The page store needs 0.1 s for a thousand tokens, the shared tier five."""
    read(gate, 0.1)
    read_shared(gate, 5.0)
    return gate


def test_a_hit_behind_is_read_where_nothing_is_known_of_it(gate: Gate) -> None:
    read(gate, 10.0, times=2)
    assert judged(gate, "a", shared=1000) == 1000
    assert judged(gate, "b", shared=10) == 0, "and it is no trial, while another one is read"


@pytest.mark.parametrize(
    ("near", "far", "shared", "taken"),
    # To compute a hit takes 1 s.
    [(0.001, 0.5, 1000, 1000), (0.001, 2.0, 1000, 0), (0.9, 0.9, 500, 1000), (1.3, 0.9, 500, 0)],
    ids=["fast", "slow", "half of it from each", "half of it from each, too slow"],
)
def test_the_faster_one_of_reading_from_both_and_computing_is_chosen(
    near: float, far: float, shared: int, taken: int, gate: Gate
) -> None:
    read(gate, near)
    read_shared(gate, far)
    assert judged(gate, "a", shared=shared) == taken


def test_what_the_page_store_has_is_read_although_what_is_behind_is_too_slow(
    slow_behind: Gate,
) -> None:
    assert judged(slow_behind, "a", shared=300) == 700
    assert not refused(slow_behind, "a")
    assert judged(slow_behind, "b", shared=1000) == 0
    assert refused(slow_behind, "b")
    assert takes(slow_behind, "c")


def test_reads_of_the_page_store_do_not_put_off_a_trial_of_the_shared_tier(
    slow_behind: Gate,
) -> None:
    assert judged(slow_behind, "a", shared=1000) == 0
    for _ in range(int(TRIAL_SECONDS) + 1):
        slow_behind.now += 0.9
        read(slow_behind, 0.1)
    assert judged(slow_behind, "b", shared=1000) == 1000


@pytest.mark.parametrize("late", [0.0, 0.2])
def test_a_trial_of_the_shared_tier_is_judged_by_its_time_alone(
    slow_behind: Gate, late: float
) -> None:
    """The first half of the hit came fast, or late, from the page store."""
    slow_behind.now += TRIAL_SECONDS + 1
    assert judged(slow_behind, "a", shared=500) == 1000
    with reading(slow_behind, "a", 1000, step=100):
        slow_behind.now += 0.05 + late
        slow_behind.l3.part_arrived(500)
        for seconds, ended in ((0.0, []), (0.049, []), (0.1, ["a"])):
            slow_behind.now += seconds
            assert turn(slow_behind, at(slow_behind, "a", 500, step=100)) == ended


def test_a_slow_page_store_is_tried_before_the_shared_tier(gate: Gate) -> None:
    read(gate, 10.0, times=2)
    read_shared(gate, 50.0)
    gate.now += TRIAL_SECONDS + 1
    assert judged(gate, "a", shared=500) == 500


def test_only_the_time_that_it_took_counts_for_each_store(gate: Gate) -> None:
    read(gate, 0.1)
    assert judged(gate, "a", shared=400) == 1000
    with reading(gate, "a", 1000):
        gate.now += 0.06 + 0.3
        gate.l3.add_shared_read(400, 0.3)
        gate.l3.part_arrived(1000)
    rates = gate.estimates.rates()
    assert rates["l3_read"] == pytest.approx(10_000)
    assert rates["shared_read"] == pytest.approx(400 / 0.3)


@pytest.mark.parametrize(("seconds", "gave_up"), [(2.0, False), (0.2, True)])
def test_a_store_behind_that_gives_nothing_is_slow(
    seconds: float, gave_up: bool, gate: Gate
) -> None:
    """If it is given up, nobody knows how long it would have taken; what it took is less than
    computing."""
    read(gate, 0.1)
    read_shared(gate, 0.2, times=5)
    for name in "ab":
        nothing_comes(gate, name, seconds, gave_up=gave_up)
    assert judged(gate, "c", shared=1000) == 0
    gate.now += TRIAL_SECONDS + 1
    nothing_comes(gate, "trial", seconds, gave_up=True)
    gate.now += TRIAL_SECONDS + 1
    assert judged(gate, "d", shared=1000) == 0, "the next trial is later"


def test_rates_stay_positive_where_a_page_is_missing_before_those_from_behind(gate: Gate) -> None:
    assert judged(gate, "a", shared=300) == 1000
    with reading(gate, "a", 1000):
        gate.now += 0.1
        gate.l3.add_shared_read(300, 0.05)
    assert all(rate > 0 for rate in gate.estimates.rates().values())


def test_a_part_from_behind_may_take_as_long_as_it_does(gate: Gate) -> None:
    read(gate, 0.001)
    read_shared(gate, 0.9)
    assert judged(gate, "a", shared=1000) == 1000
    with reading(gate, "a", 1000):
        gate.now += 0.6
        assert not gate.l3.seems_stalled(gate.now)
        gate.now += 2 * 0.9 * STEP / 1000
        assert gate.l3.seems_stalled(gate.now)


def test_a_look_up_behind_has_time_of_its_own(gate: Gate) -> None:
    """A network that stalls ends no prefetch from local disks."""
    assert gate.may_ask("a", 0)
    with gate.l3.looking_up():
        gate.now += STALLED_SECONDS / 2
        gate.l3.may_take_longer(0.4)
        gate.now += STALLED_SECONDS / 2 + 0.3
        assert not gate.l3.seems_stalled(gate.now)
        gate.now += 0.2
        assert gate.l3.seems_stalled(gate.now)
