"""L2 in page form: SGLang's host pool, holding hidden-state pages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache

from hcache_backend.capture.mirror import HiddenMirror
from hcache_backend.engine import metrics
from hcache_backend.page import NAMESPACE_BYTES, PageLayout
from hcache_backend.restore.layerwise import LayerwiseRestore

NO_NAMESPACE = bytes(NAMESPACE_BYTES)


class HiddenStatePool(HostKVCache):
    """Pages of hidden states in host memory; opaque bytes to everything else in HiCache.

    Args:
        layout: SGLang's name of the host layout; pages look the same whatever it is, but HiCache
            decides by it how indices travel.
        page_layout: Layout of our pages.
        mirror: Hidden states of the tokens that are on the device.
        namespace: Returns the namespace that pages of this moment belong to.
        writer: 8 bytes that mark pages of this server run.
        pin_memory: Whether the device needs pinned memory to read it.

    The other arguments are those of SGLang's host pools.

    Raises:
        ValueError: The machine has not enough memory.
    """

    def __init__(
        self,
        device_pool: Any,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        *,
        page_layout: PageLayout,
        mirror: HiddenMirror,
        namespace: Callable[[], bytes],
        writer: bytes,
        pin_memory: bool,
        allocator_type: str,
    ) -> None:
        self.page_layout = page_layout
        self.layer_num = len(page_layout.segment_bytes)
        self.target_layer_num = self.layer_num
        self._mirror = mirror
        self._namespace = namespace
        self._writer = writer
        self._restore: LayerwiseRestore | None = None
        self.device_pool = device_pool
        geometry = {
            "device_pool": device_pool,
            "dtype": device_pool.store_dtype,
            "device_capacity_tokens": device_pool.size,
            "size_per_token": self.get_size_per_token(),
            "start_layer": device_pool.start_layer,
            "end_layer": device_pool.end_layer,
        }
        # Up to 0.5.21 the base class asks the device pool, from 0.5.22 on it is told.
        asked = inspect.signature(HostKVCache.__init__).parameters
        super().__init__(
            **{name: value for name, value in geometry.items() if name in asked},
            host_to_device_ratio=host_to_device_ratio,
            host_size=host_size,
            page_size=page_size,
            layout=layout,
            pin_memory=pin_memory,
            device="cpu",
            allocator_type=allocator_type,
        )

    def use_restore(self, restore: LayerwiseRestore) -> None:
        """Give the pool what turns its pages into K and V."""
        self._restore = restore

    # ---- sizes and memory ----

    def get_size_per_token(self) -> int:
        # Divides for page sizes that are powers of two; others only round the pool's size down.
        return -(-self.page_layout.page_bytes // self.page_layout.page_size)

    def get_ksize_per_token(self) -> int:
        return self.get_size_per_token()

    def init_kv_buffer(self) -> torch.Tensor:
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        dims = (self.page_num, self.page_layout.page_bytes)
        self.token_stride_size = self.size_per_token
        buffer: torch.Tensor = ALLOC_MEMORY_FUNCS[self.device_pool.device](
            dims,
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,
        )
        return buffer

    def pages(self) -> np.ndarray:
        """All pages, uint8 ``[pages, page_bytes]``; a view."""
        return self.kv_buffer.numpy()

    def page_ids(self, host_indices: torch.Tensor) -> torch.Tensor:
        """Pages that host indices (int64 ``[pages * page_size]``) stand for."""
        return host_indices[:: self.page_size].to("cpu") // self.page_size

    # ---- device <-> host ----

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
    ) -> None:
        """Fill pages from the mirror.

        The controller has checked that all rows are valid. A row that lost its validity since then
        spoils its page: without a namespace it is neither loaded nor believed when read from L3.
        """
        slots = device_indices.to("cpu")
        pages, layout, size = self.pages(), self.page_layout, self.page_size
        page_ids = self.page_ids(host_indices)
        positions, ids = self._mirror.tokens(slots)
        namespace = self._namespace()
        whole = self._mirror.valid(slots).view(-1, size).all(dim=1).tolist()
        if not all(whole):
            metrics.count_problem("rows_lost_before_backup")
        for i, page_id in enumerate(page_ids.tolist()):
            page = pages[page_id]
            layout.begin(page, namespace if whole[i] else NO_NAMESPACE, self._writer)
            layout.positions(page)[:] = positions[i * size : (i + 1) * size]
            layout.token_ids(page)[:] = ids[i * size : (i + 1) * size]
        for layer in range(self.layer_num):
            rows = self._mirror.rows[layer].index_select(0, slots)
            segment = self.kv_buffer[:, layout.segment(layer)]
            segment[page_ids] = rows.view(len(page_ids), -1)
        metrics.count_tokens("backed_up", len(slots))

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Project one layer of whole pages into the device's pool."""
        assert self._restore is not None and not is_draft
        self._restore.restore_layer(layer_id, self.page_ids(host_indices), device_indices)
        if layer_id == self.layer_num - 1:
            metrics.count_tokens("restored", len(device_indices))

    # ---- pages as storage backends see them ----

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and length of every page; a page is one piece."""
        base, length = self.kv_buffer.data_ptr(), self.page_layout.page_bytes
        pointers = [base + page * length for page in self.page_ids(indices).tolist()]
        return pointers, [length] * len(pointers)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer]

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[int(index) // self.page_size]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_layout.page_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[int(index) // self.page_size] = data_page.view(torch.uint8).reshape(-1)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return self.page_layout.page_bytes % page_size_bytes == 0
