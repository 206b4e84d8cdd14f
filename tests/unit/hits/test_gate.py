"""Which hits are read, which prefetches end, and what is done while L3 does not answer."""

import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcache_backend.plan.profile import preset_profile
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.prefetch import estimates
from hcache_backend.prefetch.estimates import (
    LONGEST_PART_SECONDS,
    STALLED_SECONDS,
    seconds_without_core,
)
from hcache_backend.prefetch.gate import _JUDGED, Gpu
from hcache_backend.prefetch.hit import Hit, Prefetch, Recomputing, State
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.prefetch.times import HitTimes
from tests.unit.hits.gates import (
    STEP,
    Gate,
    at,
    computing_a_thousand_a_second,
    named,
    read,
    reading,
    refused,
    slices,
    takes,
    turn,
)
from tests.unit.partition.pipelines import public_model

# ---- taking and refusing ----


@pytest.mark.parametrize(
    ("seconds", "loading", "wanted", "min_gain", "taken"),
    [
        (0.5, 0.0, False, 1.0, True),
        (2.0, 0.0, False, 1.0, False),
        (0.5, 0.0, False, 1.5, True),
        (0.5, 0.0, False, 3.0, False),
        (0.7, 0.0, False, 1.0, True),
        (0.7, 0.61, False, 1.0, False),
        # Requests wait: a hit counts by the time of the GPU that it saves.
        (5.0, 0.0, True, 1.0, True),
        (0.01, 2.0, True, 1.0, False),
    ],
)
def test_the_faster_one_of_reading_with_its_load_and_computing_is_chosen(
    seconds: float, loading: float, wanted: bool, min_gain: float, taken: bool
) -> None:
    gate = Gate(min_gain=min_gain)
    read(gate, seconds, times=2)
    assert takes(gate, "before anything was computed")
    turn(gate)
    computing_a_thousand_a_second(gate)
    if loading:
        gate.batch_ended(10, 1000, loaded=1000, seconds=loading)
    gate.gpu.wanted = wanted
    assert takes(gate, "a") is taken


@pytest.mark.parametrize(
    ("l3", "recomputing", "taken"),
    [
        # Of the 2.0 s that L3 needs alone, 1.0 s are left where slices take 2.0 s, too.
        (2.0, slices(1.0), True),
        (2.0, slices(1.9), True),
        (2.0, slices(2.1), False),
        (2.0, slices(math.inf), False),
        (2.0, None, False),
        # However well slices do: a prefill is what is known to be no slower.
        (6.0, slices(0.9), True),
        (8.0, slices(0.9), False),
    ],
)
def test_a_hit_is_taken_that_is_sooner_there_if_its_front_is_recomputed(
    l3: float, recomputing: Recomputing | None, taken: bool, gate: Gate
) -> None:
    read(gate, l3, times=2)
    assert takes(gate, "a", recomputing=recomputing) is taken


@given(
    tokens=st.integers(0, 2000),
    read_seconds=st.floats(0, 100, allow_subnormal=False),
    pace=st.sampled_from([0.0, 0.1, 1.0, math.inf]) | st.floats(0, 100),
    reachable=st.sampled_from([0, math.inf]) | st.integers(0, 2000),
    begun=st.booleans(),
)
def test_slices_bring_no_hit_later_than_l3_alone(
    tokens: int, read_seconds: float, pace: float, reachable: float, begun: bool
) -> None:
    hit = Hit(tokens, 0, 1, recomputing=slices(pace), reachable=reachable)
    assert (
        0
        <= Gate().times.seconds_to_have(hit, read_seconds, begun=begun)
        <= read_seconds * (1 + 1e-9)
    )


def test_while_the_front_is_waited_for_l3_is_not_slow(gate: Gate) -> None:
    read(gate, 0.5)
    with reading(gate, "a", 1000):
        gate.l3.part_arrived(500)
        gate.now += 0.25
        gate.l3.paused(4.0)
        gate.now += 4.0
        assert gate.l3.slowdown(gate.now) == 1.0 and not gate.l3.seems_stalled(gate.now)
        gate.l3.need_not_read(500)
    assert gate.estimates.read.seconds(1000) == pytest.approx(0.5)


