"""In virtual time: how long a hit takes that is read from the back while its front is computed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.prefetch import reader
from hcache_backend.prefetch import slices as slice_budget
from hcache_backend.prefetch.estimates import Estimates, L3Progress, Reading
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.reader import BatchedReads, batch_pages
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.sglang.reads import apply_reports, as_prefetch_read
from hcache_backend.streams import CallerStream, Door, Stream, through
from tests.engine.in_process.hits.eager_scene import SIZE, Scene, hicache
from tests.kit.prefetch import Operation
from tests.kit.turns import turn_of

TURN = 0.002  # seconds between two turns of the scheduler
SLICE = 0.010  # of the GPU in a turn: the option's default


class NoThreads(Door):
    """Streams of the caller: thousands of servers have too many threads."""

    def new_stream(self, *_: Any, **how: Any) -> Stream:
        return CallerStream()


class Server:
    """A GPU that computes a page in ``computing`` seconds, and an L3 that reads it in ``reading``;
    each read takes ``fixed`` seconds besides."""

    def __init__(self, pages: int, computing: float, reading: float, fixed: float) -> None:
        self.now = self.gpu_free = self._turned = 0.0
        self.computing, self.reading, self.fixed = computing, reading, fixed
        self.l3 = L3Progress(Estimates(), lambda: self.now)
        scene = Scene(need_sort=False, pages=pages + 1)
        self.budget = SliceBudget(SLICE, 2048 * SIZE, self._seconds, in_seconds=True)
        arena = SimpleNamespace(physical=lambda ids: ids, expect_recomputed=lambda *_: None)
        loads = {"recompute_pages": lambda span, slots: slots, "recomputes_pages": True}
        with through(NoThreads()):
            self.eager = scene.loads(
                self.budget,
                {"start_recomputation": self._recompute},
                loads=loads,
                pool={"arena": arena, "save_recomputed": lambda *_: None},
                l3=self.l3,
            )
        self.cache = hicache()
        self.pages = pages

    def _seconds(self, tokens: int, prefix: float) -> float:
        return self.computing * tokens / SIZE

    def _recompute(self, slots: Any) -> Any:
        seconds = self._seconds(len(slots), 0)
        self.gpu_free = end = max(self.gpu_free, self.now) + seconds
        return SimpleNamespace(
            tokens=len(slots),
            failed=None,
            done=lambda: self.now >= end,
            report=lambda: SimpleNamespace(busy_ms=lambda stream: 1e3 * seconds),
            save_recomputed=lambda *_: None,
            copied=SimpleNamespace(query=lambda: self.now >= end),
            wait=lambda: None,
        )

    def sleep(self, seconds: float) -> None:
        """The reader waits; the scheduler goes on."""
        end = self.now + seconds
        while self._turned + TURN <= end:
            self._turned = self.now = max(self.now, self._turned + TURN)
            turn_of(self.eager, self.cache)
        self.now = end

    def read_seconds(self, pages: int) -> float:
        return self.fixed + pages * self.reading

    def read(self, operation: Any, keys: list[str], indices: Any, info: Any) -> int:
        self.sleep(self.read_seconds(len(keys)))
        self.l3.part_arrived(len(keys) * SIZE)
        return len(keys)

    def seconds_of_hit(self, *, slices: bool = True) -> float:
        """A hit of all pages comes; seconds until all of it is there."""
        operation: Any = Operation(self.pages, SIZE)
        meeting = operation.meeting = Meeting() if slices else None
        if slices:
            self.cache.ongoing_prefetch[0] = operation
        tokens, step = self.pages * SIZE, batch_pages(self.pages) * SIZE
        self.l3.reading = Reading(
            Operation.prefetches.prefetch_of(operation), 0, tokens, tokens, step, 0, 0
        )
        report = partial(self._report, operation)
        read = as_prefetch_read(operation, SIZE, self.read, report, from_back=slices)
        batches = BatchedReads(SIZE, self.l3)
        batches.transfer(read, meeting, self.eager.fronts.seconds_until_met)
        assert operation.completed_tokens == tokens or not slices
        return max(self.now, self.gpu_free)

    def _report(self, operation: Any, ack: Any) -> None:
        apply_reports([ack], [operation], Operation.prefetches, SIZE)

    def know(self, pages: int) -> None:
        """A hit was read before."""
        self.l3.estimates.read.add_time(pages * SIZE, 0, self.read_seconds(pages))


speeds = st.floats(-5, -1).map(lambda exponent: 10**exponent)


def seconds(known: bool, slices: bool, *machine: Any) -> float:
    server = Server(*machine)
    if known:
        server.know(server.pages)
    time = SimpleNamespace(monotonic=lambda: server.now, sleep=server.sleep)
    least = patch.object(slice_budget, "_LEAST_TOKENS", 4 * SIZE)  # of four pages, as of 64 tokens
    with patch.object(reader, "time", time), least:
        return server.seconds_of_hit(slices=slices)


@settings(max_examples=100, deadline=None)
@given(st.integers(5, 100), speeds, speeds, st.sampled_from([0.0, 5e-4]), st.booleans())
def test_with_slices_a_hit_takes_as_long_as_the_better_of_reading_and_computing(
    pages: int, computing: float, reading: float, fixed: float, known: bool
) -> None:
    """At most 1.05 times, five turns, and what four more reads cost besides. The first page shows
    the speed of an unknown L3 with that, so a slice may be launched in vain."""
    machine = pages, computing, reading, fixed
    read, both = (seconds(known, slices, *machine) for slices in (False, True))
    first = 0.0 if known else reading + fixed + SLICE
    assert both <= 1.05 * min(read, pages * computing) + 5 * TURN + 4 * fixed + first
