"""SGLang's allocator: pages that eager restores may reserve, and slots that capture is given.
Reserved device pages are out of the allocator's lists but count as available: any allocation gets
them. A slot that is allocated anew has no valid row until something fills it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from hcache_backend.capture.staging import Capture
from hcache_backend.host.loads import QueuedLoad
from hcache_backend.host.ports import Reservations
from hcache_backend.sglang.tree import is_on_device, slots_to


class ReservablePages:
    """Free pages of SGLang's ``allocator``, some reserved. ``capture`` is given all allocations."""

    def __init__(self, allocator: Any, capture: Capture) -> None:
        self.eager: Reservations | None = None  # reserves pages; None until it is set
        self.cache: Any = None  # the radix cache, whose pages can be evicted; None until known
        self.load: QueuedLoad | None = None  # allocations get the pages prepared for it
        self.device: torch.device | str = allocator.device
        self._allocator = allocator
        self._capture = capture
        self._size: int = allocator.page_size
        self._available, self._clear = allocator.available_size, allocator.clear
        self._alloc = allocator.alloc
        allocator.available_size, allocator.clear = self._available_size, self._clear_all
        allocator.alloc = self._allocate
        self._wrap_allocation("alloc_extend", lambda a: a["extend_num_tokens"] // self._size + 1)
        self._wrap_allocation("alloc_decode", lambda _: 0)

    def count(self) -> int:
        return int(self._available()) // self._size

    def make_room(self, pages: int) -> None:
        """Try to free ``pages``, at the cost of cached nodes on the device."""
        short = pages - self.count()
        if self.cache is not None and short > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=short * self._size))

    def take(self, pages: int) -> torch.Tensor:
        """Slots of ``pages`` free pages, which must be there, int64 ``[pages * page_size]``."""
        slots: torch.Tensor = self._alloc(pages * self._size)
        return slots

    def give(self, slots: torch.Tensor) -> None:
        """Free the whole pages of ``slots``, for the next user on the current stream."""
        # At once, also while the scheduler collects the slots that a step frees.
        self._allocator._release_page_ids(slots[:: self._size] // self._size)

    def holds(self, node: Hashable) -> bool:
        return is_on_device(self.cache.tree_core, node)

    def slots_to(self, node: Hashable) -> torch.Tensor:
        return slots_to(self.cache.tree_core, node)

    def _wrap_allocation(self, name: str, more_pages: Callable[[dict[str, Any]], int]) -> None:
        """Wrap SGLang's method ``name``, if it exists. Before it allocates, reserved pages are
        given back until a page for each sequence, and ``more_pages(its arguments)``, are free."""
        original = getattr(self._allocator, name, None)
        if original is None:
            return
        parameters = inspect.signature(original)

        def allocate(*args: Any, **kwargs: Any) -> Any:
            if self.eager is not None and self.eager.pages:
                arguments = parameters.bind(*args, **kwargs).arguments
                self.eager.make_free(more_pages(arguments) + len(arguments["seq_lens"]))
            return self._note_allocated(original(*args, **kwargs))

        setattr(self._allocator, name, allocate)

    def _allocate(self, need_size: int) -> Any:
        """SGLang's ``alloc``: slots of so many tokens, or None. A load gets its prepared pages."""
        load = self.load
        if load is not None and load.prepared is None and self.eager is not None:
            assert need_size == len(load.host_pages) * self._size
            load.prepared = self.eager.hand_out(load.host_pages)
            return self._note_allocated(load.prepared and load.prepared.slots)
        if self.eager is not None and self.eager.pages:
            self.eager.make_free(-(-need_size // self._size))
        return self._note_allocated(self._alloc(need_size))

    def _note_allocated(self, slots: Any) -> Any:
        if isinstance(slots, torch.Tensor):
            self._capture.note_allocated(slots)
        return slots

    def _available_size(self) -> int:
        reserved = self.eager.pages if self.eager is not None else 0
        return int(self._available()) + reserved * self._size

    def _clear_all(self) -> None:
        if self.eager is not None:
            self.eager.all_freed()
        self._clear()
