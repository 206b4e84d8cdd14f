"""The number of tokens to recompute in one turn of the scheduler, also beside other requests."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import chain, islice
from typing import NamedTuple

from hcache_backend import metrics
from hcache_backend.prefetch.estimates import Curve, Estimate
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.restore.report import RunningRestore

_UNFINISHED = 2  # slices at most: one runs while the next is launched, and forward passes wait
_LEAST_TOKENS = 256  # of a slice alone: fewer take as long, because all weights are read


class SliceBudget:
    """Bounds a slice: it may take ``seconds`` if it has the GPU alone, and have ``tokens``.
    ``curve``: recomputing all layers, ``in_seconds`` or not; then the first slice is short."""

    def __init__(self, seconds: float, tokens: int, curve: Curve, *, in_seconds: bool) -> None:
        self.tokens = tokens
        self._seconds = seconds
        self._recomputing = Estimate(curve, in_seconds=in_seconds)
        self._launched: deque[tuple[RunningRestore, int]] = deque()  # with the tokens before it

    def pages_of_slice(
        self,
        most: int,
        page_size: int,
        prefix: int,
        share: float = 1.0,
        within: float = math.inf,
        best: float = math.inf,
        first: float = 0.0,
    ) -> int:
        """Number of pages, up to ``most`` (at least 1), that a slice may recompute now, behind
        ``prefix`` tokens, in ``share`` (0 to 1) of the time of a slice alone. 0 unless one page
        would be done in less than ``within`` seconds, behind the slices that were launched; several
        only if they would be done in ``best`` seconds. ``first``: seconds of a page, while no slice
        has been measured."""
        if not share or self.count_unfinished() >= _UNFINISHED:
            return 0
        seconds = self._recomputing.seconds
        queued = sum(seconds(one.tokens, before) or 0.0 for one, before in self._launched)
        page = seconds(page_size, prefix)
        if queued + (first if page is None else page) >= within:
            return 0
        return self._longest(most, page_size, prefix, share, min(within - queued, best))

    def seconds(self, tokens: int, page_size: int, prefix: int) -> float:
        """Seconds to recompute ``tokens`` behind ``prefix`` others, in slices one after the other,
        without other users of the GPU; infinite if unknown. Any thread."""
        middle, most = prefix + tokens // 2, max(1, tokens // page_size)
        pages = self._longest(most, page_size, middle, 1.0, math.inf)
        seconds = self._recomputing.seconds(pages * page_size, middle)
        return math.inf if seconds is None else seconds * tokens / (pages * page_size)

    def _longest(self, most: int, page_size: int, prefix: int, share: float, within: float) -> int:
        """Number of pages, 1 to ``most``, of a slice that ends in ``within`` seconds and in
        ``share`` of its time; at least one. With the whole time (1.0) it has _LEAST_TOKENS if these
        end ``within``."""
        if self._recomputing.seconds(page_size, prefix) is None:
            return 1  # no slice has run yet

        def seconds(pages: int) -> float:
            return self._recomputing.seconds(pages * page_size, prefix) or 0.0

        counts, longest = range(1, most + 1), min(share * self._seconds, within)
        pages = bisect_right(counts, longest, key=seconds)
        if share == 1.0:
            least = counts[: max(1, _LEAST_TOKENS // page_size)]
            pages = max(pages, bisect_right(least, within, key=seconds))
        return max(1, pages)

    def count_unfinished(self) -> int:
        """Number of launched slices that run or wait. Learns the times of those that ended."""
        while self._launched and self._launched[0][0].done():
            restore, prefix = self._launched.popleft()
            if restore.failed is None:
                seconds = max(restore.report().busy_ms("compute") / 1e3, 1e-9)
                self._recomputing.add_time(restore.tokens, prefix, seconds)
        return len(self._launched)

    def add_slice(self, restore: RunningRestore, prefix: int) -> None:
        """A slice was launched behind ``prefix`` tokens."""
        self._launched.append((restore, prefix))


RUNNING_LIMIT = 8  # beside this many running requests nothing is recomputed


class Pace(NamedTuple):
    """The governor's decision."""

    share: float  # 0 to 1: of the time that a slice may take if no request wants the GPU
    decision: str  # the metric's label


_WHOLE = Pace(1.0, "whole")
_WAITING = Pace(0.0, "put_off_waiting")
_BLIND = Pace(*_WAITING)  # from the first error on


class Governor:
    """Keeps recomputation of hits that are still being read out of the way of other requests. A
    slice may take ``1 - running / RUNNING_LIMIT`` of the time that it may take alone, and nothing
    while a request is queued for the GPU, or a prompt is computed in chunks. The governor uses no
    clock, only the state of SGLang's scheduler, which is the same on all tensor-parallel ranks. The
    load of the hit does what was put off, in front of the forward pass that needs it."""

    def __init__(self) -> None:
        self.pace = _WHOLE  # for this turn of the scheduler; any thread

    def update_pace(self, prefetches: Prefetches) -> None:
        """Look at SGLang's scheduler (None until a request comes) when its turn begins."""
        if prefetches.scheduler is None or self.pace is _BLIND:
            return
        pace = _BLIND
        with metrics.catching("governor", "who wants the GPU is not known: no more slices"):
            pace = _pace_beside(prefetches)
        self.pace = pace


def _pace_beside(prefetches: Prefetches) -> Pace:
    """The pace beside the requests that SGLang's scheduler has now."""
    scheduler = prefetches.scheduler
    if scheduler.chunked_req is not None or prefetches.waits_for_gpu():
        return _WAITING
    requests, batch = scheduler.running_batch.reqs, scheduler.last_batch
    if batch is not None and batch.forward_mode.is_extend():  # not among those that run yet
        requests = chain(requests, batch.reqs)
    unfinished = (req for req in requests if not req.finished())
    running = sum(1 for _ in islice(unfinished, RUNNING_LIMIT))
    if running >= RUNNING_LIMIT:
        return Pace(0.0, "put_off_running")
    return Pace(1 - running / RUNNING_LIMIT, "shorter") if running else _WHOLE