def test_the_front_of_an_earlier_hit_is_recomputed_first(gate: Gate) -> None:
    """Both would take 1.5 s to read. Slices are as fast as computing, and at one of them at a time:
    each takes 0.43 s with both."""
    recomputing = slices(1.0)
    hit = Hit(1000, 0, 0, 0, recomputing)
    read(gate, 0.75, times=2)
    assert takes(gate, "a", recomputing=recomputing)
    assert takes(gate, "b", recomputing=recomputing)  # 0.86 s
    # After 1.29 s. Computed after 1.0 s, and "a" would be 0.57 s late, "b" 0.14 s.
    assert takes(gate, "c", recomputing=recomputing)
    left = gate.times.seconds_behind(gate.prefetches.hits, hit, gate.now)
    assert left == pytest.approx(12 / 7)
    assert turn(gate, at(gate, "a"), at(gate, "b"), at(gate, "c")) == []
    # Nothing is recomputed of the first one any more: it takes as long as L3 needs.
    gate.verdicts_on([at(gate, "a", reachable=0), at(gate, "b"), at(gate, "c")])
    left = gate.times.seconds_behind(gate.prefetches.hits, hit, gate.now)
    assert left == pytest.approx(0.75 + 9 / 7)


def test_a_turn_estimates_no_more_if_more_hits_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def counted(of: object, name: str) -> None:
        original = getattr(of, name)

        def call(*args: Any, **others: Any) -> Any:
            calls[name] += 1
            return original(*args, **others)

        monkeypatch.setattr(of, name, call)

    counted(HitTimes, "seconds_to_have")
    counted(estimates, "_median")
    found = []
    for hits in (50, 1000):
        gate = Gate()
        read(gate, 0.5, times=2)
        names = [str(number) for number in range(hits)]
        assert all(takes(gate, name) for name in names)
        computing_a_thousand_a_second(gate)
        running = [at(gate, name) for name in names]
        calls.clear()
        for _ in range(2):
            gate.verdicts_on(running[:_JUDGED])
        found.append(dict(calls))
    assert found[0] == found[1]
    assert found[0]["_median"] <= 6 and found[0]["seconds_to_have"] <= 40


def test_reads_that_are_queued_come_first(gate: Gate) -> None:
    read(gate, 0.7)
    assert takes(gate, "a")
    assert not takes(gate, "b")  # 1.4 s; computed, it is there after 1.0 s, and "a" 0.3 s later
    turn(gate)  # the first is done
    assert takes(gate, "c")


def test_a_hit_is_taken_whose_computing_would_delay_others_that_are_read(gate: Gate) -> None:
    read(gate, 0.4)
    assert all(takes(gate, name) for name in "ab")
    # Of 1.0 s of computing "a" would wait for 0.6 s and "b" for 0.2 s.
    assert takes(gate, "c")  # after 1.2 s
    assert takes(gate, "d")  # after 1.6 s
    assert not takes(gate, "e")  # after 2.0 s
    assert turn(gate, *(at(gate, name) for name in "abcd")) == []
    assert turn(gate, at(gate, "d")) == []  # they were aborted


def test_what_the_gpu_computes_already_comes_first(gate: Gate) -> None:
    read(gate, 1.5)
    assert not takes(gate, "a")
    first = gate.batch_launched(700, 0, 0)
    assert takes(gate, "b")
    turn(gate)
    gate.now += 0.3
    assert not takes(gate, "c")  # 0.4 s are left of it
    second = gate.batch_launched(500, 0, 0)
    assert takes(gate, "d")
    turn(gate)
    gate.gpu.end_work(first)  # 0.4 s sooner than expected
    gate.now += 0.1
    assert gate.gpu.seconds_busy(gate.now) == pytest.approx(0.4)
    gate.gpu.end_work(second)
    assert gate.gpu.seconds_busy(gate.now) == 0.0


def test_work_of_the_gpu_whose_end_nobody_told_is_over_with_the_next(gate: Gate) -> None:
    gpu = Gpu(lambda: gate.now)
    gpu.add_work(5.0)
    second = gpu.add_work(1.0)
    gate.now += 1.0
    assert gpu.seconds_busy(gate.now) == pytest.approx(5.0)
    gpu.end_work(second)
    assert gpu.seconds_busy(gate.now) == 0.0
    gpu.add_work(2.0)
    gate.now += 3.0
    assert gpu.seconds_busy(gate.now) == 0.0


# ---- running prefetches ----


