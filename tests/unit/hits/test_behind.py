"""Hits of which a part comes from behind the page store, at another rate."""

from __future__ import annotations

import pytest

from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.progress import OVERDUE_SECONDS
from hcache_backend.prefetch.trials import TRIAL_SECONDS
from tests.unit.hits.gates import STEP, Clock, read, reading, takes, tries, turn


def judged(gate: HitGate, name: str, behind: int, tokens: int = 1000) -> int:
    """How many tokens are taken of a hit whose last ``behind`` tokens are behind the store."""
    assert gate.may_ask(name, 0)
    return gate.takes(name, tokens, tokens, behind)


def read_behind(
    gate: HitGate, clock: Clock, seconds: float, tokens: int = 1000, near: float = 0.0
) -> None:
    """A hit that was taken brings ``tokens`` from behind in ``seconds``, after ``near`` seconds."""
    assert judged(gate, "earlier", tokens, tokens) == tokens
    with reading(gate, "earlier", tokens):
        clock.now += near + seconds
        gate.l3.came_from_behind(tokens, seconds)
        gate.l3.arrived(tokens)
    turn(gate)


def nothing_comes(
    gate: HitGate, clock: Clock, name: str, seconds: float, *, gave_up: bool = False
) -> None:
    """A hit behind, or a part of it, is read, and after ``seconds`` nothing has come."""
    part = judged(gate, name, 1000)
    assert part
    with reading(gate, name, part):
        clock.now += seconds
        gate.l3.came_from_behind(0, seconds, gave_up=gave_up)
    turn(gate)


