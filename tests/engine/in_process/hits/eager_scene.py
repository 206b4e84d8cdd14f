"""Reservations in SGLang's own allocator: the allocator, and restores into it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hcache_cpu_engine import plugin
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hcache_backend.prefetch.reservations import EagerRestores
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.sglang.allocator import ReservablePages
from tests.kit.prefetch import Restore, eager_over

SIZE, PAGES = 4, 10
plugin._replace_allocator_kernels()


class Scene:
    def __init__(self, *, need_sort: bool, pages: int = PAGES) -> None:
        self.most = pages
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * SIZE, SIZE, torch.float32, "cpu", SimpleNamespace(), need_sort
        )
        self.captured = list[torch.Tensor]()  # slots whose rows are void
        capture: Any = SimpleNamespace(note_allocated=self.captured.append)
        self.pages = ReservablePages(self.allocator, capture)
        self.restores: list[Restore] = []
        self.eager = EagerRestores(SIZE, self.pages, self._launch, pages)  # type: ignore[arg-type]
        self.pages.eager = self.eager

    def _launch(self, *_: Any, ahead: bool = True) -> Restore:
        assert ahead
        self.restores.append(Restore())
        return self.restores[-1]

    def loads(self, budget: SliceBudget, starts: dict[str, Any], **others: Any) -> Any:
        """Eager loads into its pages, whose pipeline starts what it is to with ``starts``."""
        pipeline = {"start": self._launch} | starts
        return eager_over(self.pages, self.most, SIZE, budget, pipeline, **others)

    def reserve(self, *host_pages: int, arrived: int = 0) -> None:
        self.eager.reserve("prefetch", host_pages, np.array(host_pages))
        self.eager.restore_arrived("prefetch", range(arrived))


def hicache(lost: Callable[[], bool] = lambda: False) -> Any:
    """HiCache whose tree has a front of ``SIZE`` tokens on the device, if it is not ``lost``."""
    on_device = torch.zeros(SIZE, dtype=torch.int64)
    return SimpleNamespace(
        prefetch_stop_policy="wait_complete",
        cache_controller=SimpleNamespace(tp_group=None, after_forwards=lambda stream: None),
        ongoing_prefetch={},
        tree_core=SimpleNamespace(
            empty_match_result=SimpleNamespace(last_device_node=-1),
            is_full_device_evicted=lambda node: lost(),
            collect_full_device_indices=lambda *_: on_device,
        ),
    )


def pages_in(slots: torch.Tensor) -> set[int]:
    return set((slots // SIZE).tolist())
