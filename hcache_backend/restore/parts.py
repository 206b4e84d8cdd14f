"""Divides a restore into copies: hidden states by layer, K and V by groups of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from hcache_backend.plan.restore import FIRST_PIECE_TOKENS
from hcache_backend.restore.layers import RestoredLayer

MOST_LAUNCHES = 4  # copies of K and V of a restore: a forward pass waits for a group, not for all


class TokenRows(NamedTuple):
    """Positions and slots of the tokens of a restore, int64 ``[n]`` each, on the device."""

    positions: torch.Tensor
    slots: torch.Tensor


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
    ids: Mapping[str, torch.Tensor],
    rows: TokenRows,
    shared: TokenRows,
    chunk_pages: int,
    pieces: int,
    launches: int = MOST_LAUNCHES,
) -> Iterator[Part]:
    """The parts of a restore, in the order in which they are copied.

    ``layers`` are the loaded ones by number, ascending. ``ids`` are physical pages, int64 ``[p]``,
    by method, and ``"header"`` for copies that read headers. ``shared``: ``rows`` in the order in
    which hidden states arrive, at most ``chunk_pages`` a part. The first layer has ``pieces``, if
    it has enough tokens. K and V have at most ``launches`` parts, or one for each group of layers.
    """
    pages, first = len(ids["kv"]), next(iter(layers), 0)
    size = len(rows.slots) // max(1, pages)
    for group in _groups(layers, launches):
        layer = layers[group.start]
        step = chunk_pages if layer.copy is None else max(1, pages)
        if group.start == first and layer.copy is None:
            step = min(step, max(-(-pages // pieces), FIRST_PIECE_TOKENS // max(1, size), 1))
        positions, slots = shared if layer.arrives else rows
        by = "header" if layer.by_header else layer.method
        page_ids = ids["hidden" if layer.arrives else by]
        for start in range(0, pages, step):
            tokens = slice(start * size, (start + step) * size)
            part, last = slice(start, start + step), start + step >= pages
            yield Part(group, part, page_ids[part], positions[tokens], slots[tokens], last)


def _groups(layers: Mapping[int, RestoredLayer], launches: int) -> Iterator[range]:
    start, numbers = 0, list(layers)
    while start < len(numbers):
        layer, stop = layers[numbers[start]], start + 1
        while (
            layer.copy is not None
            and stop < len(numbers)
            and layers[numbers[stop]].copy == layer.copy
        ):
            stop += 1
        count = min(stop - start, max(1, launches // layer.launches))
        for number in range(count):
            first = start + number * (stop - start) // count
            last = start + (number + 1) * (stop - start) // count
            yield range(numbers[first], numbers[last - 1] + 1)
        start = stop
