"""A disk that becomes slow, and good again: what reads and trials teach."""

from __future__ import annotations

import pytest

from hcache_backend.prefetch.costs import Recomputing
from hcache_backend.prefetch.eager import batch_pages
from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.trials import LONGEST_TRIAL_SECONDS, TRIAL_REFUSALS, TRIAL_SECONDS
from tests.unit.hits.gates import STEP, Clock, at, read, reading, takes, tries, turn


def test_a_disk_that_became_slow_is_noticed_by_two_reads(gate: HitGate, clock: Clock) -> None:
    for _ in range(30):
        read(gate, clock, 0.1)
    for _ in range(2):
        read(gate, clock, 10.0)
    assert not takes(gate, "a")


def trial(gate: HitGate, clock: Clock, name: str, seconds: float) -> None:
    """A part of a hit is read although L3 was slow, all of which would take ``seconds``."""
    part = tries(gate, name)
    with reading(gate, name, part):
        gate.l3.arrived(part)
        clock.now += seconds * part / 1000
    turn(gate)


def whole_trial(gate: HitGate, clock: Clock, name: str, seconds: float) -> None:
    """After a trial that was fast all of a hit is read, in ``seconds``."""
    assert takes(gate, name)
    with reading(gate, name, 1000):
        gate.l3.arrived(1000)
        clock.now += seconds
    turn(gate)


def test_a_disk_that_is_good_again_is_noticed_by_a_part_of_a_hit_and_a_whole_one(
    gate: HitGate, clock: Clock
) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    assert not takes(gate, "a")
    clock.now += TRIAL_SECONDS + 1
    trial(gate, clock, "b", 0.05)
    whole_trial(gate, clock, "c", 0.05)
    assert takes(gate, "d")


@pytest.mark.parametrize("seconds", [0.05, 1.5, 10.0])
def test_a_trial_of_which_nothing_was_read_is_judged_by_the_time_that_it_took(
    gate: HitGate, clock: Clock, seconds: float
) -> None:
    """A draft's pages come first. Meanwhile K and V of the model were all recomputed."""
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    assert gate.may_ask("a", 0, lambda tokens, prefix: 0.1)
    assert gate.takes("a", 1000, 1000, page=0) == 1000
    with reading(gate, "a", 1000):
        clock.now += seconds
        gate.l3.spared(1000)
    turn(gate)
    assert gate.may_ask("b", 0, lambda tokens, prefix: 0.1)
    assert gate.takes("b", 1000, 1000, page=0) == (1000 if seconds < 1 else 0)


def test_where_the_whole_hit_is_slow_trials_begin_anew(gate: HitGate, clock: Clock) -> None:
    """Its part came from a cache."""
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    trial(gate, clock, "a", 0.05)
    whole_trial(gate, clock, "b", 10.0)
    clock.now += TRIAL_SECONDS - 1
    for number in range(TRIAL_REFUSALS):
        assert not takes(gate, f"refused {number}")
    clock.now += 2
    tries(gate, "d")


