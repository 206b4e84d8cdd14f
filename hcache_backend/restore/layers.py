"""Ways in which a layer comes back: projected, copied as K and V, or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.streams import Stream

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``fill(segments, positions, slots)`` projects K and V of one layer to the pool: uint8 ``[pages,
segment_bytes]`` and int64 ``[pages * page_size]`` twice, on the device."""

Copy = Callable[[Sequence[int], torch.Tensor, torch.Tensor, Sequence[int], torch.Tensor], None]
"""``copy(layers, memory, pages, offsets, slots)`` copies K and V of consecutive layers to the pool:
the arena, int64 ``[p]``, each layer's offset in a page, and int64 ``[p * page_size]``."""


class RestoredLayer(NamedTuple):
    """The way in which one layer comes back. ``hidden``: segments arrive on the copy stream, and
    ``fill`` projects them on the compute stream. ``kv``: ``copy`` brings K and V on the copy
    stream, or segments arrive and ``fill`` decodes them, because ranks share their tokens.
    ``recompute``: nothing is stored, and the segment's length is 0."""

    method: Literal["hidden", "kv", "recompute"]
    fill: Fill | None = None
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
