"""Layer segments of pages in host memory <-> contiguous rows, or the KV pool, on the device.

Pages are uint8 ``[pages, page_bytes]``. Where the ids are on a GPU the pages must be in pinned
host memory or on that GPU: one kernel reads or writes them over the bus, all pages at once, so that
many small segments cost one launch and no staging. Where the ids are on the CPU torch does it, or,
to a GPU, its copy engine.

A program that waits for the bus keeps others off its multiprocessor. So a kernel is a few programs
(:func:`hcache_kernels.launch.copy_programs`) that go through all pages in turn, and the other
multiprocessors are left to what the copies run beside: projections and forward passes. Threads move
16 bytes at once where all sizes and addresses are multiples of 16, else 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .copy_engine import copy_segments
from .page_kernels import WORD, gather_launch, gather_planes_launch, scatter_launch


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
        out: Where to, contiguous uint8 ``[p, length]``; None: new, on the device of ``page_ids``.
            On a GPU, with ``page_ids`` on the CPU, its copy engine brings the bytes.

    Returns:
        uint8 ``[p, length]``.

    Raises:
        ValueError: The arguments do not fit together.
        NoCopyEngine: See :func:`hcache_kernels.copy_engine.copy_segments`.
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
    if page_ids.is_cpu and out.is_cuda:
        stream = torch.cuda.current_stream(out.device).cuda_stream
        copy_segments(pages, page_ids, offset, out, stream)
    elif page_ids.is_cpu:
        gather_pages_reference(pages, page_ids, offset, out)
    elif out.numel():
        gather_launch(pages, page_ids, offset, out).run()
    return out


def gather_planes(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: Sequence[torch.Tensor],
    pool_ids: torch.Tensor,
) -> None:
    """Copy K and V of one layer of many pages to pages of the pool; nothing else of it changes.

    In a page K is one group of heads after the other, each of all tokens, then V likewise; the pool
    has one token after the other, each with all heads.

    Args:
        pages: All pages, uint8 ``[pages, page_bytes]``.
        page_ids: Which ones, int32 or int64 ``[p]``, in any order. Values are checked here only
            when they are on the CPU.
        offset: Where K begins in a page, a multiple of 8.
        pool: K and V of the pool, each uint8 ``[pool pages, page_size, groups, row_bytes]``,
            contiguous; ``row_bytes`` is a multiple of 8 and may differ.
        pool_ids: Where to, each page of the pool once, as ``page_ids`` and on the pool's device.

    Raises:
        ValueError: The arguments do not fit together. Nothing was written.
    """
    first, second = pool
    for name, plane in (("K", first), ("V", second)):
        if plane.dtype != torch.uint8 or plane.dim() != 4 or not plane.is_contiguous():
            raise ValueError(
                f"{name} of the pool is {list(plane.shape)} of {plane.dtype}: must be contiguous "
                "uint8 [pool pages, page_size, groups, row_bytes]"
            )
        if plane.shape[3] % WORD:
            raise ValueError(
                f"row_bytes of {name} is {plane.shape[3]}: must be a multiple of {WORD}"
            )
    if first.shape[:3] != second.shape[:3] or first.device != second.device:
        raise ValueError(
            f"K of the pool is {list(first.shape)} on {first.device}, V {list(second.shape)} on "
            f"{second.device}: may differ in row_bytes only"
        )
    _check_pages(pages, offset, sum(plane[0].numel() for plane in pool) if len(first) else 0)
    check_ids("page_ids", page_ids, len(page_ids), len(pages))
    check_ids("pool_ids", pool_ids, len(page_ids), len(first))
    if not first.device == page_ids.device == pool_ids.device:
        raise ValueError(
            f"the pool is on {first.device}, page_ids on {page_ids.device}, pool_ids on "
            f"{pool_ids.device}: must be on one device"
        )
    if first.is_cpu:
        gather_planes_reference(pages, page_ids, offset, pool, pool_ids)
    elif len(page_ids):
        gather_planes_launch(pages, page_ids, offset, pool, pool_ids).run()


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
    torch.index_select(pages[:, offset : offset + out.shape[1]], 0, page_ids, out=out)


def gather_planes_reference(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: Sequence[torch.Tensor],
    pool_ids: torch.Tensor,
) -> None:
    """``plane[pool_ids[i], token, group] = plane of page_ids[i] [group, token]``, for K and V."""
    start = offset // WORD
    for plane in pool:
        words = plane.view(torch.int64)
        _, tokens, groups, row = words.shape
        end = start + tokens * groups * row
        found = pages.view(torch.int64)[:, start:end].index_select(0, page_ids)
        words.index_copy_(0, pool_ids.long(), found.view(-1, groups, tokens, row).transpose(1, 2))
        start = end


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
