"""L2 in page form: SGLang's host pool, holding our own pages in the arena."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache

from hcache_backend import metrics
from hcache_backend.arena import NO_NAMESPACE, Arena, Ids
from hcache_backend.capture.hooks import RecomputedRows
from hcache_backend.capture.staging import Capture
from hcache_backend.format.page import PageLayout
from hcache_backend.host.loads import LoadQueue
from hcache_backend.host.ports import HostPool
from hcache_backend.host.segments import KVSegments
from hcache_backend.metrics import logger
from hcache_backend.restore.report import RunningRestore
from hcache_backend.sglang.compat import known_arguments
from hcache_backend.streams import (
    Event,
    StreamFailed,
    current_stream,
    host_tensor,
    pinning,
    to_device,
)

_Saves = deque[tuple[Event, Callable[[], None]]]


class HostPages(NamedTuple):
    """Pages of memory that HiCache may allocate, and a shadow for each page of the device."""

    host: int
    shadows: int


class OwnPagesPool(HostKVCache, HostPool):
    """Our pages in host memory; opaque bytes to everything else in HiCache. Raises ValueError if
    the machine has not enough memory. HiCache's host indices are logical: the arena maps them to
    memory, which also holds the shadows of the device's pages. HiCache moves indices by ``layout``,
    SGLang's. ``namespace``: see :class:`.Arena`."""

    def __init__(
        self,
        device_pool: Any,
        page_size: int,
        layout: str,
        *,
        page_layout: PageLayout,
        pages: HostPages,
        kv: KVSegments,
        pin_memory: bool,
        allocator_type: str,
        namespace: Callable[[], bytes] = lambda: NO_NAMESPACE,
    ) -> None:
        """``page_layout``: of our pages; ``layout``: SGLang's; ``kv``: copies K and V of pages."""
        self.page_layout, self._pages, self._kv = page_layout, pages, kv
        self._namespace = namespace
        self._frees_duplicates = True
        self.layer_num = len(page_layout.segment_bytes)
        self.target_layer_num = self.layer_num - len(kv.drafts)
        # What settles pages that are behind an event in host memory, by stream and in its order.
        self._saved: tuple[_Saves, _Saves] = deque(), deque()
        self._warned = False
        self._loads: LoadQueue | None = None
        self._restores: tuple[RunningRestore, ...] = ()
        self._backed_up: Event | None = None
        self.on_freed: list[Callable[[Ids], None]] = []  # called with pages ([n]) HiCache freed
        # Called with pages ([n]) and the slots ([n * page_size], on the device) from which, or to
        # which, they were copied, on the current stream.
        self.on_backed_up: list[Callable[[Ids, torch.Tensor], None]] = []
        self.on_loaded: list[Callable[[Ids, torch.Tensor], None]] = []
        self.pieces_per_page = 1  # pieces of memory that storage backends see in a page
        self.device_pool = device_pool
        geometry = known_arguments(
            HostKVCache.__init__,
            device_pool=device_pool,
            dtype=device_pool.store_dtype,
            device_capacity_tokens=device_pool.size,
            size_per_token=self.get_size_per_token(),
            start_layer=device_pool.start_layer,
            end_layer=device_pool.end_layer,
        )
        super().__init__(
            **geometry,
            # The base class makes pages of tokens of a ratio, rounds down and adds one page.
            host_to_device_ratio=(pages.host - 0.5) * page_size / device_pool.size,
            host_size=0,
            page_size=page_size,
            layout=layout,
            pin_memory=pin_memory,
            device="cpu",
            allocator_type=allocator_type,
        )
        assert self.page_num == pages.host

    def connect(self, loads: LoadQueue, capture: Capture, frees_duplicates: bool = True) -> None:
        """Give the pool its queue of loads and the capture. ``frees_duplicates``: HiCache frees
        pages of tokens that are still on the device."""
        self._loads, self._capture = loads, capture
        self._frees_duplicates = frees_duplicates

    def get_size_per_token(self) -> int:
        # Divides for page sizes that are powers of two; others only round the pool's size down.
        return -(-self.page_layout.page_bytes // self.page_layout.page_size)

    def get_ksize_per_token(self) -> int:
        return self.get_size_per_token()

    def init_kv_buffer(self) -> torch.Tensor:
        """Memory of all host pages and shadows, uint8 ``[pages, stride]``, and the arena in it."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        self.token_stride_size = self.size_per_token
        pages, size = sum(self._pages), self.page_layout.stride
        with pinning(pages * size):
            buffer: torch.Tensor = ALLOC_MEMORY_FUNCS[self.device_pool.device](
                (pages, size),
                dtype=torch.uint8,
                device=self.device,
                pin_memory=self.pin_memory,
                allocator=self.allocator,
                # No page lies in two registrations: one copy may not span them.
                registration_granularity_bytes=size,
            )
        host_pages, shadows = self._pages
        self.arena = Arena(buffer.numpy(), self.page_layout, host_pages, shadows, self._namespace)
        self._capture = Capture(self.arena)  # until the server's own is connected
        return buffer

    def page_ids(self, host_indices: torch.Tensor) -> Ids:
        """Logical pages of host indices (int64 ``[pages * page_size]``)."""
        ids: Ids = host_indices[:: self.page_size].to("cpu").numpy() // self.page_size
        return ids

    def free(self, indices: torch.Tensor) -> int:
        """HiCache frees host pages. Tokens on the device may keep their rows, in shadows."""
        if indices.numel():
            host_pages = self.page_ids(indices)
            # First: tokens on the device may take rows back that are still to come.
            for callback in self.on_freed:
                callback(host_pages)
            if self._frees_duplicates:
                self._capture.take_back(host_pages)
            else:
                self.arena.free(host_pages)
        freed: int = super().free(indices)
        return freed

    def clear(self) -> None:
        """Free all host pages, behind all copies: the next owner of a page may write it at once."""
        if self._backed_up is not None:
            with contextlib.suppress(StreamFailed):
                self._backed_up.synchronize()
        self._capture.free_all()  # rows are written without a backup, too
        super().clear()

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
    ) -> None:
        self._save(self._saved[0], self.page_ids(host_indices), device_indices, [])
        self._backed_up = current_stream(self.device_pool.device).record()

    def save_recomputed(
        self, host_pages: Ids, slots: torch.Tensor, rows: RecomputedRows | None
    ) -> None:
        """Copy pages (int64 ``[p]``) that were recomputed whole, and their ``rows``, from ``slots``
        (int64 ``[p * page_size]``, on the device), on the current stream."""
        fits = [] if rows is None else [rows.save_rows(self.arena.physical(host_pages))]
        self._save(self._saved[1], host_pages, slots, fits)

    def _save(
        self, saves: _Saves, host_pages: Ids, slots: torch.Tensor, fits: list[torch.Tensor]
    ) -> None:
        """Copy K and V from ``slots`` to ``host_pages``, and settle these (then they can be used):
        at once, or once the masks of what can be encoded (bool ``[..., p]``: ``fits``, and a
        codec's) arrive, by ``saves``."""
        device = self.device_pool.device
        if self._kv.layers:
            physical = self.arena.physical(host_pages)
            pages = torch.from_numpy(physical)
            if not self._kv.by_header:
                pages = to_device(physical, device)
            with metrics.timed("host_backup"):
                kv_fits = self._kv.save(self.page_layout, self.kv_buffer, pages, slots)
            if kv_fits is not None:
                on_host = host_tensor(kv_fits.shape, torch.bool, device)
                fits.append(on_host.copy_(kv_fits, non_blocking=True))
        # Table entries may have been exchanged whose rows are on their way.
        self._capture.go_before(current_stream(device))
        for callback in self.on_backed_up:
            callback(host_pages, slots)
        tickets = self.arena.tickets(host_pages)
        if fits:
            settle = partial(self._settle, host_pages, tickets, fits)
            saves.append((current_stream(device).record(), settle))
        else:
            self.arena.settle(host_pages, tickets)

    def usable(self, host_pages: Ids) -> bool | None:
        """:meth:`.Arena.usable` of pages (int64 ``[p]``), with all that has arrived."""
        self.mark_arrived()
        return self.arena.usable(host_pages)

    def mark_arrived(self) -> None:
        """Settle the pages that have arrived, and count those that the codec cannot hold."""
        for saves in self._saved:
            while saves and saves[0][0].query():
                saves.popleft()[1]()

    def _settle(self, host_pages: Ids, tickets: Ids, fits: Sequence[torch.Tensor]) -> None:
        """Settle pages that arrived; those with False in any of ``fits`` are not encodable."""
        fit = torch.vstack([*fits]).all(0).numpy()
        tokens = len(self.arena.settle(host_pages, tickets, fit)) * self.page_size
        metrics.TOKENS.count("not_encodable", tokens)
        if tokens and not self._warned:
            self._warned = True
            logger.warning(
                f"hcache: pages of {tokens} tokens cannot be encoded: they are misses, and do "
                "not go to L3 (logged once, counted always; codec 'none' encodes all)"
            )

    def divide(self, host_pages: Ids, layout: PageLayout) -> None:
        """Write ``layout`` to the headers of pages (int64 ``[n]``) that are about to be written."""
        if self._kv.by_header:
            pages = self.arena.physical(host_pages)
            self.arena.host_access(pages, write=True, header=True)
            for page in pages.tolist():
                layout.divide(self.arena.memory[page])

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
        """Called for each layer in order. The first launches all queued loads, of all layers, to
        ``device_indices`` (of all). Each waits for its own event of every restore."""
        assert self._loads is not None
        if layer_id == 0:
            self._restores = self._loads.launch(device_indices)
        for restore in self._restores:
            # ``layers`` are events, on one stream. A restore launched ahead has one for many.
            if not layer_id or restore.layers[layer_id] is not restore.layers[layer_id - 1]:
                restore.wait_for_layer(layer_id)
        if layer_id == self.target_layer_num - 1:
            for callback in self.on_loaded:
                callback(self.page_ids(host_indices), device_indices)
            self._loads.count_finished()

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes of the pieces of all pages, for storage without copies."""
        base, length = self.kv_buffer.data_ptr(), self.page_layout.page_bytes
        cuts = [length * piece // self.pieces_per_page for piece in range(self.pieces_per_page)]
        sizes = [end - cut for cut, end in zip(cuts, [*cuts[1:], length], strict=True)]
        physical = self.arena.physical(self.page_ids(indices)).tolist()
        stride = self.page_layout.stride
        addresses = [base + page * stride + cut for page in physical for cut in cuts]
        return addresses, sizes * len(physical)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer]

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        [page] = self.arena.physical(np.array([int(index) // self.page_size])).tolist()
        return self.kv_buffer[page, : self.page_layout.page_bytes]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_layout.page_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.get_data_page(index)[:] = data_page.view(torch.uint8).reshape(-1)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return self.page_layout.page_bytes % page_size_bytes == 0
