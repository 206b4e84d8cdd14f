"""Hits of which a part comes from the shared tier, at another rate."""

import pytest

from hcache_backend.prefetch.estimates import STALLED_SECONDS
from hcache_backend.prefetch.gate import PROBE_SECONDS
from tests.unit.hits.gates import STEP, Gate, at, judged, read, reading, refused, takes, turn


def read_shared(gate: Gate, seconds: float, tokens: int = 1000, near: float = 0.0) -> None:
    """A hit that was taken brings ``tokens`` of the shared tier, ``near`` seconds later."""
    assert judged(gate, "earlier", tokens, shared=tokens) == tokens
    with reading(gate, "earlier", tokens):
        gate.now += near + seconds
        gate.l3.came_from_shared(tokens, seconds)
        gate.l3.arrived(tokens)
    turn(gate)


def nothing_comes(gate: Gate, name: str, seconds: float, *, gave_up: bool = False) -> None:
    """A hit behind, or a part of it, is read, and after ``seconds`` nothing has come."""
    part = judged(gate, name, shared=1000)
    assert part
    with reading(gate, name, part):
        gate.now += seconds
        gate.l3.came_from_shared(0, seconds, gave_up=gave_up)
    turn(gate)


def test_a_hit_behind_is_read_where_nothing_is_known_of_it(gate: Gate) -> None:
    read(gate, 10.0, times=2)
    assert judged(gate, "a", shared=1000) == 1000


@pytest.mark.parametrize(("seconds", "taken"), [(0.5, 1000), (2.0, 0)])
def test_the_faster_one_of_reading_behind_and_computing_is_chosen(
    seconds: float, taken: int, gate: Gate
) -> None:
    read(gate, 0.001)
    read_shared(gate, seconds)
    assert judged(gate, "a", shared=1000) == taken


def test_times_of_both_stores_add_up(gate: Gate) -> None:
    """Half of a hit from each; to compute it takes 1 s."""
    read(gate, 0.9)
    read_shared(gate, 0.9)
    assert judged(gate, "a", shared=500) == 1000
    turn(gate)
    read(gate, 1.3, times=2)
    assert judged(gate, "b", shared=500) == 0


def test_what_the_page_store_has_is_read_although_what_is_behind_is_too_slow(gate: Gate) -> None:
    read(gate, 0.1)
    read_shared(gate, 5.0)
    assert judged(gate, "a", shared=300) == 700
    assert not refused(gate, "a")
    assert judged(gate, "b", shared=1000) == 0
    assert refused(gate, "b")


def test_a_slow_store_behind_says_nothing_of_the_page_store(gate: Gate) -> None:
    read(gate, 0.1)
    read_shared(gate, 5.0)
    assert takes(gate, "a")


def test_reads_of_the_page_store_do_not_put_off_a_probe_of_the_shared_tier(gate: Gate) -> None:
    read(gate, 0.1)
    read_shared(gate, 5.0)
    assert judged(gate, "a", shared=1000) == 0
    for _ in range(int(PROBE_SECONDS) + 1):
        gate.now += 0.9
        read(gate, 0.1)
    assert judged(gate, "b", shared=1000) == 1000


@pytest.mark.parametrize("late", [0.0, 0.2])
def test_a_probe_of_the_shared_tier_is_judged_by_its_time_alone(gate: Gate, late: float) -> None:
    """The first half of the hit came fast, or late, from the page store."""
    read(gate, 0.1)
    read_shared(gate, 50.0)
    gate.now += PROBE_SECONDS + 1
    assert judged(gate, "a", shared=500) == 1000
    with reading(gate, "a", 1000, step=100):
        gate.now += 0.05 + late
        gate.l3.arrived(500)
        assert turn(gate, at(gate, "a", 500, step=100)) == []
        gate.now += 0.049
        assert turn(gate, at(gate, "a", 500, step=100)) == []
        gate.now += 0.1
        assert turn(gate, at(gate, "a", 500, step=100)) == ["a"]


def test_a_slow_page_store_is_probed_before_the_shared_tier(gate: Gate) -> None:
    read(gate, 10.0, times=2)
    read_shared(gate, 50.0)
    gate.now += PROBE_SECONDS + 1
    assert judged(gate, "a", shared=500) == 500


def test_only_the_time_that_it_took_counts_for_each_store(gate: Gate) -> None:
    read(gate, 0.1)
    assert judged(gate, "a", shared=400) == 1000
    with reading(gate, "a", 1000):
        gate.now += 0.06 + 0.3
        gate.l3.came_from_shared(400, 0.3)
        gate.l3.arrived(1000)
    assert gate.estimates.read.seconds(1000) == pytest.approx(0.1)
    assert gate.estimates.shared.seconds(1000) == pytest.approx(0.75)


def test_a_store_behind_that_gives_nothing_is_slow(gate: Gate) -> None:
    read(gate, 0.1)
    for _ in range(5):
        read_shared(gate, 0.2)
    for name in "ab":
        nothing_comes(gate, name, 2.0)
    assert judged(gate, "c", shared=1000) == 0


def test_a_store_behind_that_is_always_given_up_is_not_waited_for(gate: Gate) -> None:
    """Nobody knows how long it would have taken; what it took is less than computing."""
    read(gate, 0.1)
    for _ in range(5):
        read_shared(gate, 0.2)
    for name in "ab":
        nothing_comes(gate, name, 0.2, gave_up=True)
    assert judged(gate, "c", shared=1000) == 0
    gate.now += PROBE_SECONDS + 1
    nothing_comes(gate, "probe", 0.2, gave_up=True)
    gate.now += PROBE_SECONDS + 1
    assert judged(gate, "d", shared=1000) == 0, "the next trial is later"


def test_rates_stay_positive_where_a_page_is_missing_before_those_from_behind(gate: Gate) -> None:
    assert judged(gate, "a", shared=300) == 1000
    with reading(gate, "a", 1000):
        gate.now += 0.1
        gate.l3.came_from_shared(300, 0.05)
    assert all(rate > 0 for rate in gate.estimates.rates().values())


def test_a_slow_page_store_is_slow_also_where_nothing_is_known_of_what_is_behind(
    gate: Gate,
) -> None:
    read(gate, 10.0, times=2)
    assert judged(gate, "first", shared=1000) == 1000
    assert judged(gate, "a", shared=10) == 0, "and it is no trial, while another one is read"


def test_a_part_from_behind_may_take_as_long_as_it_does(gate: Gate) -> None:
    read(gate, 0.001)
    read_shared(gate, 0.9)
    assert judged(gate, "a", shared=1000) == 1000
    with reading(gate, "a", 1000):
        gate.now += 0.6
        assert not gate.l3.seems_stalled(gate.now)
        gate.now += 2 * 0.9 * STEP / 1000
        assert gate.l3.seems_stalled(gate.now)


def test_rates_of_both_are_told(gate: Gate) -> None:
    read(gate, 0.5)
    read_shared(gate, 0.8)
    rates = gate.estimates.rates()
    assert rates["l3_read"] == pytest.approx(2000)
    assert rates["shared_read"] == pytest.approx(1250)


def test_a_look_up_behind_has_time_of_its_own(gate: Gate) -> None:
    """A network that stalls ends no prefetch from local disks."""
    assert gate.may_ask("a", 0)
    with gate.l3.looking():
        gate.now += STALLED_SECONDS / 2
        gate.l3.may_take_longer(0.4)
        gate.now += STALLED_SECONDS / 2 + 0.3
        assert not gate.l3.seems_stalled(gate.now)
        gate.now += 0.2
        assert gate.l3.seems_stalled(gate.now)
