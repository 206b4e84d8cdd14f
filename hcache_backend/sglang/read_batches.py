"""Prefetches in smaller batches than SGLang's 128 pages, so that the first pages are known earlier.

SGLang's storage thread reports every batch, its sync thread reduces the reports of all ranks one by
one, and the scheduler sees them. Smaller batches add reports of the same kind. A prefetch with a
recomputed front is read from the back, and has reports of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
        self._pass_on = report
        self._pages = 0  # of the present prefetch, from the first one on, that are there
        self._reports = 0
        self._first = True  # no read of the present prefetch yet
        self._seconds_per_page = math.inf  # of the first read of the last prefetch

    def transfer(self, operation: Any, transfer: Callable[[], Any]) -> Any:
        """Read a prefetch by ``transfer()``, with :meth:`read` for each batch. Every rank makes the
        same number of reports, even if it reads less: they are reduced together."""
        self._pages = self._reports = 0
        self._first = True
        pages = len(operation.hash_value)
        step = batch_pages(pages)
        batches = (min(STORAGE_BATCH_SIZE, pages - i) for i in range(0, pages, STORAGE_BATCH_SIZE))
        due = sum((batch - 1) // step for batch in batches)  # the last one of each is SGLang's
        result = transfer()
        while self._reports < due:
            self._report(operation)
        return result

    def read(
        self,
        read: Callable[..., int],
        operation: Any,
        hash_values: Any,
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> int:
        """Call ``read(operation, hash_values, host_indices, extra_info)`` in smaller batches.
        Returns the number of leading pages that are there. Pages behind a missing one are read,
        too: so the store finds all damaged pages at once, and they are written again."""
        step, start, got, whole = batch_pages(len(operation.hash_value)), 0, 0, True
        while start < len(hash_values):
            if start:
                self._report(operation)
                if operation.is_terminated():
                    break
            keys = hash_values[start : start + step * self._steps(step)]
            tokens = slice(start * self._size, (start + len(keys)) * self._size)
            info = _after(extra_info or HiCacheStorageExtraInfo(), hash_values[:start])
            here = self._timed(read, operation, keys, host_indices[tokens], info)
            start += len(keys)
            if whole:
                got += here
                self._pages += here
            whole = whole and here == len(keys)
        return got

    def transfer_from_back(
        self,
        read: Callable[..., int],
        operation: Any,
        meeting: Meeting,
        until_met: Callable[[Meeting, int], tuple[float, float]],
    ) -> None:
        """Read a prefetch from its last page to the meeting, by ``read`` as in :meth:`read`. Every
        rank makes the same number of reports, even if it reads less. ``until_met`` is
        :meth:`.EagerLoads.until_met`: pages that the front would reach sooner are left to it."""
        keys, before = operation.hash_value, list(operation.prefix_keys or ())
        step, start, end = batch_pages(len(keys)), len(keys), len(keys)
        meeting.begin(len(keys))
        self._first = True
        for _ in range(0, len(keys), step):
            left = step * self._steps(step)  # till the next report
            while left and (part := self._part(operation, meeting, until_met)):
                pages = meeting.next_batch(min(left, part))
                if not pages:
                    break
                left -= len(pages)
                tokens = slice(pages.start * self._size, pages.stop * self._size)
                info = HiCacheStorageExtraInfo(prefix_keys=before + keys[: pages.start])
                there = keys[pages.start : pages.stop]
                got = self._timed(read, operation, there, operation.host_indices[tokens], info)
                start, end = pages.start, end if got == len(pages) else pages.start + got
            report = BackAck(operation.request_id, operation)
            report.start, report.end = start, end
            self._pass_on(report)

    def _steps(self, step: int) -> int:
        """Number of steps of ``step`` pages to read at once. Every step is reported all the same,
        so ranks with other disks may read differently."""
        wanted = _LEAST_SECONDS / (step * self._seconds_per_page)
        return min(max(1, math.ceil(wanted)), _MOST_STEPS)

    def _timed(self, read: Callable[..., int], operation: Any, keys: Sequence[str], *a: Any) -> int:
        """``read(operation, keys, *a)``; :meth:`_steps` uses the time of the first read of a
        prefetch. The last read is of the remainder: its fixed cost would count too much."""
        start = time.monotonic()
        got = read(operation, keys, *a)
        if self._first and got == len(keys):
            self._seconds_per_page = max(time.monotonic() - start, 1e-6) / got
        self._first = False
        return got

    def _part(
        self,
        operation: Any,
        meeting: Meeting,
        until_met: Callable[[Meeting, int], tuple[float, float]],
    ) -> int:
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

    def _report(self, operation: Any) -> None:
        self._reports += 1
        there = self._pages * self._size
        self._pass_on(PrefetchAck(operation.request_id, operation, completed_tokens=there))


def _after(info: HiCacheStorageExtraInfo, keys: Sequence[str]) -> HiCacheStorageExtraInfo:
    """SGLang's ``info`` of a batch, for the part of the batch that follows its pages ``keys``."""
    return replace(info, prefix_keys=[*(info.prefix_keys or ()), *keys])
