"""Prefetches in smaller batches than SGLang's 128 pages, so that the first pages are known earlier.

SGLang's storage thread reports every batch; its sync thread reduces the reports of all ranks one by
one; the scheduler sees them. Smaller batches are further reports of the same kind between SGLang's.
A prefetch whose front is recomputed is read from the back, and has reports of its own.
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
from hcache_backend.prefetch.meeting import Meeting, meeting_of

_LOOKING_SECONDS = 1e-3
"""Between two looks at how far the front is."""
_LEAST_SECONDS = 0.01
_MOST_STEPS = 4
"""A read takes about so long, or is of so many steps: each costs some milliseconds besides."""


@dataclass
class BackAck(PrefetchAck):
    """Which pages of a prefetch are there, for SGLang's sync thread and then the scheduler.

    Attributes:
        start: The first of them...
        end: ...and the one behind the last.
    """

    start: int = 0
    end: int = 0

    def reduce(self, all_reduce: Callable[..., None]) -> None:
        """Make them those that all ranks have, by ``all_reduce(tensor, op)``."""
        pages = torch.tensor([-self.start, self.end], dtype=torch.int64)
        all_reduce(pages, dist.ReduceOp.MIN)
        self.start, self.end = -int(pages[0]), int(pages[1])


def hear(reports: Iterable[PrefetchAck], running: Collection[Any], page_size: int) -> None:
    """The scheduler is about to hear of ``reports``, the same on every rank.

    What does not run any more HiCache has dealt with: it goes by what counted then.
    """
    for report in reports:
        operation = report.operation
        meeting = meeting_of(operation)
        if isinstance(report, BackAck) and meeting is not None and operation in running:
            meeting.arrived(report.start, report.end)
            operation.completed_tokens = meeting.pages * page_size


class BatchedReads:
    """Reads prefetches in smaller batches and reports each, for the storage thread that reads.

    ``report`` passes a report on to SGLang's sync thread; ``waited`` is told how many seconds the
    storage thread did not read.
    """

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
        """Do what ``transfer()`` does: read a prefetch, with :meth:`read` for each batch of it.

        Every rank makes the same number of reports, however far it gets: they are reduced together.
        """
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
        """Do what ``read(operation, hash_values, host_indices, extra_info)`` does, in batches.

        It gives how many of the pages, from the first one on, are there. ``host_indices`` (int64
        ``[pages * page_size]``) say where they belong. What is behind a missing page is read, too:
        so the store finds all that is damaged at once, and it is written again.
        """
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
        """Read a prefetch from its last page on, by ``read`` as in :meth:`read`, to the meeting.

        Every rank makes the same number of reports, however far it gets. ``until_met`` is
        :meth:`.EagerLoads.until_met`: what the front would reach sooner is left to it.
        """
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
        """How many steps of ``step`` pages to read at once. Every step is reported all the same, so
        that ranks whose disks differ may read differently."""
        wanted = _LEAST_SECONDS / (step * self._seconds_per_page)
        return min(max(1, math.ceil(wanted)), _MOST_STEPS)

    def _timed(self, read: Callable[..., int], operation: Any, keys: Sequence[str], *a: Any) -> int:
        """What ``read(operation, keys, *a)`` gives; :meth:`_steps` goes by how long it took.

        By the first read of a prefetch, that is: the last one is of what is left, and what every
        read costs besides would count too much.
        """
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
        """How many pages to read now; 0: no more, the prefetch has ended or the two have met.

        If that is none, the front is waited for, but not longer than reading would take.
        """
        prefix = len(operation.prefix_keys or ()) * self._size
        start = seen = time.monotonic()
        while not operation.is_terminated() and (unread := meeting.unread):
            together, alone = until_met(meeting, prefix)
            part = round(unread * together / alone) if 0 < alone < math.inf else unread
            if part or seen - start > alone:
                return max(1, part)
            time.sleep(_LOOKING_SECONDS)
            before, seen = seen, time.monotonic()
            self._waited(seen - before)  # at once: else L3 would seem not to answer
        return 0

    def _report(self, operation: Any) -> None:
        self._reports += 1
        there = self._pages * self._size
        self._pass_on(PrefetchAck(operation.request_id, operation, completed_tokens=there))


def _after(info: HiCacheStorageExtraInfo, keys: Sequence[str]) -> HiCacheStorageExtraInfo:
    """What SGLang says of a batch, for the part of it that follows its pages ``keys``."""
    return replace(info, prefix_keys=[*(info.prefix_keys or ()), *keys])
