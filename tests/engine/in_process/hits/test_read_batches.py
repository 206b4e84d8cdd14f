"""Prefetches that are read in smaller batches than SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from hcache_backend.engine.read_batches import BatchedReads
from hcache_backend.restore.eager import batch_pages

SIZE = 4


class Rank:
    """A storage thread, as SGLang's reads a prefetch, of which some pages are missing."""

    def __init__(self, pages: int, missing: set[int], stop_at: int | None = None) -> None:
        self.acks: list[PrefetchAck] = []
        self.batches: list[int] = []
        self.missing, self.stop_at = missing, stop_at
        self.operation: Any = SimpleNamespace(
            hash_value=[str(page) for page in range(pages)],
            request_id="r",
            is_terminated=lambda: stop_at is not None and len(self.batches) >= stop_at,
        )
        reads = BatchedReads(SIZE, self.acks.append)

        def transfer() -> int:
            fine, there = True, 0
            for start in range(0, pages, STORAGE_BATCH_SIZE):
                keys = self.operation.hash_value[start : start + STORAGE_BATCH_SIZE]
                if fine:
                    indices = torch.arange(start * SIZE, (start + len(keys)) * SIZE)
                    before = self.operation.hash_value[:start]
                    info = HiCacheStorageExtraInfo(prefix_keys=before)
                    got = reads.read(self.read, self.operation, keys, indices, info)
                    fine, there = got == len(keys), there + got
                ack = PrefetchAck("r", self.operation, completed_tokens=there * SIZE)
                self.acks.append(ack)
            return there

        self.pages = reads.transfer(self.operation, transfer)

    def read(self, operation: Any, keys: list[str], host_indices: torch.Tensor, info: Any) -> int:
        before = operation.hash_value[: int(keys[0])]
        assert info.prefix_keys == before
        assert [int(key) for key in keys] == (host_indices[::SIZE] // SIZE).tolist()
        self.batches.append(len(keys))
        return next((i for i, key in enumerate(keys) if int(key) in self.missing), len(keys))

    @property
    def reports(self) -> list[int]:
        return [ack.completed_tokens // SIZE for ack in self.acks]


@pytest.mark.parametrize("pages", [1, 4, 5, 33, 64, 128, 129, 300, 1000])
def test_every_page_is_read_once_and_every_batch_reported(pages: int) -> None:
    rank = Rank(pages, set())
    assert rank.pages == sum(rank.batches) == pages
    assert max(rank.batches) <= batch_pages(pages)
    assert rank.reports == list(np.cumsum(rank.batches))


@pytest.mark.parametrize("pages", [5, 64, 129, 300])
def test_ranks_make_as_many_reports_however_far_they_get(pages: int) -> None:
    whole = Rank(pages, set())
    others = [Rank(pages, {page}) for page in range(0, pages, 3)]
    others += [Rank(pages, set(), stop_at=batches) for batches in range(len(whole.batches) + 1)]
    for rank in others:
        assert len(rank.reports) == len(whole.reports)
        agreed = [min(pair) for pair in zip(rank.reports, whole.reports, strict=True)]
        assert agreed == sorted(agreed)  # SGLang insists on it
        assert agreed[-1] == rank.pages
