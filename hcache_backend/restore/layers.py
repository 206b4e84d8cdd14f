"""Ways in which a layer comes back: projected, copied as K and V, or recomputed. And the copies
that a restore consists of: hidden states by layer, K, V and latents by groups of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import torch

from hcache_backend.plan.restore import FIRST_PIECE_TOKENS
from hcache_backend.streams import Stream

Fill = Callable[[range, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``fill(layers, segments, positions, slots)`` writes K and V of layers to the pool: uint8
``[pages, bytes]`` and int64 ``[pages * page_size]`` twice, on the device. ``segments`` are those of
one layer, or of the layers that a copy has brought on each rank, one rank after the other."""

Copy = Callable[[Sequence[int], torch.Tensor, torch.Tensor, Sequence[int], torch.Tensor], None]
"""``copy(layers, memory, pages, offsets, target)`` copies segments of consecutive layers:
the arena, int64 ``[p]``, each layer's offset in a page. ``target``: slots of the pool, int64
``[p * page_size]``; with a :data:`Fill` it is memory for the segments, layer by layer (uint8)."""


class RestoredLayer(NamedTuple):
    """The way in which one layer comes back. ``hidden``: segments arrive on the copy stream, and
    ``fill`` projects them on the compute stream. ``kv``: ``copy`` brings K and V on the copy
    stream; if ranks share their tokens, it brings segments, and ``fill`` decodes them.
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
    """Recomputation of the first layers of some tokens. ``fill`` writes their K and V to ``slots``
    (int64 ``[n]``, on the device), on ``stream``, the engine's stream of forward passes."""

    layers: int  # at least those of which nothing is stored
    slots: torch.Tensor
    fill: Callable[[], None]
    stream: Stream


MOST_LAUNCHES = 4  # of K and V of a restore: a forward pass waits for a group, not for all
MOST_EXCHANGES = 8  # of latents in a restore: each has launches and waits of its own


class TokenRows(NamedTuple):
    """Positions and slots of the tokens of a restore, int64 ``[n]`` each, on the device."""

    positions: torch.Tensor
    slots: torch.Tensor


class Indices(NamedTuple):
    """The pages and tokens of a restore, int64: on the CPU, and memory for them on the device."""

    cpu_pages: torch.Tensor  # physical, [p]; copies that read headers take these
    cpu_positions: torch.Tensor
    page_ids: torch.Tensor
    rows: TokenRows
    shared: TokenRows  # ``rows`` in the order in which hidden states arrive


class Part(NamedTuple):
    """One copy: layers (one of hidden states) of some pages; rows in the order of arrival."""

    layers: range
    pages: slice
    page_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    is_last: bool


def parts_of(
    layers: Mapping[int, RestoredLayer],
    indices: Indices,
    chunk_pages: int,
    pieces: int,
    launches: int,
) -> Iterator[Part]:
    """The parts of a restore, in the order in which they are copied. ``layers`` are the loaded ones
    by number, ascending. Hidden states have at most ``chunk_pages`` pages a part; those of the
    first layer come in ``pieces`` parts, if it has enough tokens. K and V have at most ``launches``
    copies, each of a group of layers in all pages."""
    pages, first = len(indices.page_ids), next(iter(layers), 0)
    size = len(indices.rows.slots) // max(1, pages)  # tokens of a page
    for group in groups_of(layers, launches):
        layer = layers[group.start]
        step = chunk_pages if layer.arrives else max(1, pages)
        if group.start == first and layer.arrives:
            step = min(step, max(-(-pages // pieces), FIRST_PIECE_TOKENS // max(1, size), 1))
        positions, slots = indices.shared if layer.arrives else indices.rows
        reads_header = layer.by_header and not layer.arrives
        page_ids = indices.cpu_pages if reads_header else indices.page_ids
        for start in range(0, pages, step):
            tokens = slice(start * size, (start + step) * size)
            part, is_last = slice(start, start + step), start + step >= pages
            yield Part(group, part, page_ids[part], positions[tokens], slots[tokens], is_last)


def groups_of(layers: Mapping[int, RestoredLayer], launches: int) -> Iterator[range]:
    """Groups of layers that are copied together: neighbours with the same ``copy``, by at most
    ``launches`` or :data:`MOST_EXCHANGES`. Layers without ``copy`` (hidden states) are alone."""
    for _, group in groupby(layers, lambda number: layers[number].copy or number):
        numbers = list(group)
        first = layers[numbers[0]]
        most = MOST_EXCHANGES if first.arrives else launches // first.launches
        yield from split_evenly(numbers, most)


def split_evenly(layers: Sequence[int], most: int) -> Iterator[range]:
    """Consecutive ``layers`` in groups of about one size: at most ``most``, and at least one."""
    count = min(len(layers), max(1, most))
    for first, stop in pairwise(len(layers) * part // count for part in range(count + 1)):
        yield range(layers[first], layers[stop - 1] + 1)
