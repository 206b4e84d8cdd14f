"""Ways in which a layer comes back: projected, copied as K and V, or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.streams import Stream

_WORD = torch.int64

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``fill(segments, positions, slots)`` projects K and V of one layer to the pool: uint8 ``[pages,
segment_bytes]`` and int64 ``[pages * page_size]`` twice, on the device."""

Copy = Callable[[Sequence[int], torch.Tensor, torch.Tensor, Sequence[int], torch.Tensor], None]
"""``copy(layers, memory, pages, offsets, slots)`` copies K and V of consecutive layers to the pool:
the arena, int64 ``[p]``, each layer's offset in a page, and int64 ``[p * page_size]``."""


class Parking(Protocol):
    """Room for segments in the slots that their K and V will take."""

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        """Leave ``segments`` (uint8 ``[pages, segment_bytes]``) in ``slots`` (int64 ``[n]``)."""

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """The segments in ``slots``, as they were given but for the first dimension."""


class PoolParking:
    """Room for a layer's hidden states in its V, which has as many bytes with multi-head attention.
    ``kvcache`` is an ``MHATokenToKVPool`` (see :meth:`fits`); ``layer`` is the pool's number."""

    def __init__(self, kvcache: Any, layer: int, row_bytes: int) -> None:
        buffer = kvcache.v_buffer[layer]
        self._words = buffer.view(len(buffer), -1).view(_WORD)[:, : row_bytes // _WORD.itemsize]

    @staticmethod
    def fits(kvcache: Any, row_bytes: int) -> bool:
        """True if every row of V has room for a hidden state of ``row_bytes`` bytes."""
        return row_bytes % _WORD.itemsize == 0 and all(
            buffer.is_contiguous()
            and buffer[0].nbytes >= row_bytes
            and buffer[0].nbytes % _WORD.itemsize == 0
            for buffer in kvcache.v_buffer
        )

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        self._words.index_copy_(0, slots, segments.view(_WORD).view(len(slots), -1))

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        return self._words.index_select(0, slots).view(torch.uint8)


class RestoredLayer(NamedTuple):
    """The way in which one layer comes back. ``hidden``: segments arrive on the copy stream, and
    ``fill`` projects them on the compute stream. ``kv``: ``copy`` brings K and V on the copy
    stream, or segments arrive and ``fill`` decodes them, because ranks share their tokens.
    ``recompute``: nothing is stored, and the segment's length is 0."""

    method: Literal["hidden", "kv", "recompute"]
    fill: Fill | None = None
    parking: Parking | None = None  # where segments can wait for ``fill``
    copy: Copy | None = None  # the same for all layers that it can bring at once
    launches: int = 1  # of a copy
    by_header: bool = False  # the copy reads headers of pages, and gets page ids on the CPU

    @property
    def arrives(self) -> bool:
        """True if its segments pass through the ring."""
        return self.fill is not None


class Recompute(NamedTuple):
    """Recomputation of a restore's first layers. ``fill(positions, slots)`` writes K and V of all
    tokens: int64 ``[pages * page_size]`` each, positions on the CPU. ``stream`` is the engine's
    stream of forward passes, on which ``fill`` is run."""

    layers: int  # at least those of which nothing is stored
    fill: Callable[[npt.NDArray[np.int64], torch.Tensor], None]
    stream: Stream
