"""SGLang's operation of a prefetch, as what is read in batches. The storage thread reports every
batch, SGLang's sync thread reduces the reports of all ranks, and the scheduler sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.prefetch.reader import PrefetchRead

# read(operation, keys, host_indices, extra_info) gives the number of leading pages that are there
Read = Callable[..., int]
Report = Callable[[PrefetchAck], None]  # passes a report on to SGLang's sync thread


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
    """Apply ``reports``, the same on every rank, to prefetches that are read from the back, before
    the scheduler sees them. HiCache has dealt with those that do not run any more."""
    for report in reports:
        operation = report.operation
        meeting = prefetches.prefetch_of(operation).meeting
        if isinstance(report, BackAck) and meeting is not None and operation in running:
            meeting.set_back(report.start, report.end)
            operation.completed_tokens = meeting.counted_pages * page_size


def as_prefetch_read(
    operation: Any, page_size: int, read: Read, report: Report, *, from_back: bool
) -> PrefetchRead:
    """SGLang's ``operation`` for :class:`.BatchedReads`, ``from_back`` or in order."""
    keys, before = operation.hash_value, list(operation.prefix_keys or ())

    def read_pages(pages: range) -> int:
        tokens = slice(pages.start * page_size, pages.stop * page_size)
        info = HiCacheStorageExtraInfo(prefix_keys=before + keys[: pages.start])
        page_keys = keys[pages.start : pages.stop]
        return read(operation, page_keys, operation.host_indices[tokens], info)

    def report_pages(arrived: range) -> None:
        if not from_back:
            tokens = len(arrived) * page_size
            report(PrefetchAck(operation.request_id, operation, completed_tokens=tokens))
            return
        back = BackAck(operation.request_id, operation)
        back.start, back.end = arrived.start, arrived.stop
        report(back)

    return PrefetchRead(len(keys), len(before), read_pages, report_pages, operation.is_terminated)
