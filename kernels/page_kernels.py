"""The kernels of :mod:`hcache_kernels.pages`, and their launches, which check nothing."""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Launch, alignment, block_launch, copy_programs
from .layers import ONE_LAYER, LayerTable

WORD = 8
"""Bytes that move together; lengths, offsets and page sizes are multiples of it."""

SIZES = ("offset", "parts", "count")
"""Arguments that differ from launch to launch. Triton would compile a kernel again for those that
are 1, or multiples of 16, and that in the middle of a restore..."""
ADDRESSES = (
    *("pages", "page_ids", "pool_ids", "row_ids", "rows", "out", "first", "second"),
    *("table", "offsets"),
)
"""...and likewise for addresses: part of a restore may begin at any page. ``ALIGNED`` tells the
compiler of them what it may know."""

_MOST_WORDS = 2048
"""16 KiB a program: eight 16-byte accesses in flight in each thread hide the bus's latency."""


def gather_launch(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    out: torch.Tensor,
    programs: int | None = None,
    layers: LayerTable | None = None,
) -> Launch:
    """The launch of ``gather_pages``, into ``out``, by at most ``programs`` programs.

    Without a number, here and below, by those of :func:`hcache_kernels.launch.copy_programs`. Of
    several ``layers`` at once ``out`` is ``[layers, p, length]``, and their offsets count.
    """
    arguments = {"page_ids": page_ids, "out": out, "WORDS": out.shape[-1] // WORD}
    return _launch(gather_kernel, pages, offset, out.shape[-1:], programs, arguments, layers)


def gather_planes_launch(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: Sequence[torch.Tensor],
    pool_ids: torch.Tensor,
    programs: int | None = None,
    layers: LayerTable | None = None,
    slots: int = 1,
    *,
    save: bool = False,
) -> Launch:
    """The launch of ``gather_planes`` by at most ``programs`` programs.

    Args:
        pool: As there; of several layers the first one's.
        layers: These layers, in this one launch; ``offset`` stands there.
        slots: ``pool_ids`` are slots of tokens, so many of each page.
        save: The other way round: from the pool to the pages.
    """
    _, tokens, groups, _ = pool[0].shape
    lengths = [tokens * groups * plane.shape[3] for plane in pool]
    arguments = {"page_ids": page_ids, "first": pool[0], "second": pool[1], "pool_ids": pool_ids}
    arguments |= {"FIRST": lengths[0] // WORD, "SECOND": lengths[1] // WORD}
    arguments |= {"TOKENS": tokens, "GROUPS": groups, "SLOTS": slots, "SAVE": save}
    return _launch(planes_kernel, pages, offset, lengths, programs, arguments, layers)


def scatter_launch(
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    row_ids: torch.Tensor,
    offset: int,
    programs: int | None = None,
) -> Launch:
    """The launch of ``scatter_rows`` by at most ``programs`` programs."""
    arguments = {"rows": rows, "page_ids": page_ids, "row_ids": row_ids}
    arguments |= {"WORDS": rows.shape[1] // WORD}
    return _launch(scatter_kernel, pages, offset, rows.shape[1:], programs, arguments)


def _launch(
    kernel: object,
    pages: torch.Tensor,
    offset: int,
    lengths: Sequence[int],
    programs: int | None,
    arguments: dict[str, Any],
    layers: LayerTable | None = None,
) -> Launch:
    """The launch of a kernel that moves an item of each of ``lengths`` bytes per id of a page."""
    page_ids = arguments["page_ids"]
    block = min(_MOST_WORDS, triton.next_power_of_2(max(lengths) // WORD))
    parts = len(page_ids) * sum(triton.cdiv(length // WORD, block) for length in lengths)
    moved = (arguments.get(name) for name in ("rows", "out", "first", "second"))
    addresses = [tensor.data_ptr() for tensor in (pages, *moved) if tensor is not None]
    aligned = alignment(*lengths, pages.shape[1], offset, *addresses)
    if kernel is not scatter_kernel:
        arguments |= {"count": len(page_ids), **(layers.arguments() if layers else ONE_LAYER)}
    if layers is not None:
        parts, aligned = parts * len(layers), alignment(aligned, layers.aligned)
    arguments |= {"pages": pages, "page_bytes": pages.shape[1], "offset": offset // aligned}
    arguments |= {"parts": parts, "ALIGNED": aligned}
    grid = min(programs or copy_programs(page_ids.device), parts)
    return block_launch(kernel, (grid,), block, 512, **arguments)


@triton.jit
def plane_of(plane, table, layer, number: tl.constexpr, ALIGNED: tl.constexpr):
    """Plane ``number`` of a layer; of one layer alone ``plane``, whose type it has."""
    if table is not None:
        plane = tl.multiple_of(tl.load(table + 2 * layer + number).to(plane.dtype), ALIGNED)
    return plane


@triton.jit
def _copy(source, target, part, WORDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    # Threads take two neighbouring words at once where the addresses are multiples of 16.
    at = part % ((WORDS + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), ALIGNED)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), ALIGNED)
    tl.store(target + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ADDRESSES)
def gather_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    out,  # uint8 [layers, p, 8 * WORDS]
    table,
    offsets,  # int64 [layers], or None
    count,  # p
    page_bytes,
    offset,  # in ALIGNED bytes: the compiler sees how addresses are aligned
    parts,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        item = part // ((WORDS + BLOCK - 1) // BLOCK)
        page = tl.load(page_ids + item % count).to(tl.int64)
        source = pages + page * page_bytes + offset * ALIGNED
        if offsets is not None:
            source = pages + page * page_bytes + tl.load(offsets + item // count)
        _copy(source, out + item * (8 * WORDS), part, WORDS, ALIGNED, BLOCK)
        part += tl.num_programs(0)


@triton.jit
def _copy_plane(
    segment,  # of the page
    rows,  # of the pool
    part,
    SAVE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if GROUPS == 1:
        if SAVE:
            _copy(rows, segment, part, WORDS, ALIGNED, BLOCK)
        else:
            _copy(segment, rows, part, WORDS, ALIGNED, BLOCK)
    else:
        row: tl.constexpr = WORDS // (TOKENS * GROUPS)
        at = part * BLOCK + tl.arange(0, BLOCK)
        token, group = at // (GROUPS * row), at // row % GROUPS
        of_rows = tl.multiple_of(rows.to(tl.pointer_type(tl.int64)), ALIGNED) + at
        of_segment = tl.multiple_of(segment.to(tl.pointer_type(tl.int64)), ALIGNED)
        of_segment += (group * TOKENS + token) * row + at % row
        if SAVE:
            tl.store(of_segment, tl.load(of_rows, mask=at < WORDS), mask=at < WORDS)
        else:
            tl.store(of_rows, tl.load(of_segment, mask=at < WORDS), mask=at < WORDS)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ADDRESSES)
def planes_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    first,  # uint8 [pool pages, TOKENS, GROUPS, 8 * FIRST // (TOKENS * GROUPS)]
    second,  # uint8 [pool pages, TOKENS, GROUPS, 8 * SECOND // (TOKENS * GROUPS)]
    pool_ids,  # [p * SLOTS]
    table,  # int64 [layers, 2], or None
    offsets,  # int64 [layers], or None
    count,  # p
    page_bytes,
    offset,  # in ALIGNED bytes: the compiler sees how addresses are aligned
    parts,
    SAVE: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of_first: tl.constexpr = (FIRST + BLOCK - 1) // BLOCK
    per_item: tl.constexpr = of_first + (SECOND + BLOCK - 1) // BLOCK
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        layer, item = part // per_item // count, part // per_item % count
        at = part % per_item
        page = tl.load(page_ids + item).to(tl.int64)
        place = tl.load(pool_ids + item * SLOTS).to(tl.int64) // SLOTS
        segment = pages + page * page_bytes + offset * ALIGNED
        if offsets is not None:
            segment = pages + page * page_bytes + tl.load(offsets + layer)
        if at < of_first:
            rows = plane_of(first, table, layer, 0, ALIGNED) + place * (8 * FIRST)
            _copy_plane(segment, rows, at, SAVE, TOKENS, GROUPS, FIRST, ALIGNED, BLOCK)
        else:
            segment += 8 * FIRST
            rows = plane_of(second, table, layer, 1, ALIGNED) + place * (8 * SECOND)
            at -= of_first
            _copy_plane(segment, rows, at, SAVE, TOKENS, GROUPS, SECOND, ALIGNED, BLOCK)
        part += tl.num_programs(0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ADDRESSES)
def scatter_kernel(
    rows,  # uint8 [n, 8 * WORDS]
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [n]
    row_ids,  # [n]
    page_bytes,
    offset,  # in ALIGNED bytes: the compiler sees how addresses are aligned
    parts,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        item = part // ((WORDS + BLOCK - 1) // BLOCK)
        page = tl.load(page_ids + item).to(tl.int64)
        row = tl.load(row_ids + item).to(tl.int64)
        target = pages + page * page_bytes + offset * ALIGNED + row * (8 * WORDS)
        _copy(rows + item * (8 * WORDS), target, part, WORDS, ALIGNED, BLOCK)
        part += tl.num_programs(0)
