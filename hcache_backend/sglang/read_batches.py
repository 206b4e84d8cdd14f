"""Prefetches in smaller batches than SGLang's 128 pages, so that the first pages are known earlier.

The storage thread reports every batch, SGLang's sync thread reduces the reports of all ranks one by
one, and the scheduler sees them. A prefetch with a recomputed front is read from the back, and has
reports of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from hcache_backend.prefetch.eager import batch_pages
from hcache_backend.prefetch.prefetch import Meeting, Prefetches

_LOOKING_SECONDS = 1e-3  # between two looks at the progress of the front
_LEAST_SECONDS = 0.01  # of a read, about, because each one has a fixed cost of milliseconds
_MOST_STEPS = 4  # of a read


# read(operation, keys, host_indices, extra_info) gives the number of leading pages that are there
Read = Callable[..., int]
UntilMet = Callable[[Meeting, int], tuple[float, float]]


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


def hear(
    reports: Iterable[PrefetchAck],
    running: Collection[Any],
    prefetches: Prefetches,
    page_size: int,
) -> None:
    """Apply ``reports``, the same on every rank, before the scheduler hears of them. HiCache has
    dealt with prefetches that do not run any more, by the pages that counted then."""
    for report in reports:
        operation = report.operation
        meeting = prefetches.of(operation).meeting
        if isinstance(report, BackAck) and meeting is not None and operation in running:
            meeting.arrived(report.start, report.end)
            operation.completed_tokens = meeting.pages * page_size


class BatchedReads:
    """Reads prefetches in smaller batches, for the storage thread. ``report`` passes a report on to
    SGLang's sync thread; ``waited`` gets seconds without a read."""

    def __init__(
        self,
        page_size: int,
        report: Callable[[PrefetchAck], None],
        waited: Callable[[float], None],
    ) -> None:
        self._size = page_size
        self._waited = waited
        self._report = report
        self._first = True  # no read of the present prefetch yet
        self._seconds_per_page = math.inf  # of the first read of the last prefetch

    def transfer(
        self,
        read: Read,
        operation: Any,
        meeting: Meeting | None = None,
        until_met: UntilMet | None = None,
    ) -> int:
        """Read a prefetch in order, or from its last page to the ``meeting``. Every rank makes the
        same number of reports, even if it reads less: they are reduced together. ``until_met`` is
        :meth:`.EagerLoads.until_met`: pages that the front would reach sooner are left to it.
        Returns the number of leading pages that were read in order and are there."""
        keys, before = operation.hash_value, list(operation.prefix_keys or ())
        step, order, back = batch_pages(len(keys)), _InOrder(len(keys)), range(len(keys), len(keys))
        if meeting is not None:
            meeting.begin(len(keys))
        self._first = True
        for _ in range(0, len(keys), step):
            left = step * self._steps(step)  # till the next report
            while left and not operation.is_terminated():
                if meeting is None or until_met is None:
                    pages = order.next_batch(left)
                else:
                    part = self._part(operation, meeting, until_met)
                    pages = meeting.next_batch(min(left, part)) if part else range(0)
                if not pages:
                    break
                left -= len(pages)
                tokens = slice(pages.start * self._size, pages.stop * self._size)
                info = HiCacheStorageExtraInfo(prefix_keys=before + keys[: pages.start])
                there = keys[pages.start : pages.stop]
                got = self._timed(read, operation, there, operation.host_indices[tokens], info)
                if meeting is None:
                    order.arrived(pages, got)
                else:
                    end = back.stop if got == len(pages) else pages.start + got
                    back = range(pages.start, end)
            rid = operation.request_id
            if meeting is None:
                there = order.there * self._size
                self._report(PrefetchAck(rid, operation, completed_tokens=there))
            else:
                ack = BackAck(rid, operation)
                ack.start, ack.end = back.start, back.stop
                self._report(ack)
        return order.there

    def _steps(self, step: int) -> int:
        """Number of steps of ``step`` pages to read at once. Every step is reported all the same,
        so ranks with other disks may read differently."""
        wanted = _LEAST_SECONDS / (step * self._seconds_per_page)
        return min(max(1, math.ceil(wanted)), _MOST_STEPS)

    def _timed(self, read: Read, operation: Any, keys: Sequence[str], *a: Any) -> int:
        """``read(operation, keys, *a)``; :meth:`_steps` uses the time of the first read of a
        prefetch. The last read is of the remainder: its fixed cost would count too much."""
        start = time.monotonic()
        got = read(operation, keys, *a)
        if self._first and got == len(keys):
            self._seconds_per_page = max(time.monotonic() - start, 1e-6) / got
        self._first = False
        return got

    def _part(self, operation: Any, meeting: Meeting, until_met: UntilMet) -> int:
        """Number of pages to read now; 0 if the prefetch has ended or the two ends have met. If the
        best number is none, wait for the front, but not longer than reading would take."""
        prefix = len(operation.prefix_keys or ()) * self._size
        start = seen = time.monotonic()
        while not operation.is_terminated() and (unread := meeting.unread):
            together, alone = until_met(meeting, prefix)
            part = round(unread * together / alone) if 0 < alone < math.inf else unread
            if part or seen - start > alone:
                return max(1, part)
            time.sleep(_LOOKING_SECONDS)
            before, seen = seen, time.monotonic()
            self._waited(seen - before)  # at once: otherwise L3 would seem overdue
        return 0
