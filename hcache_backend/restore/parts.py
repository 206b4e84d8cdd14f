"""How a restore is divided into copies: by layer, the first one in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from hcache_backend.restore.layers import RestoredLayer

FIRST_PIECES = 4
"""Pieces that the first layer of a restore comes in, if each has..."""
FIRST_PIECE_TOKENS = 1024
"""...so many tokens: a projection of fewer would not be worth its launch."""


class TokenRows(NamedTuple):
    """Positions and slots of the tokens of a restore, int64 ``[n]`` each, on the device."""

    positions: torch.Tensor
    slots: torch.Tensor


class Part(NamedTuple):
    """What one copy brings: a layer of some pages. Rows are in the order in which they arrive."""

    layer: int
    pages: slice
    page_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    is_last: bool


def parts_of(
    layers: Mapping[int, RestoredLayer],
    ids: Mapping[str, torch.Tensor],
    rows: TokenRows,
    shared: TokenRows,
    chunk_pages: int,
    pieces: int,
) -> Iterator[Part]:
    """The parts of a restore, in the order in which they are copied.

    Args:
        layers: Those that are loaded, by number, ascending.
        ids: Physical pages, int64 ``[p]``, by method; as ``"header"`` where the copy goes by these.
        rows: All tokens...
        shared: ...and those of hidden states, in the order in which these arrive.
        chunk_pages: Pages of a part at most.
        pieces: How many the first layer has, if it has enough tokens.
    """
    pages, first = len(ids["kv"]), next(iter(layers), 0)
    size = len(rows.slots) // max(1, pages)
    for index, layer in layers.items():
        step = chunk_pages
        if index == first:
            step = min(step, max(-(-pages // pieces), FIRST_PIECE_TOKENS // max(1, size), 1))
        positions, slots = shared if layer.method == "hidden" else rows
        page_ids = ids["header" if layer.by_header else layer.method]
        for start in range(0, pages, step):
            tokens = slice(start * size, (start + step) * size)
            part, last = slice(start, start + step), start + step >= pages
            yield Part(index, part, page_ids[part], positions[tokens], slots[tokens], last)
