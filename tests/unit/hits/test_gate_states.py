"""Requests, reads and turns in any order: what holds for all hits at all times."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hcache_backend.engine.hits.gate import HitGate, Running

STEP, TOKENS = 100, 1000


class Hits(RuleBasedStateMachine):
    """HiCache's threads around a gate: one look-up and one read at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gate = HitGate(None, "test", 1.0, lambda: self.now)
        self.requests = 0
        self.waiting: list[str] = []  # to be looked up
        self.arrived: dict[str, int] = {}  # of prefetches, in the order in which they are read
        self.taken: dict[str, int] = {}  # of their hits
        self.refused: set[str] = set()
        self.reads: str | None = None

    @rule(wanted=st.booleans())
    def requests_wait_for_the_gpu(self, wanted: bool) -> None:
        self.gate.gpu.wanted = wanted

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(tokens=st.integers(1, 2000), seconds=st.floats(0.01, 10))
    def a_batch_is_computed(self, tokens: int, seconds: float) -> None:
        self.gate.prefilled(tokens, 0, 0, seconds)

    @rule()
    def a_request_comes(self) -> None:
        self.requests += 1
        name = str(self.requests)
        if self.gate.may_ask(name, 0):
            self.waiting.append(name)
        else:
            assert self.gate.agreed_overdue

    @precondition(lambda self: self.waiting)
    @rule()
    def l3_is_asked(self) -> None:
        name = self.waiting.pop(0)
        assert not self.gate.was_refused(name)
        taken = self.gate.takes(name, TOKENS, TOKENS, page=STEP)
        assert taken % STEP == 0 and taken <= TOKENS
        if taken:
            self.arrived[name], self.taken[name] = 0, taken
        else:
            self.refused.add(name)

    @precondition(lambda self: self.arrived and self.reads is None)
    @rule()
    def a_read_begins(self) -> None:
        self.reads = next(iter(self.arrived))
        self.gate.read_begins(self.reads, self.taken[self.reads], STEP)

    @precondition(lambda self: self.reads is not None)
    @rule()
    def pages_arrive(self) -> None:
        self.gate.l3.arrived(STEP)
        if self.reads in self.arrived and self.arrived[self.reads] < self.taken[self.reads]:
            self.arrived[self.reads] += STEP

    @precondition(lambda self: self.reads is not None)
    @rule()
    def a_read_ends(self) -> None:
        self.gate.read_ends()
        self.arrived.pop(self.reads or "", None)
        self.reads = None

    @rule(other_rank=st.sampled_from(["agrees", "ends the first"]))
    def a_turn(self, other_rank: str) -> None:
        running = [Running(name, arrived, STEP, False) for name, arrived in self.arrived.items()]
        running += [Running(name, 0, STEP, False) for name in self.waiting]
        mine = self.gate.to_end(running)
        verdicts = list(mine)
        if other_rank == "ends the first" and running:
            verdicts[0] = True
        *ends, overdue = verdicts
        assert not overdue or all(ends), "nobody waits for L3"
        ended = [one.request_id for one, end in zip(running, ends, strict=True) if end]
        self.gate.agreed(ended, overdue)
        for name in ended:
            self.refused.add(name)
            self.arrived.pop(name, None)
            if name in self.waiting:
                self.waiting.remove(name)

    @invariant()
    def what_was_refused_stays_refused(self) -> None:
        assert all(self.gate.was_refused(name) for name in self.refused)
        assert not any(self.gate.was_refused(name) for name in (*self.arrived, *self.waiting))


Hits.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHits = Hits.TestCase
