"""How the layers of a restore come back: projected, copied as K and V, or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch

from hcache_backend.streams import Stream

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Projects K and V of one layer to the pool: ``fill(segments, positions, slots)`` with uint8
``[pages, segment_bytes]`` and int64 ``[pages * page_size]`` twice, all on the device."""

Copy = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
"""Copies K and V of one layer from pages straight to the pool: ``copy(memory, pages, offset,
slots)`` with the arena (uint8 ``[all pages, page_bytes]``), int64 ``[p]`` on the device, the bytes
before the layer's segment in a page, and int64 ``[p * page_size]`` on the device."""


class Parking(Protocol):
    """Room for segments in the slots that their K and V will take."""

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        """Leave ``segments`` (uint8 ``[pages, segment_bytes]``) in ``slots`` (int64 ``[n]``)."""

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """What was left in ``slots``, as it was given but for the first dimension."""


class RestoredLayer(NamedTuple):
    """How one layer comes back.

    Attributes:
        method: ``hidden``: segments arrive on the copy stream and ``fill`` projects them on the
            compute stream. ``kv``: ``copy`` brings K and V, on the copy stream. ``recompute``:
            nothing is stored (the segment's length is 0).
        fill: For ``hidden``.
        parking: Where segments can wait for ``fill``, if they can.
        copy: For ``kv``.
    """

    method: Literal["hidden", "kv", "recompute"]
    fill: Fill | None = None
    parking: Parking | None = None
    copy: Copy | None = None


class Recompute(NamedTuple):
    """How the first layers of one restore are recomputed.

    Attributes:
        layers: How many, at least those of which nothing is stored.
        fill: Writes K and V of all of them for all tokens, on the current stream:
            ``fill(positions, slots)``, int64 ``[pages * page_size]`` each, on the device.
        stream: The engine's stream of forward passes, on which ``fill`` is run.
    """

    layers: int
    fill: Callable[[torch.Tensor, torch.Tensor], None]
    stream: Stream