def test_a_slow_disk_is_tried_less_and_less_often(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    pause = TRIAL_SECONDS
    for name in "abcdefgh":
        clock.now += pause - 1
        for number in range(TRIAL_REFUSALS):
            assert not takes(gate, f"before {name} {number}")
        clock.now += 2
        trial(gate, clock, name, 10.0)
        pause = min(2 * pause, LONGEST_TRIAL_SECONDS)
    assert pause == LONGEST_TRIAL_SECONDS


def test_where_requests_are_rare_few_of_them_try_a_slow_disk(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    trial(gate, clock, "first", 10.0)
    for number in range(TRIAL_REFUSALS):
        clock.now += LONGEST_TRIAL_SECONDS
        assert not takes(gate, f"refused {number}")
    clock.now += 1
    trial(gate, clock, "second", 10.0)


def test_a_fast_disk_is_not_tried_for_a_hit_whose_load_is_slow(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 0.4)
    gate.prefilled(10, 1000, loaded=1000, seconds=2.0)
    clock.now += TRIAL_SECONDS + 1
    assert not takes(gate, "a")


def test_a_trial_counts_the_load_too(gate: HitGate, clock: Clock) -> None:
    """Reading alone would be sooner than computing, reading and loading are not."""
    gate.prefilled(10, 1000, loaded=1000, seconds=0.81)
    for _ in range(2):
        read(gate, clock, 0.4)
    assert not takes(gate, "a")
    clock.now += TRIAL_SECONDS + 1
    trial(gate, clock, "b", 0.4)
    assert not takes(gate, "c")


def test_a_trial_that_its_client_ends_says_nothing_of_the_disk(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    for name in "ab":
        clock.now += TRIAL_SECONDS + 1
        with reading(gate, name, tries(gate, name)):
            clock.now += 0.01
        turn(gate)


def test_a_trial_of_a_slow_disk_takes_a_twentieth_of_what_computing_the_hit_takes(
    gate: HitGate, clock: Clock
) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    part = tries(gate, "a")
    assert part * 10.0 / 1000 <= 0.05 * 1.0
    assert not takes(gate, "b"), "one at a time"
    with reading(gate, "a", part, step=part):
        clock.now += 0.049
        assert turn(gate, at("a", step=part)) == []
        clock.now += 0.01  # it is slower than it was
        assert turn(gate, at("a", step=part)) == ["a"]


def test_a_trial_is_at_least_a_page(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    assert gate.takes("a", 1024, 1024, page=64) == 64


@pytest.mark.parametrize("recomputing", [None, lambda tokens, prefix: 1e-3 * tokens])
def test_a_trial_of_a_page_ends_when_computing_it_would_be_there(
    gate: HitGate, clock: Clock, recomputing: Recomputing | None
) -> None:
    """Its client does not wait until the page is there, which of a short hit is much."""
    page = 64
    step = page * batch_pages(1)
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    assert gate.may_ask("a", 0, recomputing)
    assert gate.takes("a", 512, 512, page=page) == page
    computing = gate.costs.prefill.seconds(page, 0)
    assert computing is not None
    with reading(gate, "a", page, step=step):
        clock.now += computing
        assert turn(gate, at("a", step=step)) == []
        clock.now += 0.5 * computing
        assert turn(gate, at("a", step=step)) == ["a"]


def test_what_is_worth_nothing_in_parts_is_tried_whole(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    assert gate.takes("a", 1000, 1000, page=0) == 1000


def test_a_whole_trial_of_a_good_disk_goes_on(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    trial(gate, clock, "a", 0.5)
    assert takes(gate, "b")
    with reading(gate, "b", 1000):
        for arrived in range(0, 1000, STEP):
            assert turn(gate, at("b", arrived)) == []
            clock.now += 0.05


def test_reads_that_end_after_their_first_part_count_as_whole_ones(
    gate: HitGate, clock: Clock
) -> None:
    for _ in range(30):
        read(gate, clock, 0.1)
    for _ in range(2):
        with reading(gate, "a", 1000):
            clock.now += 1.0
            gate.l3.arrived(100)
    assert not takes(gate, "b")


def test_reads_that_fail_slowly_are_slow_ones(gate: HitGate, clock: Clock) -> None:
    read(gate, clock, 0.1)
    for _ in range(2):
        with reading(gate, "a", 1000):
            clock.now += 5.0
    assert not takes(gate, "b")


def test_reads_that_fail_at_once_are_not_fast_ones(gate: HitGate, clock: Clock) -> None:
    for _ in range(2):
        read(gate, clock, 5.0)
    for _ in range(5):
        with reading(gate, "a", 1000):
            clock.now += 0.001
    assert not takes(gate, "b")


def test_a_trial_says_how_fast_the_disk_is_though_its_front_was_recomputed(
    gate: HitGate, clock: Clock
) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    part = tries(gate, "a")
    with reading(gate, "a", part):
        gate.l3.arrived(part // 2)
        clock.now += 0.05 * part / 2000
        gate.l3.spared(part - part // 2)
    turn(gate)
    whole_trial(gate, clock, "b", 0.05)
    assert takes(gate, "c")


def test_a_hit_that_was_recomputed_before_it_was_read_says_nothing_of_the_disk(
    gate: HitGate, clock: Clock
) -> None:
    for _ in range(2):
        read(gate, clock, 10.0)
    clock.now += TRIAL_SECONDS + 1
    part = tries(gate, "a")
    rates = gate.costs.rates()
    with reading(gate, "a", part):
        gate.l3.spared(part)
    turn(gate)
    assert gate.costs.rates() == rates
    clock.now += TRIAL_SECONDS + 1
    tries(gate, "b")
