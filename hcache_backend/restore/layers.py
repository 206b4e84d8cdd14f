"""How the layers of a restore come back: projected, copied as K and V, or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.streams import Stream

_WORD = torch.int64

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Projects K and V of one layer to the pool: ``fill(segments, positions, slots)`` with uint8
``[pages, segment_bytes]`` and int64 ``[pages * page_size]`` twice, all on the device."""

Copy = Callable[[Sequence[int], torch.Tensor, torch.Tensor, Sequence[int], torch.Tensor], None]
"""Copies K and V of consecutive layers from pages straight to the pool: ``copy(layers, memory,
pages, offsets, slots)`` with the layers, the arena (uint8 ``[all pages, page_bytes]``), int64
``[p]`` on the device, the bytes before each layer's segment in a page, and int64
``[p * page_size]`` on the device."""


class Parking(Protocol):
    """Room for segments in the slots that their K and V will take."""

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        """Leave ``segments`` (uint8 ``[pages, segment_bytes]``) in ``slots`` (int64 ``[n]``)."""

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """What was left in ``slots``, as it was given but for the first dimension."""


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
        """See :class:`Parking`."""
        self._words.index_copy_(0, slots, segments.view(_WORD).view(len(slots), -1))

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, row_bytes]``."""
        return self._words.index_select(0, slots).view(torch.uint8)


class RestoredLayer(NamedTuple):
    """How one layer comes back.

    Attributes:
        method: ``hidden``: segments arrive on the copy stream and ``fill`` projects them on the
            compute stream. ``kv``: ``copy`` brings K and V, on the copy stream. ``recompute``:
            nothing is stored (the segment's length is 0).
        fill: For ``hidden``.
        parking: Where segments can wait for ``fill``, if they can.
        copy: For ``kv``, the same of all layers that it can bring at once...
        launches: ...by so many launches.
        by_header: Whether ``copy`` goes by the headers of pages, and is given them on the CPU.
    """

    method: Literal["hidden", "kv", "recompute"]
    fill: Fill | None = None
    parking: Parking | None = None
    copy: Copy | None = None
    launches: int = 1
    by_header: bool = False


class Recompute(NamedTuple):
    """How the first layers of one restore are recomputed.

    Attributes:
        layers: How many, at least those of which nothing is stored.
        fill: Writes K and V of all of them for all tokens, on the current stream:
            ``fill(positions, slots)``, int64 ``[pages * page_size]`` each, positions on the CPU and
            slots on the device.
        stream: The engine's stream of forward passes, on which ``fill`` is run.
    """

    layers: int
    fill: Callable[[npt.NDArray[np.int64], torch.Tensor], None]
    stream: Stream