@pytest.mark.parametrize(
    ("l3", "recomputing", "turns"),
    # Seconds of L3 for a thousand tokens, and of slices. Of each turn: the time since the read
    # began, tokens that have arrived, more about the prefetch, and whether it ends.
    [
        pytest.param(
            0.5,
            None,
            [(0.2, 512, {}, False), (0.5, 512, {}, False), (1.0, 640, {}, True)],
            id="l3 became slow",
        ),
        # Slower than it should have been, and as fast as computing.
        pytest.param(
            0.9, None, [(1.1, 896, {}, False), (1.1, 1024, {}, False)], id="little is left"
        ),
        # It is read from the back: without the rest, only its front counts.
        pytest.param(
            0.5,
            None,
            [(1.0, 512, {"lost": 512}, False), (1.0, 512, {}, True)],
            id="what arrived would be lost",
        ),
        pytest.param(0.5, slices(1.2), [(0.9, 128, {}, False)], id="its front is recomputed"),
        pytest.param(0.5, None, [(0.9, 128, {}, True)], id="its front is not recomputed"),
        # All of it would take 2.0 s; the front has come so far that a tenth of that is left.
        pytest.param(
            2.0, slices(1.0), [(0.6, 896, {"lost": 256}, False)], id="its front was recomputed"
        ),
        # L3 alone would take 2.0 s, and computing 1.0 s.
        pytest.param(
            2.0,
            slices(1.0),
            [(0.1, 0, {"reachable": tokens}, tokens < 700) for tokens in (1000, 700, 100, 0)],
            id="slices do not reach its front",
        ),
    ],
)
def test_a_prefetch_ends_if_going_on_is_slower_than_computing_what_is_left(
    l3: float,
    recomputing: Recomputing | None,
    turns: list[tuple[float, int, dict[str, Any], bool]],
    gate: Gate,
) -> None:
    read(gate, l3, times=2)
    assert takes(gate, "a", 1024, recomputing=recomputing)
    began, before = gate.now, 0
    with reading(gate, "a", 1024):
        for seconds, arrived, how, ends in turns:
            gate.now = began + seconds
            gate.l3.part_arrived(arrived - before)
            before = arrived
            assert gate.verdicts_on([at(gate, "a", arrived, **{"lost": 0} | how)]) == [ends, False]


def test_a_read_that_is_in_time_does_not_end_shortly_before_it_is_there(gate: Gate) -> None:
    """Nothing of it has arrived yet, and computing turned out faster since it was taken."""
    read(gate, 0.95)
    assert takes(gate, "a", 1000)
    for _ in range(3):
        gate.batch_ended(1000, 0, 0, 0.6)
    with reading(gate, "a", 1000, step=1000):
        gate.now += 0.8
        assert turn(gate, at(gate, "a", step=1000)) == []
        gate.now += 0.4  # a quarter late: perhaps it hangs
        assert turn(gate, at(gate, "a", step=1000)) == ["a"]
    assert refused(gate, "a")
    gate.prefetches.forget_request("a")  # a new request may have its name
    assert not refused(gate, "a")


def test_a_prefetch_does_not_end_for_a_slightly_smaller_part_of_l3(gate: Gate) -> None:
    """Taken with a little more than the least part; then slices get a tenth faster."""
    pace = 0.9e-3
    read(gate, 0.9 * 0.87 / 0.13, times=2)  # the part of L3 is 0.13
    assert takes(gate, "a", recomputing=lambda tokens, prefix: pace * tokens)
    pace *= 0.9
    with reading(gate, "a", 1000):
        gate.now += 0.1
        assert turn(gate, at(gate, "a")) == []
    turn(gate)
    assert not takes(gate, "b", recomputing=lambda tokens, prefix: pace * tokens)


def test_while_requests_wait_a_prefetch_goes_on_that_saves_the_gpu_time(gate: Gate) -> None:
    read(gate, 5.0)
    gate.gpu.wanted = True
    assert takes(gate, "a")
    assert turn(gate, at(gate, "a")) == []
    gate.gpu.wanted = False
    assert turn(gate, at(gate, "a")) == ["a"]


def test_what_is_worth_nothing_in_parts_does_not_end_for_being_slow(gate: Gate) -> None:
    read(gate, 0.5)
    assert takes(gate, "a", 1024)
    with reading(gate, "a", 1024):
        gate.now += 0.6
        assert turn(gate, at(gate, "a", whole=True)) == []
        gate.now += 5.0
        assert turn(gate, at(gate, "a", whole=True)) == ["a"]  # it hangs


def test_the_read_of_a_prefetch_that_ended_is_no_reason_to_end_others(gate: Gate) -> None:
    """It had read for long, and was not behind."""
    read(gate, 5.0)
    gate.gpu.wanted = True
    assert takes(gate, "a") and takes(gate, "b")
    with reading(gate, "a", 1000):
        gate.now += 4.0
        gate.l3.part_arrived(768)
        assert turn(gate, at(gate, "a", 768), at(gate, "b")) == []
        gate.now += 0.5
        assert turn(gate, at(gate, "b")) == []  # the other one's request was aborted
        assert gate.may_ask("c", 0)


# ---- L3 that does not answer ----


