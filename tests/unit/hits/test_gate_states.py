"""Requests, reads and turns in any order: what holds for all hits at all times."""

import math
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hcache_backend.prefetch.estimates import LONGEST_PART_SECONDS, STALLED_SECONDS
from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.prefetch import Prefetch as Record
from tests.unit.hits.gates import Gate, at, named

STEP, TOKENS = 100, 1000


@dataclass
class Prefetch:
    """One that L3 is asked for, or that is read.

    Attributes:
        slices: Seconds in which slices recompute a token; None: it is read in order.
        whole: Whether a part of it is worth nothing.
        taken: Tokens that are read.
        front: Tokens that were recomputed.
        back: Tokens that were read, at its end if slices recompute its front.
    """

    slices: float | None
    whole: bool
    taken: int = 0
    front: int = 0
    back: int = 0

    @property
    def arrived(self) -> int:
        return self.front + self.back

    def running(self, gate: HitGate, name: str) -> Record:
        lost = self.back if self.slices is not None and self.arrived < self.taken else 0
        reachable = None if self.slices is None else self.taken - self.front
        return at(gate, name, self.arrived, self.whole, STEP, lost, reachable)


class Hits(RuleBasedStateMachine):
    """HiCache's threads around a gate: one look-up and one read at a time."""

    seen: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.requests = 0
        self.waiting: dict[str, Prefetch] = {}  # to be looked up
        self.read: dict[str, Prefetch] = {}  # in the order in which they are read
        self.tried: set[str] = set()
        self.refused: set[str] = set()
        self.reads: str | None = None

    @rule(wanted=st.booleans())
    def requests_wait_for_the_gpu(self, wanted: bool) -> None:
        self.gate.gpu.wanted = wanted

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.gate.now += seconds

    @rule(tokens=st.integers(1, 2000), seconds=st.floats(0.01, 10))
    def a_batch_is_computed(self, tokens: int, seconds: float) -> None:
        self.gate.prefilled(tokens, 0, 0, seconds)

    @rule(slices=st.sampled_from([None, 1e-4, 1e-3, math.inf]), whole=st.booleans())
    def a_request_comes(self, slices: float | None, whole: bool) -> None:
        self.requests += 1
        name = str(self.requests)
        slices = None if whole else slices
        recomputing = None if slices is None else lambda tokens, prefix: slices * tokens
        if self.gate.may_ask(name, 0, recomputing):
            self.waiting[name] = Prefetch(slices, whole)
        else:
            assert self.gate.agreed_stalled

    @precondition(lambda self: self.waiting)
    @rule()
    def l3_is_asked(self) -> None:
        name = next(iter(self.waiting))
        asked = self.waiting.pop(name)
        record = named(self.gate, name)
        assert not record.refused
        asked.taken = self.gate.takes(record, TOKENS, TOKENS, parts=not asked.whole)
        assert asked.taken % STEP == 0 and asked.taken <= TOKENS
        assert not asked.whole or asked.taken in (0, TOKENS)
        if record.probed is not None:
            self.tried.add(name)
        if asked.taken:
            self.read[name] = asked
        else:
            self.refused.add(name)

    @precondition(lambda self: self.read and self.reads is None)
    @rule()
    def a_read_begins(self) -> None:
        self.reads = next(iter(self.read))
        self.gate.read_begins(named(self.gate, self.reads), self.read[self.reads].taken, STEP)

    @precondition(lambda self: self.reads is not None)
    @rule()
    def pages_arrive(self) -> None:
        self.gate.l3.arrived(STEP)
        read = self.read.get(self.reads or "")
        if read is not None and read.arrived < read.taken:
            read.back += STEP

    @precondition(lambda self: self.read)
    @rule()
    def a_slice_is_launched(self) -> None:
        for read in self.read.values():
            if read.slices not in (None, math.inf) and read.arrived < read.taken:
                read.front += STEP
                return

    @precondition(lambda self: self.reads is not None)
    @rule()
    def a_read_ends(self) -> None:
        self.gate.read_ends()
        self.read.pop(self.reads or "", None)
        self.reads = None

    @rule(other_rank=st.sampled_from(["agrees", "ends the first"]))
    def a_turn(self, other_rank: str = "agrees") -> None:
        running = [read.running(self.gate, name) for name, read in self.read.items()]
        running += [asked.running(self.gate, name) for name, asked in self.waiting.items()]
        *mine, stalled = self.gate.to_end(running)
        assert not stalled or all(mine), "nobody waits for L3"
        for one, end in zip(running, mine, strict=True):
            if end and not stalled:
                assert not self.gate.gpu.wanted, "then the GPU's time counts"
                assert one.request_id in self.tried or not one.whole, "all of it would be lost"
        verdicts = [True, *mine[1:]] if other_rank == "ends the first" and running else mine
        ended = [one for one, end in zip(running, verdicts, strict=True) if end]
        self.gate.agreed(ended, stalled)
        self.seen.update({"stalled"} if stalled else set())
        self.seen.update({"ended"} if any(mine) and not stalled else set())
        for name in (one.request_id for one in ended):
            self.refused.add(name)
            self.read.pop(name, None)
            self.waiting.pop(name, None)

    @precondition(lambda self: self.read)
    @rule()
    def l3_turns_out_to_be_slow(self) -> None:
        """Then the first one ends, if nothing else brings it and what has arrived is of use."""
        for _ in range(3):
            self.gate.prefilled(TOKENS, 0, 0, 1.0)
            self.gate.estimates.read.measured(TOKENS, 0, 1000.0)
        self.gate.gpu.wanted = False
        name, first = next(iter(self.read.items()))
        self.a_turn()
        if not first.whole and first.slices in (None, math.inf) and name not in self.tried:
            assert name not in self.read or first.arrived == first.taken

    @precondition(lambda self: self.reads is not None)
    @rule()
    def l3_hangs(self) -> None:
        """Longer than any part may take: also than computing it."""
        computing = self.gate.estimates.prefill.seconds(STEP) or 0.0
        self.gate.now += 2 * max(LONGEST_PART_SECONDS, computing) + STALLED_SECONDS + 0.1
        self.a_turn()
        assert self.gate.agreed_stalled and not self.read and not self.waiting
        assert not self.gate.may_ask("another", 0)

    @invariant()
    def what_was_refused_stays_refused(self) -> None:
        final = self.gate.prefetches._final
        assert final.keys() == self.refused
        assert not any(named(self.gate, name).refused for name in (*self.read, *self.waiting))

    @invariant()
    def nothing_is_known_that_cannot_be(self) -> None:
        for hit in (asked.rest for asked in self.gate.prefetches.waiting.values()):
            if hit is not None:
                read = self.gate.estimates.least_reading(hit)
                for begun in (False, True):
                    assert 0 <= hit.until_there(read, begun=begun) <= read


def test_requests_reads_and_turns_in_any_order() -> None:
    Hits.seen.clear()
    often = settings(max_examples=80, stateful_step_count=40, deadline=None)
    for _ in range(20):  # a run in four does not get to all
        run_state_machine_as_test(Hits, settings=often)
        if Hits.seen == {"stalled", "ended"}:
            return
    raise AssertionError(f"only seen: {Hits.seen}")
