"""Prefetches in smaller batches than SGLang's 128 pages, so that the first pages are known earlier.

SGLang's storage thread reports every batch; its sync thread reduces the reports of all ranks one by
one; the scheduler sees them. Smaller batches are further reports of the same kind between SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from hcache_backend.restore.eager import batch_pages


class BatchedReads:
    """Reads prefetches in smaller batches and reports each, for the storage thread that reads.

    ``report`` passes a report on to SGLang's sync thread.
    """

    def __init__(self, page_size: int, report: Callable[[PrefetchAck], None]) -> None:
        self._size = page_size
        self._pass_on = report
        self._pages = 0  # of the present prefetch, from the first one on, that are there
        self._reports = 0

    def transfer(self, operation: Any, transfer: Callable[[], Any]) -> Any:
        """Do what ``transfer()`` does: read a prefetch, with :meth:`read` for each batch of it.

        Every rank makes the same number of reports, however far it gets: they are reduced together.
        """
        self._pages = self._reports = 0
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
        step, got, whole = batch_pages(len(operation.hash_value)), 0, True
        for start in range(0, len(hash_values), step):
            if start:
                self._report(operation)
                if operation.is_terminated():
                    break
            keys = hash_values[start : start + step]
            tokens = slice(start * self._size, (start + len(keys)) * self._size)
            info = _after(extra_info or HiCacheStorageExtraInfo(), hash_values[:start])
            here = read(operation, keys, host_indices[tokens], info)
            if whole:
                got += here
                self._pages += here
            whole = whole and here == len(keys)
        return got

    def _report(self, operation: Any) -> None:
        self._reports += 1
        there = self._pages * self._size
        self._pass_on(PrefetchAck(operation.request_id, operation, completed_tokens=there))


def _after(info: HiCacheStorageExtraInfo, keys: Sequence[str]) -> HiCacheStorageExtraInfo:
    """What SGLang says of a batch, for the part of it that follows its pages ``keys``."""
    return replace(info, prefix_keys=[*(info.prefix_keys or ()), *keys])