@pytest.mark.parametrize("wanted", [False, True])
def test_while_a_read_is_stalled_everything_ends_and_nothing_is_asked(
    gate: Gate, wanted: bool
) -> None:
    read(gate, 0.001)
    gate.gpu.wanted = wanted
    assert takes(gate, "a") and takes(gate, "b")
    with reading(gate, "a", 1000):
        gate.now += STALLED_SECONDS + 0.01
        assert turn(gate, at(gate, "a"), at(gate, "b")) == ["a", "b"]
        assert not gate.may_ask("c", 0)
        assert not gate.tokens_to_read(Prefetch("c"), 1000, 1000)
        gate.now += 3600
        assert turn(gate) == []
        assert not gate.may_ask("c", 0)
    turn(gate)
    assert gate.may_ask("c", 0)


def test_reads_that_hung_teach_no_patience(gate: Gate) -> None:
    read(gate, 3600.0, times=2)
    gate.gpu.wanted = True
    assert takes(gate, "a")
    with reading(gate, "a", 1000):
        gate.now += 2 * LONGEST_PART_SECONDS + STALLED_SECONDS + 0.01
        assert turn(gate, at(gate, "a")) == ["a"]


def test_a_part_may_take_as_long_as_computing_it() -> None:
    """Plain pages come 128 at a time, which here are a prefill of 40 s."""
    gate = Gate()
    gate.batch_ended(1000, 0, 0, 40.0)
    read(gate, 20.0, times=2)
    assert takes(gate, "a")
    with reading(gate, "a", 1000, step=1000):
        gate.now += 20.0
        assert turn(gate, at(gate, "a", step=1000)) == []
        gate.now += 20.0 + STALLED_SECONDS + 0.01
        assert turn(gate, at(gate, "a", step=1000)) == ["a"]


def test_a_read_whose_parts_come_is_not_stalled_though_nobody_looked(gate: Gate) -> None:
    """The scheduler is in one long step, and its turns come late."""
    read(gate, 1.0, tokens=2000)
    gate.gpu.wanted = True
    assert takes(gate, "a") and takes(gate, "b")
    with reading(gate, "a", 1000):
        for _ in range(7):
            gate.now += 0.3
            gate.l3.part_arrived(STEP)
        assert takes(gate, "c")


def test_a_part_of_a_read_takes_its_share_of_it_whatever_small_reads_take() -> None:
    """By the profile L3 is a fast disk; whole hits show that it is a slow one by now."""
    machine = Restore(preset_profile("h100", 1), public_model("llama-2-7b"), Partition(0, 0, 32))
    gate = Gate(machine)
    read(gate, 16.0, tokens=1024, times=3)
    with reading(gate, "a", 1024):
        assert gate.l3.seconds_to_read(STEP) == pytest.approx(2.0, rel=0.01)
        for _ in range(4):
            gate.now += 2.0
            assert not gate.l3.seems_stalled(gate.now)
            assert gate.l3.slowdown(gate.now) == pytest.approx(1.0, rel=0.01)
            gate.l3.part_arrived(STEP)
        assert gate.l3.seconds_to_read(STEP) == pytest.approx(2.0, rel=0.01)
        assert gate.l3.seconds_left_in_time(gate.now) == pytest.approx(8.0, rel=0.01)
        gate.now += 4.0 + STALLED_SECONDS + 0.1
        assert gate.l3.seems_stalled(gate.now)


def test_a_gate_that_takes_all_hits_measures_them_and_ends_none() -> None:
    """Slices need the speed of L3 also with ``min_gain: 0``."""
    gate = computing_a_thousand_a_second(Gate(min_gain=0.0))
    read(gate, 50.0, times=2)
    assert gate.estimates.read.seconds(1000) == pytest.approx(50.0)
    assert takes(gate, "slow")
    with reading(gate, "slow", 1000):
        gate.now += 1000.0
        assert gate.l3.seems_stalled(gate.now)
        assert turn(gate, named(gate, "slow")) == []
        assert takes(gate, "behind it")


def test_an_unknown_speed_is_bounded_by_the_present_read() -> None:
    """It counted as infinitely slow: a front was computed that was read sooner."""
    gate = Gate()
    assert gate.l3.seconds_to_read(1000) == 0.0
    with reading(gate, "first", 1000, step=100):
        assert gate.l3.seconds_to_read(1000) == 0.0
        gate.now += 1.0  # nothing came, so 100 tokens take a second at least
        assert gate.l3.seconds_to_read(1000) == gate.l3.seconds_to_read(1000, longest=True) == 10.0
        gate.l3.part_arrived(100)
        assert gate.l3.seconds_to_read(900) == pytest.approx(4.5)
        assert gate.l3.seconds_to_read(900, longest=True) == pytest.approx(9.0)
        gate.l3.part_begins(400)
        assert gate.l3.seconds_to_read(500) == pytest.approx(1.0)
    read(gate, 2.0)
    assert gate.l3.seconds_to_read(1000) == pytest.approx(2.0)


