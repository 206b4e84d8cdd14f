"""Layer segments of pages in host memory <-> contiguous rows, or the KV pool, on the device.

Pages are uint8 ``[pages, page_bytes]``. Where the ids are on a GPU the pages must be in pinned
host memory or on that GPU: one kernel reads or writes them over the bus, all pages at once, so that
many small segments cost one launch and no staging. Where the ids are on the CPU torch does it.

A program that waits for the bus keeps others off its multiprocessor. So a kernel is a few programs
that go through all pages in turn, and the other multiprocessors are left to what the
copies run beside: projections and forward passes.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import COPY_PROGRAMS, Launch, alignment, block_launch

WORD = 8
"""Bytes that move together; lengths, offsets and page sizes are multiples of it."""

SIZES = ("offset", "parts")
"""Arguments that differ from launch to launch. Triton would compile a kernel again for those that
are 1, or multiples of 16, and that in the middle of a restore."""

_MOST_WORDS = 2048
"""16 KiB a program: eight 16-byte accesses in flight in each thread hide the bus's latency."""


def gather_pages(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    length: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same bytes of many pages, one after the other.

    Args:
        pages: All pages, uint8 ``[pages, page_bytes]``.
        page_ids: Which ones, int32 or int64 ``[p]``, in any order. Values are checked here only
            when they are on the CPU.
        offset: Where the bytes begin in a page, a multiple of 8 (fastest: of 16, as all sizes).
        length: How many, a multiple of 8.
        out: Where to, contiguous uint8 ``[p, length]`` on the device of ``page_ids``; None: new.

    Returns:
        uint8 ``[p, length]`` on the device of ``page_ids``.

    Raises:
        ValueError: The arguments do not fit together.
    """
    _check_pages(pages, offset, length)
    check_ids("page_ids", page_ids, len(page_ids), len(pages))
    shape = (len(page_ids), length)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=page_ids.device)
    if out.shape != shape or out.dtype != torch.uint8 or not out.is_contiguous():
        raise ValueError(
            f"out is {list(out.shape)} of {out.dtype}: must be contiguous uint8 {list(shape)}"
        )
    if page_ids.is_cpu:
        gather_pages_reference(pages, page_ids, offset, out)
    elif out.numel():
        gather_launch(pages, page_ids, offset, out).run()
    return out


def gather_plane(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: torch.Tensor,
    pool_ids: torch.Tensor,
) -> None:
    """Copy K or V of one layer of many pages to pages of the pool; nothing else of it changes.

    A page has one group of heads after the other, each of all tokens; the pool has one token after
    the other, each with all heads.

    Args:
        pages: All pages, uint8 ``[pages, page_bytes]``.
        page_ids: Which ones, int32 or int64 ``[p]``, in any order. Values are checked here only
            when they are on the CPU.
        offset: Where K (or V) begins in a page, a multiple of 8.
        pool: uint8 ``[pool pages, page_size, groups, row_bytes]``, contiguous; ``row_bytes`` is a
            multiple of 8.
        pool_ids: Where to, each page of the pool once, as ``page_ids`` and on the pool's device.

    Raises:
        ValueError: The arguments do not fit together. Nothing was written.
    """
    if pool.dtype != torch.uint8 or pool.dim() != 4 or not pool.is_contiguous():
        raise ValueError(
            f"pool is {list(pool.shape)} of {pool.dtype}: must be contiguous uint8 "
            "[pool pages, page_size, groups, row_bytes]"
        )
    if pool.shape[3] % WORD:
        raise ValueError(f"row_bytes is {pool.shape[3]}: must be a multiple of {WORD}")
    _check_pages(pages, offset, pool[0].numel() if len(pool) else 0)
    check_ids("page_ids", page_ids, len(page_ids), len(pages))
    check_ids("pool_ids", pool_ids, len(page_ids), len(pool))
    if not pool.device == page_ids.device == pool_ids.device:
        raise ValueError(
            f"the pool is on {pool.device}, page_ids on {page_ids.device}, pool_ids on "
            f"{pool_ids.device}: must be on one device"
        )
    if pool.is_cpu:
        gather_plane_reference(pages, page_ids, offset, pool, pool_ids)
    elif len(page_ids):
        gather_plane_launch(pages, page_ids, offset, pool, pool_ids).run()


def scatter_rows(
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    row_ids: torch.Tensor,
    offset: int,
) -> None:
    """Write each row to its place in a layer segment; nothing else of the pages changes.

    Args:
        rows: uint8 ``[n, row_bytes]``, contiguous; ``row_bytes`` is a multiple of 8.
        pages: All pages, uint8 ``[pages, page_bytes]``.
        page_ids: The page of each row, int32 or int64 ``[n]``. Values are checked here only when
            they are on the CPU.
        row_ids: Its number among the rows of the segment, likewise.
        offset: Where the segment begins in a page, a multiple of 8. Two rows for one place leave
            either of them there.

    Raises:
        ValueError: The arguments do not fit together. Nothing was written.
    """
    if rows.dtype != torch.uint8 or rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(
            f"rows are {list(rows.shape)} of {rows.dtype}: must be contiguous uint8 [n, row_bytes]"
        )
    n, row_bytes = rows.shape
    _check_pages(pages, offset, row_bytes)
    check_ids("page_ids", page_ids, n, len(pages))
    page_rows = (pages.shape[1] - offset) // row_bytes if row_bytes else 0
    check_ids("row_ids", row_ids, n, page_rows)
    if not rows.device == page_ids.device == row_ids.device:
        raise ValueError(
            f"rows are on {rows.device}, page_ids on {page_ids.device}, row_ids on "
            f"{row_ids.device}: must be on one device"
        )
    if rows.is_cpu:
        scatter_rows_reference(rows, pages, page_ids, row_ids, offset)
    elif rows.numel():
        scatter_launch(rows, pages, page_ids, row_ids, offset).run()


def gather_pages_reference(
    pages: torch.Tensor, page_ids: torch.Tensor, offset: int, out: torch.Tensor
) -> None:
    """``out[i] = pages[page_ids[i], offset : offset + length]``."""
    out.copy_(pages[:, offset : offset + out.shape[1]].index_select(0, page_ids))


def gather_plane_reference(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: torch.Tensor,
    pool_ids: torch.Tensor,
) -> None:
    """``pool[pool_ids[i], token, group] = plane of page_ids[i] [group, token]``."""
    words = pool.view(torch.int64)
    _, tokens, groups, row = words.shape
    first, length = offset // WORD, tokens * groups * row
    plane = pages.view(torch.int64)[:, first : first + length].index_select(0, page_ids)
    words.index_copy_(0, pool_ids.long(), plane.view(-1, groups, tokens, row).transpose(1, 2))


def scatter_rows_reference(
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    row_ids: torch.Tensor,
    offset: int,
) -> None:
    """Row ``i`` becomes row ``row_ids[i]`` of the segment at ``offset`` of page ``page_ids[i]``."""
    page_rows, words = (pages.shape[1] - offset) // rows.shape[1], rows.view(torch.int64)
    segment = pages.view(torch.int64)[:, offset // WORD :][:, : page_rows * words.shape[1]]
    segment.unflatten(1, (page_rows, -1))[page_ids.long(), row_ids.long()] = words


def _check_pages(pages: torch.Tensor, offset: int, length: int) -> None:
    """Refuse, by a ValueError, memory that is no pages and a segment that no page holds."""
    if pages.dtype != torch.uint8 or pages.dim() != 2 or not pages.is_contiguous():
        raise ValueError(
            f"pages are {list(pages.shape)} of {pages.dtype}: must be contiguous uint8 "
            "[pages, page_bytes]"
        )
    for name, value in (("page_bytes", pages.shape[1]), ("offset", offset), ("length", length)):
        if value % WORD:
            raise ValueError(f"{name} is {value}: must be a multiple of {WORD}")
    if offset < 0 or length < 0 or offset + length > pages.shape[1]:
        raise ValueError(
            f"bytes {offset} to {offset + length} are not within a page of {pages.shape[1]}"
        )


def check_ids(
    name: str,
    ids: torch.Tensor,
    count: int,
    limit: int,
    types: tuple[torch.dtype, ...] = (torch.int32, torch.int64),
) -> None:
    """Refuse, by a ValueError, ids that are no vector of ``count``, or (CPU) not below ``limit``.

    Reads no values of the GPU, so it never synchronises: ids that come from there were checked by
    whoever made them.
    """
    if ids.dtype not in types or ids.shape != (count,):
        wanted = " or ".join(str(one).removeprefix("torch.") for one in types)
        raise ValueError(f"{name} are {list(ids.shape)} of {ids.dtype}: must be {wanted} [{count}]")
    if ids.is_cpu and count and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(
            f"{name} go from {int(ids.min())} to {int(ids.max())}: must be from 0 to {limit - 1}"
        )


def gather_launch(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    out: torch.Tensor,
    programs: int = COPY_PROGRAMS,
) -> Launch:
    """The launch of :func:`gather_pages`, into ``out``, by at most ``programs`` programs."""
    ids = {"page_ids": page_ids, "out": out}
    return _launch(gather_kernel, out.shape, pages, offset, programs, **ids)


def gather_plane_launch(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: torch.Tensor,
    pool_ids: torch.Tensor,
    programs: int = COPY_PROGRAMS,
) -> Launch:
    """The launch of :func:`gather_plane` by at most ``programs`` programs."""
    _, tokens, groups, row_bytes = pool.shape
    shape = torch.Size((len(page_ids), tokens * groups * row_bytes))
    ids = {"page_ids": page_ids, "pool": pool, "pool_ids": pool_ids}
    order = {"TOKENS": tokens, "GROUPS": groups}
    return _launch(gather_plane_kernel, shape, pages, offset, programs, **ids, **order)


def scatter_launch(
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    row_ids: torch.Tensor,
    offset: int,
    programs: int = COPY_PROGRAMS,
) -> Launch:
    """The launch of :func:`scatter_rows` by at most ``programs`` programs."""
    ids = {"rows": rows, "page_ids": page_ids, "row_ids": row_ids}
    return _launch(scatter_kernel, rows.shape, pages, offset, programs, **ids)


def _launch(
    kernel: object,
    shape: torch.Size,
    pages: torch.Tensor,
    offset: int,
    programs: int,
    **arguments: Any,
) -> Launch:
    """The launch of a kernel that moves ``shape[0]`` items of ``shape[1]`` bytes."""
    items, words = shape[0], shape[1] // WORD
    block = min(_MOST_WORDS, triton.next_power_of_2(words))
    parts = items * triton.cdiv(words, block)
    aligned = alignment(shape[1], pages.shape[1], offset)
    arguments |= {"pages": pages, "page_bytes": pages.shape[1], "offset": offset // aligned}
    arguments |= {"parts": parts, "WORDS": words, "ALIGNED": aligned}
    return block_launch(kernel, (min(programs, parts),), block, 512, **arguments)


@triton.jit
def _copy(source, target, part, WORDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    # Threads take two neighbouring words at once where the addresses are multiples of 16.
    at = part % ((WORDS + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    source = tl.multiple_of(source, ALIGNED).to(tl.pointer_type(tl.int64))
    target = tl.multiple_of(target, ALIGNED).to(tl.pointer_type(tl.int64))
    tl.store(target + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)


@triton.jit(do_not_specialize=SIZES)
def gather_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    out,  # uint8 [p, 8 * WORDS]
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
        source = pages + page * page_bytes + offset * ALIGNED
        _copy(source, out + item * (8 * WORDS), part, WORDS, ALIGNED, BLOCK)
        part += tl.num_programs(0)


@triton.jit(do_not_specialize=SIZES)
def gather_plane_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    pool,  # uint8 [pool pages, TOKENS, GROUPS, 8 * WORDS // (TOKENS * GROUPS)]
    pool_ids,  # [p]
    page_bytes,
    offset,  # in ALIGNED bytes: the compiler sees how addresses are aligned
    parts,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    per_item: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    row: tl.constexpr = WORDS // (TOKENS * GROUPS)
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        item = part // per_item
        page = tl.load(page_ids + item).to(tl.int64)
        place = tl.load(pool_ids + item).to(tl.int64)
        source = pages + page * page_bytes + offset * ALIGNED
        target = pool + place * (8 * WORDS)
        if GROUPS == 1:
            _copy(source, target, part, WORDS, ALIGNED, BLOCK)
        else:
            at = part % per_item * BLOCK + tl.arange(0, BLOCK)
            token, group = at // (GROUPS * row), at // row % GROUPS
            words = tl.load(
                source.to(tl.pointer_type(tl.int64)) + (group * TOKENS + token) * row + at % row,
                mask=at < WORDS,
            )
            tl.store(target.to(tl.pointer_type(tl.int64)) + at, words, mask=at < WORDS)
        part += tl.num_programs(0)


@triton.jit(do_not_specialize=SIZES)
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
