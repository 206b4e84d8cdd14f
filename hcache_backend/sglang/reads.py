"""How HiCache's storage thread reads a prefetch: in smaller batches than SGLang's 128 pages, so
that its first pages are known earlier; from the back, if its front is recomputed. The thread
reports every batch, SGLang's sync thread reduces the reports of all ranks, and the scheduler sees
them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from hcache_backend.prefetch.eager import batch_pages
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.prefetches import Prefetches

_LOOKING_SECONDS = 1e-3  # between two looks at the progress of the front
_LEAST_SECONDS = 0.01  # of a read, about, because each one has a fixed cost of milliseconds
_MOST_STEPS = 4  # of a read

# read(operation, keys, host_indices, extra_info) gives the number of leading pages that are there
Read = Callable[..., int]
UntilMet = Callable[..., tuple[float, float]]  # its arguments are those of Fronts.until_met


class _InOrder:
    """Pages of a prefetch that is read from its first one on. Pages behind a missing one are read,
    too: so the store finds all damaged pages of a batch at once, and they are written again."""

    def __init__(self, pages: int) -> None:
        self.there = 0  # leading pages that are there
        self._next, self._end = 0, pages

    def next_batch(self, most: int) -> range:
        start, self._next = self._next, min(self._next + most, self._end)
        return range(start, self._next)

    def arrived(self, pages: range, got: int) -> None:
        if self.there == pages.start:
            self.there += got
        if got < len(pages):
            self._end = min(self._end, pages.start + STORAGE_BATCH_SIZE)


@dataclass
class BackAck(PrefetchAck):
    """Report of a prefetch that is read from the back: pages ``start`` to ``end`` are there."""

    start: int = 0
    end: int = 0

    def reduce(self, all_reduce: Callable[..., None]) -> None:
        """Keep the pages that all ranks have, by ``all_reduce(tensor, op)``."""
        pages = torch.tensor([-self.start, self.end], dtype=torch.int64)
        all_reduce(pages, dist.ReduceOp.MIN)
        self.start, self.end = -int(pages[0]), int(pages[1])


def apply_reports(
    reports: Iterable[PrefetchAck], running: Collection[Any], prefetches: Prefetches, page_size: int
) -> None:
    """Apply ``reports``, the same on every rank, before the scheduler sees them. HiCache has
    dealt with prefetches that do not run any more, by the pages that counted then."""
    for report in reports:
        operation = report.operation
        meeting = prefetches.of(operation).meeting
        if isinstance(report, BackAck) and meeting is not None and operation in running:
            meeting.arrived(report.start, report.end)
            operation.completed_tokens = meeting.pages * page_size


@dataclass(eq=False)
class BatchedReads:
    """Reads prefetches in smaller batches, for the storage thread."""

    _size: int  # tokens of a page
    _report: Callable[[PrefetchAck], None]  # passes a report on to SGLang's sync thread
    _l3: L3Progress
    _seconds_per_page: float = math.inf  # of the first read of the last prefetch

    def transfer(
        self,
        read: Read,
        operation: Any,
        meeting: Meeting | None = None,
        until_met: UntilMet | None = None,
        *,
        probes: bool = False,
    ) -> int:
        """Read a prefetch in order, or from its last page to the ``meeting``. Every rank makes the
        same number of reports, even if it reads less: they are reduced together. ``until_met`` is
        :meth:`.Fronts.until_met`: pages that the front would reach sooner are left to it. One
        that ``probes`` L3 reads a page first, however slow L3 seems.
        Returns the number of leading pages that were read in order and are there."""
        keys, before = operation.hash_value, list(operation.prefix_keys or ())
        step, order, back = batch_pages(len(keys)), _InOrder(len(keys)), range(len(keys), len(keys))
        first = True
        if meeting is not None:
            meeting.set_pages(len(keys))
        for _ in range(0, len(keys), step):
            left = step * self._steps(step)  # till the next report
            while left and not operation.is_terminated():
                if meeting is None or until_met is None:
                    pages = order.next_batch(left)
                elif first and probes:
                    pages = meeting.next_batch(1)
                else:
                    pages = self._next_back(operation, meeting, until_met, left)
                if not pages:
                    break
                left -= len(pages)
                tokens = slice(pages.start * self._size, pages.stop * self._size)
                info = HiCacheStorageExtraInfo(prefix_keys=before + keys[: pages.start])
                some = keys[pages.start : pages.stop]
                self._l3.reads_next(len(pages) * self._size)
                begin = time.monotonic()
                got = read(operation, some, operation.host_indices[tokens], info)
                if first and got == len(some):
                    self._seconds_per_page = max(time.monotonic() - begin, 1e-6) / got
                first = False
                if meeting is None:
                    order.arrived(pages, got)
                else:
                    end = back.stop if got == len(pages) else pages.start + got
                    back = range(pages.start, end)
            ack = operation.request_id, operation
            if meeting is None:
                self._report(PrefetchAck(*ack, completed_tokens=order.there * self._size))
            else:
                there = BackAck(*ack)
                there.start, there.end = back.start, back.stop
                self._report(there)
        return order.there

    def _steps(self, step: int) -> int:
        """Number of steps of ``step`` pages to read at once; each is reported all the same."""
        return min(math.ceil(_LEAST_SECONDS / (step * self._seconds_per_page)) or 1, _MOST_STEPS)

    def _next_back(self, operation: Any, meeting: Meeting, until_met: UntilMet, most: int) -> range:
        """Pages to read now; none if the prefetch has ended or the two ends have met. If the front
        will have all of them sooner than one is read, wait for it, as long as it gets on."""
        prefix = len(operation.prefix_keys or ()) * self._size
        start, seen, left = 0.0, time.monotonic(), math.inf
        while not operation.is_terminated() and (unread := meeting.unread):
            if unread < left:
                start, left = seen, unread
            together, alone = until_met(meeting, prefix, longest=True)
            sooner = 0 < alone >= together * (unread + 1)  # than one page is read
            if not sooner or seen - start > alone:
                part = int(unread * together / alone) if alone else 1  # which shows the speed
                return meeting.next_batch(min(most, max(1, part)))
            time.sleep(_LOOKING_SECONDS)
            before, seen = seen, time.monotonic()
            self._l3.waited(seen - before)  # at once: otherwise L3 would seem overdue
        return range(0)