def test_an_index_that_hangs_is_stalled_as_well(gate: Gate) -> None:
    assert gate.may_ask("a", 0)
    with gate.l3.looking_up():
        gate.now += STALLED_SECONDS / 2
        assert turn(gate, at(gate, "a")) == []
        gate.now += STALLED_SECONDS
        assert turn(gate, at(gate, "a")) == ["a"]
    assert turn(gate) == []
    assert gate.may_ask("b", 0)


def test_a_look_up_without_a_core_is_not_the_disks_fault(gate: Gate) -> None:
    gate.core = 5.0  # before the look-up
    with gate.l3.looking_up():
        for now, core, stalled in ((0.6, 0.0, True), (0.6, 0.2, False), (3.0, 2.6, False)):
            gate.core = 5.0 + core
            assert gate.l3.seems_stalled(gate.now + now) == stalled
        assert gate.l3.seems_stalled(gate.now + 3.2)


def test_linux_tells_how_long_a_thread_waited_for_a_core() -> None:
    """Two busy processes share the core of this thread, and take it from it."""
    own, thread = os.sched_getaffinity(0), threading.get_native_id()
    busy = [sys.executable, "-c", "while True: pass"]
    before, start = seconds_without_core(thread), time.monotonic()
    others = []
    try:
        os.sched_setaffinity(0, [min(own)])
        others = [subprocess.Popen(busy) for _ in range(2)]
        while (waited := seconds_without_core(thread) - before) < 0.2:
            assert time.monotonic() < start + 60
    finally:
        os.sched_setaffinity(0, own)
        for other in others:
            other.kill()
            other.wait()
    assert waited < time.monotonic() - start
    assert seconds_without_core(1 << 30) == 0.0, "no such thread"


def test_what_another_rank_sees_counts(gate: Gate) -> None:
    read(gate, 0.001)
    assert takes(gate, "a") and takes(gate, "b")
    running = [at(gate, "a"), at(gate, "b")]
    assert gate.verdicts_on(running) == [False, False, False]
    gate.apply_verdicts(running[1:], stalled=False)
    assert [one.state for one in running] == [State.ASKED, State.ENDED]
    gate.apply_verdicts(running[:1], stalled=True)
    assert running[0].refused
    assert not gate.may_ask("c", 0)


# ---- records of prefetches ----


def test_refusals_are_remembered_of_the_last_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcache_backend.prefetch.prefetches._REMEMBERED", 2)
    prefetches = Prefetches()
    for name in "abc":
        prefetches.refuse(Prefetch(name), State.REFUSED)
    assert [prefetches.add_request(name, 0, None).refused for name in "abc"] == [False, True, True]


class Operation:
    request_id = "a"


def test_the_prefetch_of_an_operation_is_one_record_while_the_operation_lives() -> None:
    prefetches = Prefetches()
    first, later, others = Operation(), Operation(), Operation()
    asked = prefetches.add_request("a", 5, None)
    assert prefetches.prefetch_of(first) is prefetches.prefetch_of(first) is asked
    again = prefetches.add_request("a", 7, None)  # SGLang asks once more
    assert (prefetches.prefetch_of(first), prefetches.prefetch_of(later)) == (asked, again)
    prefetches.waiting.clear()  # as the gate does with prefetches that are over
    assert prefetches.prefetch_of(others) is not again
    del first
    assert len(prefetches._by_operation) == 2


@pytest.mark.parametrize(
    ("seconds", "meeting", "states"),
    [
        (0.5, None, [State.ASKED, State.READING, State.DONE]),
        (0.5, Meeting(), [State.ASKED, State.MEETING, State.DONE]),
        (5.0, None, [State.REFUSED] * 3),
    ],
)
def test_states_of_a_prefetch_from_the_question_to_its_end(
    seconds: float, meeting: Meeting | None, states: list[State], gate: Gate
) -> None:
    read(gate, seconds, times=2)
    gate.may_ask("a", 0)
    prefetch = named(gate, "a")
    prefetch.meeting = meeting
    assert prefetch.state == State.ASKED
    gate.tokens_to_read(prefetch, 1000, 1000)
    found = [prefetch.state]
    with reading(gate, "a", 1000):
        found.append(prefetch.state)
    gate.read_ends()  # it has ended already
    assert [*found, prefetch.state] == states
