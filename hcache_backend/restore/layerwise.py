"""Restore: one layer of some pages -> K and V in the pool of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hcache_backend.capture.mirror import HiddenMirror
from hcache_backend.page import PageLayout
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.projector import Projector


class LayerwiseRestore:
    """Turns hidden-state pages of the host pool into K and V, a layer at a time.

    The rows also go back to the mirror: a node that was restored can be backed up a second time
    (``write_back`` reclaims host copies of nodes that are still on the device).

    Args:
        pages: The host pool's memory, uint8 ``[pages, page_bytes]``.
        layout: Layout of a page.
        layers: The attention layers of this stage.
        projector: Makes K and V, in the pool.
        mirror: Takes the restored rows; its codec is that of the pages.
        chunk_tokens: Tokens that one projection takes at most; bounds the memory of a restore.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        layout: PageLayout,
        layers: Sequence[AttentionLayer],
        projector: Projector,
        mirror: HiddenMirror,
        chunk_tokens: int,
    ) -> None:
        self._pages = pages
        self._layout = layout
        self._layers = layers
        self._projector = projector
        self._mirror = mirror
        self._chunk_pages = max(1, chunk_tokens // layout.page_size)

    @torch.no_grad()
    def restore_layer(self, index: int, page_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Restore layer ``index`` of whole pages.

        Args:
            index: Layer within this stage.
            page_ids: Pages of the host pool, int64 ``[p]`` on the CPU, any order.
            slots: Slots of their tokens, int64 ``[p * page_size]`` on the device.
        """
        size = self._layout.page_size
        for start in range(0, len(page_ids), self._chunk_pages):
            chunk = page_ids[start : start + self._chunk_pages]
            chunk_slots = slots[start * size : (start + len(chunk)) * size]
            self._restore_chunk(index, chunk, chunk_slots)

    def _restore_chunk(self, index: int, page_ids: torch.Tensor, slots: torch.Tensor) -> None:
        layer = self._layers[index]
        segment = self._pages[:, self._layout.segment(index)]
        codec = self._mirror.codec
        encoded = segment.index_select(0, page_ids).view(-1, codec.row_bytes)
        positions, ids = self._tokens(page_ids)
        hidden = codec.decode(encoded.to(slots.device))
        positions_there = positions.to(slots.device, torch.int64)
        self._projector.project_to_pool(layer, hidden, positions_there, slots)
        self._mirror.put_encoded(index, slots, encoded)
        if index == len(self._layers) - 1:
            self._mirror.commit(slots, positions, ids)

    def _tokens(self, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        header = self._pages[:, : self._layout.header_bytes].index_select(0, page_ids).numpy()
        positions = np.ascontiguousarray(self._layout.positions(header)).reshape(-1)
        ids = np.ascontiguousarray(self._layout.token_ids(header)).reshape(-1)
        return torch.from_numpy(positions), torch.from_numpy(ids)
