"""``gather_pages`` and ``scatter_rows``: by one kernel on a GPU, by torch on the CPU."""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import Launch
from .checks import WORD, check_ids, check_pages
from .reference import gather_pages_reference, scatter_rows_reference

_MOST_WORDS = 2048
"""16 KiB a program: eight 16-byte accesses in flight in each thread hide the bus's latency."""


@triton.jit
def _copy(source, target, first_word, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    # Threads take two neighbouring words at once where the addresses are multiples of 16.
    at = first_word + tl.arange(0, BLOCK)
    source = source.to(tl.pointer_type(tl.int64))
    target = target.to(tl.pointer_type(tl.int64))
    tl.store(target + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)


@triton.jit
def gather_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    out,  # uint8 [p, 8 * WORDS]
    page_bytes,
    offset,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    page = tl.load(page_ids + item).to(tl.int64)
    source = pages + page * page_bytes + offset
    _copy(source, out + item * (8 * WORDS), tl.program_id(1) * BLOCK, WORDS, BLOCK)


@triton.jit
def scatter_kernel(
    rows,  # uint8 [n, 8 * WORDS]
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [n]
    row_ids,  # [n]
    page_bytes,
    offset,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    page = tl.load(page_ids + item).to(tl.int64)
    row = tl.load(row_ids + item).to(tl.int64)
    target = pages + page * page_bytes + offset + row * (8 * WORDS)
    _copy(rows + item * (8 * WORDS), target, tl.program_id(1) * BLOCK, WORDS, BLOCK)


def gather_pages(
    pages: torch.Tensor, page_ids: torch.Tensor, offset: int, length: int
) -> torch.Tensor:
    """The same bytes of many pages, one after the other.

    Args:
        pages: All pages, uint8 ``[pages, page_bytes]``.
        page_ids: Which ones, int32 or int64 ``[p]``, in any order. Values are checked here only
            when they are on the CPU.
        offset: Where the bytes begin in a page, a multiple of 8 (fastest: of 16, as all sizes).
        length: How many, a multiple of 8.

    Returns:
        uint8 ``[p, length]`` on the device of ``page_ids``.

    Raises:
        ValueError: The arguments do not fit together.
    """
    check_pages(pages, offset, length)
    check_ids("page_ids", page_ids, len(page_ids), len(pages))
    out = torch.empty((len(page_ids), length), dtype=torch.uint8, device=page_ids.device)
    if page_ids.is_cpu:
        gather_pages_reference(pages, page_ids, offset, out)
    elif out.numel():
        gather_launch(pages, page_ids, offset, out).run()
    return out


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
    check_pages(pages, offset, row_bytes)
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


def gather_launch(
    pages: torch.Tensor, page_ids: torch.Tensor, offset: int, out: torch.Tensor
) -> Launch:
    """The launch of :func:`gather_pages`, into ``out``."""
    arguments = {"pages": pages, "page_ids": page_ids, "out": out}
    return _launch(gather_kernel, arguments, pages, offset, *out.shape)


def scatter_launch(
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    row_ids: torch.Tensor,
    offset: int,
) -> Launch:
    """The launch of :func:`scatter_rows`."""
    arguments = {"rows": rows, "pages": pages, "page_ids": page_ids, "row_ids": row_ids}
    return _launch(scatter_kernel, arguments, pages, offset, *rows.shape)


def _launch(
    kernel: object,
    arguments: dict[str, torch.Tensor],
    pages: torch.Tensor,
    offset: int,
    items: int,
    length: int,
) -> Launch:
    words = length // WORD
    block = min(_MOST_WORDS, triton.next_power_of_2(words))
    sizes = {"page_bytes": pages.shape[1], "offset": offset, "WORDS": words, "BLOCK": block}
    warps = max(1, min(4, block // 512))
    return Launch(kernel, (items, triton.cdiv(words, block)), arguments | sizes, warps, stages=1)
