"""The pages of SGLang's allocator, some of which are reserved for eager restores.

Reserved device pages are out of the allocator's lists but count as available: whoever allocates
gets them, so that admission and eviction go on as if there were no reservations.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from hcache_backend.host.loads import QueuedLoad
from hcache_backend.prefetch.eager import EagerRestores


class ReservablePages:
    """The free pages of SGLang's allocator, some of which may be reserved.

    Replaces methods of ``allocator``, as others may who come later.

    Attributes:
        eager: What reserves pages; None: nothing does yet.
        cache: The radix cache, whose pages can be evicted; None until it is known.
        device: Where the pages are.
    """

    def __init__(self, allocator: PagedTokenToKVPoolAllocator) -> None:
        self.eager: EagerRestores | None = None
        self.cache: Any = None
        self.device = allocator.device
        self._allocator = allocator
        self._size: int = allocator.page_size
        self._load: QueuedLoad | None = None
        self._available = allocator.available_size
        self._alloc = allocator.alloc
        extend, decode, clear = allocator.alloc_extend, allocator.alloc_decode, allocator.clear
        parameters = inspect.signature(extend)

        def alloc_extend(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs).arguments
            self._make_free(given["extend_num_tokens"] // self._size + len(given["seq_lens"]) + 1)
            return extend(*args, **kwargs)

        def alloc_decode(seq_lens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._make_free(len(seq_lens))
            return decode(seq_lens, *args, **kwargs)

        def clear_all() -> None:
            if self.eager is not None:
                self.eager.all_freed()
            clear()

        allocator.available_size = self._available_size
        allocator.alloc = self._allocate
        allocator.alloc_extend = alloc_extend
        allocator.alloc_decode = alloc_decode
        allocator.clear = clear_all

    @contextmanager
    def given_to(self, load: QueuedLoad) -> Iterator[None]:
        """What is allocated within the block is for ``load``: it is what was prepared for it."""
        self._load = load
        try:
            yield
        finally:
            self._load = None

    # ---- free pages (see FreePages) ----

    def count(self) -> int:
        return int(self._available()) // self._size

    def make_room(self, pages: int) -> None:
        short = pages - self.count()
        if self.cache is not None and short > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=short * self._size))

    def take(self, pages: int) -> torch.Tensor:
        slots: torch.Tensor = self._alloc(pages * self._size)
        return slots

    def give(self, slots: torch.Tensor) -> None:
        # At once, also while the scheduler collects what a step frees.
        self._allocator._release_page_ids(slots[:: self._size] // self._size)

    # ---- the allocator's methods ----

    def _available_size(self) -> int:
        reserved = self.eager.pages if self.eager is not None else 0
        return int(self._available()) + reserved * self._size

    def _allocate(self, need_size: int) -> Any:
        load = self._load
        if load is not None and load.handed is None and self.eager is not None:
            assert need_size == len(load.host_pages) * self._size
            load.handed = self.eager.hand_out(load.host_pages)
            return load.handed.slots if load.handed is not None else None
        self._make_free(-(-need_size // self._size))
        return self._alloc(need_size)

    def _make_free(self, pages: int) -> None:
        if self.eager is not None and self.eager.pages:
            self.eager.make_free(pages)