def test_a_hit_behind_is_read_where_nothing_is_known_of_it(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    assert judged(gate, "a", 1000) == 1000


@pytest.mark.parametrize(("seconds", "taken"), [(0.5, 1000), (2.0, 0)])
def test_the_faster_one_of_reading_behind_and_computing_is_chosen(
    seconds: float, taken: int, gate: HitGate, clock: Clock
) -> None:
    read(gate, clock, 0.001)
    read_behind(gate, clock, seconds)
    assert judged(gate, "a", 1000) == taken


def test_times_of_both_stores_add_up(gate: HitGate, clock: Clock) -> None:
    """Half of a hit from each; to compute it takes 1 s."""
    read(gate, clock, 0.9)
    read_behind(gate, clock, 0.9)
    assert judged(gate, "a", 500) == 1000
    turn(gate)
    for _ in range(2):
        read(gate, clock, 1.3)
    assert judged(gate, "b", 500) == 0


def test_what_the_page_store_has_is_read_although_what_is_behind_is_too_slow(
    gate: HitGate, clock: Clock
) -> None:
    read(gate, clock, 0.1)
    read_behind(gate, clock, 5.0)
    assert judged(gate, "a", 300) == 700
    assert not gate.was_refused("a")
    assert judged(gate, "b", 1000) == 0
    assert gate.was_refused("b")


def test_a_slow_store_behind_says_nothing_of_the_page_store(gate: HitGate, clock: Clock) -> None:
    read(gate, clock, 0.1)
    read_behind(gate, clock, 5.0)
    assert takes(gate, "a")


def test_reads_of_the_page_store_do_not_put_off_a_trial_of_what_is_behind(
    gate: HitGate, clock: Clock
) -> None:
    read(gate, clock, 0.1)
    read_behind(gate, clock, 5.0)
    assert judged(gate, "a", 1000) == 0
    for _ in range(int(TRIAL_SECONDS) + 1):
        clock.now += 0.9
        read(gate, clock, 0.1)
    tries(gate, "b", behind=1000)


def test_a_trial_of_what_is_behind_reads_what_the_page_store_has_and_a_little_more(
    gate: HitGate, clock: Clock
) -> None:
    read(gate, clock, 0.1)
    read_behind(gate, clock, 50.0)
    clock.now += TRIAL_SECONDS + 1
    assert 500 < judged(gate, "a", 500) < 550


def test_a_slow_page_store_is_tried_before_what_is_behind_it(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    read_behind(gate, clock, 50.0)
    clock.now += TRIAL_SECONDS + 1
    assert 0 < judged(gate, "a", 500) < 50


def test_only_the_time_that_it_took_counts_for_each_store(gate: HitGate, clock: Clock) -> None:
    read(gate, clock, 0.1)
    assert judged(gate, "a", 400) == 1000
    with reading(gate, "a", 1000):
        clock.now += 0.06 + 0.3
        gate.l3.came_from_behind(400, 0.3)
        gate.l3.arrived(1000)
    assert gate.costs.read.seconds(1000) == pytest.approx(0.1)
    assert gate.costs.behind.seconds(1000) == pytest.approx(0.75)


def test_a_store_behind_that_gives_nothing_is_slow(gate: HitGate, clock: Clock) -> None:
    read(gate, clock, 0.1)
    for _ in range(5):
        read_behind(gate, clock, 0.2)
    for name in "ab":
        nothing_comes(gate, clock, name, 2.0)
    assert judged(gate, "c", 1000) == 0


def test_a_store_behind_that_is_always_given_up_is_not_waited_for(
    gate: HitGate, clock: Clock
) -> None:
    """Nobody knows how long it would have taken; what it took is less than computing."""
    read(gate, clock, 0.1)
    for _ in range(5):
        read_behind(gate, clock, 0.2)
    for name in "ab":
        nothing_comes(gate, clock, name, 0.2, gave_up=True)
    assert judged(gate, "c", 1000) == 0
    clock.now += TRIAL_SECONDS + 1
    nothing_comes(gate, clock, "trial", 0.2, gave_up=True)
    clock.now += TRIAL_SECONDS + 1
    assert judged(gate, "d", 1000) == 0, "the next trial is later"


def test_rates_stay_positive_where_a_page_is_missing_before_those_from_behind(
    gate: HitGate, clock: Clock
) -> None:
    assert judged(gate, "a", 300) == 1000
    with reading(gate, "a", 1000):
        clock.now += 0.1
        gate.l3.came_from_behind(300, 0.05)
    assert all(rate > 0 for rate in gate.costs.rates().values())


def test_a_slow_page_store_is_slow_also_where_nothing_is_known_of_what_is_behind(
    gate: HitGate, clock: Clock
) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    assert judged(gate, "first", 1000) == 1000
    assert judged(gate, "a", 10) == 0, "and it is no trial, while another one is read"


def test_a_part_from_behind_may_take_as_long_as_it_does(gate: HitGate, clock: Clock) -> None:
    read(gate, clock, 0.001)
    read_behind(gate, clock, 0.9)
    assert judged(gate, "a", 1000) == 1000
    with reading(gate, "a", 1000):
        clock.now += 0.6
        assert not gate.l3.seems_overdue(clock.now)
        clock.now += 2 * 0.9 * STEP / 1000
        assert gate.l3.seems_overdue(clock.now)


def test_rates_of_both_are_told(gate: HitGate, clock: Clock) -> None:
    read(gate, clock, 0.5)
    read_behind(gate, clock, 0.8)
    rates = gate.costs.rates()
    assert rates["l3_read"] == pytest.approx(2000)
    assert rates["shared_read"] == pytest.approx(1250)


def test_a_look_up_behind_has_time_of_its_own(gate: HitGate, clock: Clock) -> None:
    """A network that stalls ends no prefetch from local disks."""
    assert gate.may_ask("a", 0)
    with gate.l3.looking():
        clock.now += OVERDUE_SECONDS / 2
        gate.l3.may_take_longer(0.4)
        clock.now += OVERDUE_SECONDS / 2 + 0.3
        assert not gate.l3.seems_overdue(clock.now)
        clock.now += 0.2
        assert gate.l3.seems_overdue(clock.now)
