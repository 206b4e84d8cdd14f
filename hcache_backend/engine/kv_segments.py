"""Layer segments in SGLang's KV pool: K and V, and hidden states that wait for their projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hcache_backend.page import PageLayout, StoredLayer, kv_layer
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.units import Share
from hcache_kernels.pages import gather_plane, scatter_rows

_WORD = torch.int64


class KVSegments:
    """Copies K and V of some layers between the pool and pages, which hold them as the pool does.

    A page has K of one group of this rank's heads after the other, each of all tokens, then V. With
    one group that is what the pool's slots hold. Layers are numbered as by ``kvcache``, which is
    SGLang's ``MHATokenToKVPool``. The slots of a page follow each other there, from a multiple of
    the page size on, so that whole pages are copied.

    Args:
        share: What this rank holds of a page: its heads are as many of those of all ranks.
        groups: Groups of heads in the whole page.
    """

    def __init__(
        self, kvcache: Any, layers: Sequence[int], page_size: int, share: Share, groups: int
    ) -> None:
        self._kvcache = kvcache
        self._page_size = page_size
        self._ranks, self._whole_groups = share.of, groups
        self._groups = groups // share.of
        self.layers = tuple(layers)

    def stored_layer(self, layer: int) -> StoredLayer:
        """What whole pages hold of one layer."""
        k, v = (buffer[0].numel() * self._ranks for buffer in self._planes(layer))
        itemsize = self._kvcache.k_buffer[layer].element_size()
        return kv_layer(self._page_size, k, v, itemsize, self._whole_groups)

    def save(
        self, layout: PageLayout, memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy K and V of whole pages out of the pool, on the current stream.

        Args:
            layout: Layout of a page.
            memory: The arena, uint8 ``[all pages, page_bytes]``, which the device can write.
            pages: Physical pages, int64 ``[p]``, on the device.
            slots: Slots of their tokens, int64 ``[p * page_size]``, on the device.
        """
        only = torch.zeros_like(pages)  # a plane is one row
        held = self._pages_of(slots)
        for layer in self.layers:
            offset = layout.segment_offsets[layer]
            for buffer in self._planes(layer):
                rows = _swapped(self._by_page(buffer)[held], self._page_size, self._groups)
                rows = rows.view(torch.uint8)
                scatter_rows(rows, memory, pages, only, offset)
                offset += rows.shape[1]

    def restored_layer(self, layer: int) -> RestoredLayer:
        """How a layer whose K and V are stored comes back."""
        planes = [
            self._by_page(buffer)
            .view(torch.uint8)
            .unflatten(1, (self._page_size, self._groups, -1))
            for buffer in self._planes(layer)
        ]

        def copy(
            memory: torch.Tensor, pages: torch.Tensor, offset: int, slots: torch.Tensor
        ) -> None:
            held = self._pages_of(slots)
            for plane in planes:
                gather_plane(memory, pages, offset, plane, held)
                offset += plane[0].numel()

        return RestoredLayer("kv", copy=copy)

    def held(self, slots: torch.Tensor) -> torch.Tensor:
        """What the pool has of the tokens of a page, segment after segment: uint8, on the device.

        ``slots`` are theirs, int64 ``[page_size]``, on the device.
        """
        pages, size = self._pages_of(slots), self._page_size
        buffers = (buffer for layer in self.layers for buffer in self._planes(layer))
        planes = (_swapped(self._by_page(buffer)[pages], size, self._groups) for buffer in buffers)
        return torch.cat([plane[0].view(torch.uint8) for plane in planes])

    def differs(self, layout: PageLayout, page: torch.Tensor, held: torch.Tensor) -> int | None:
        """The first layer whose segment in ``page`` is not what the pool ``held``, or None.

        ``page`` is uint8 ``[page_bytes]``; both are on the CPU.
        """
        lengths = [layout.segment_bytes[layer] for layer in self.layers]
        for layer, segment in zip(self.layers, held.split(lengths), strict=True):
            if not torch.equal(segment, page[layout.segment(layer)]):
                return layer
        return None

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Pages of the pool, int64 ``[p]``, whose slots are ``slots`` (``[p * page_size]``)."""
        return slots[:: self._page_size] // self._page_size

    def _by_page(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer of the pool, ``[slots, heads, dim]``, as one row for each page."""
        return buffer.view(len(buffer) // self._page_size, -1)

    def _planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kvcache.k_buffer[layer], self._kvcache.v_buffer[layer]


def _swapped(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows ``[p, outer * inner * n]`` as ``[p, inner * outer * n]``; no copy where one is 1."""
    return rows.view(len(rows), outer, inner, -1).transpose(1, 2).reshape(len(rows), -1)


class PoolParking:
    """Room for the hidden states of one layer in the slots that its V will take.

    With multi-head attention V has as many bytes.

    Args:
        kvcache: SGLang's ``MHATokenToKVPool``; rows of V must hold a row (see :meth:`fits`).
        layer: Layer, as the pool numbers them.
        row_bytes: Bytes of one stored hidden state.
    """

    def __init__(self, kvcache: Any, layer: int, row_bytes: int) -> None:
        buffer = kvcache.v_buffer[layer]
        self._words = buffer.view(len(buffer), -1).view(_WORD)[:, : row_bytes // _WORD.itemsize]

    @staticmethod
    def fits(kvcache: Any, row_bytes: int) -> bool:
        """Whether every row of V has room for a hidden state of ``row_bytes`` bytes."""
        return row_bytes % _WORD.itemsize == 0 and all(
            buffer.is_contiguous()
            and buffer[0].nbytes >= row_bytes
            and buffer[0].nbytes % _WORD.itemsize == 0
            for buffer in kvcache.v_buffer
        )

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        """See :class:`~hcache_backend.restore.layers.Parking`."""
        self._words.index_copy_(0, slots, segments.view(_WORD).view(len(slots), -1))

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, row_bytes]``."""
        return self._words.index_select(0, slots).view(torch.uint8)
