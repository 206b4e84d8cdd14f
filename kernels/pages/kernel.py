"""The kernels of copies between pages and the device, and their launches, which check nothing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Launch, alignment, block_launch, copy_programs

WORD = 8  # bytes that move together; lengths, offsets and page sizes are multiples of it
SIZES = ("offset", "parts", "count")
"""Arguments that differ from launch to launch: for some Triton would compile the kernel again..."""
ADDRESSES = ("pages", "page_ids", "pool_ids", "rows", "first", "second", "table", "offsets")
"""...and likewise for addresses. ``ALIGNED`` gives the compiler their alignment."""

_MOST_WORDS = 2048  # 16 KiB a program: eight accesses in flight in a thread hide the bus's latency

Planes = tuple[torch.Tensor, ...]


class LayerTable(NamedTuple):
    """Layers whose K and V look alike, on one GPU, and their segments in pages."""

    planes: Planes  # K and V of the first layer, or its latents
    # of K and V of each layer, or twice of its latents, int64 [layers, 2], on the device
    addresses: torch.Tensor
    offsets: torch.Tensor  # of each layer's segment in a page, int64 [layers], on the device
    aligned: int  # the largest of 16, 8, 4, 2 and 1 that divides all of these

    @staticmethod
    def of(planes: Sequence[Planes], offsets: Sequence[int]) -> "LayerTable":
        """The table of layers with these ``planes``, contiguous, and ``offsets``; to be kept."""
        first, addresses = planes[0], [[one[at].data_ptr() for at in (0, -1)] for one in planes]
        device = first[0].device
        flat = [address for both in addresses for address in both]
        return LayerTable(
            first,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.tensor(offsets, dtype=torch.int64, device=device),
            alignment(*flat, *offsets),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def arguments(self) -> dict[str, Any]:
        """What kernels are given; of one layer alone (:data:`ONE_LAYER`) there is no table."""
        return {"table": self.addresses, "offsets": self.offsets}


ONE_LAYER: dict[str, Any] = {"table": None, "offsets": None}


def gather_launch(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    rows: torch.Tensor,
    layers: LayerTable | None = None,
    *,
    save: bool = False,
) -> Launch:
    """The launch of ``gather_pages``, into ``rows``.

    Args:
        layers: These layers, in this one launch: ``rows`` are ``[layers, p, length]``, and
            ``offset`` stands in the table.
        save: The other way round: ``scatter_pages``.
    """
    arguments = {"page_ids": page_ids, "rows": rows, "WORDS": rows.shape[-1] // WORD, "SAVE": save}
    return _launch(rows_kernel, pages, offset, rows.shape[-1:], arguments, layers)


def gather_planes_launch(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: Sequence[torch.Tensor],
    pool_ids: torch.Tensor,
    layers: LayerTable | None = None,
    *,
    save: bool = False,
) -> Launch:
    """The launch of ``gather_planes``.

    Args:
        pool: As there; of several layers the first one's.
        layers: As in :func:`gather_launch`; then ``pool_ids`` are the slots of all tokens.
        save: The other way round: from the pool to the pages.
    """
    _, tokens, groups, _ = pool[0].shape
    lengths = [tokens * groups * plane.shape[3] for plane in pool]
    second = lengths[1] // WORD if len(pool) > 1 else 0
    arguments = {"page_ids": page_ids, "first": pool[0], "second": pool[-1], "pool_ids": pool_ids}
    arguments |= {"FIRST": lengths[0] // WORD, "SECOND": second}
    arguments |= {"TOKENS": tokens, "GROUPS": groups, "SAVE": save}
    arguments |= {"SLOTS": 1 if layers is None else tokens}
    return _launch(planes_kernel, pages, offset, lengths, arguments, layers)


def _launch(
    kernel: object,
    pages: torch.Tensor,
    offset: int,
    lengths: Sequence[int],
    arguments: dict[str, Any],
    layers: LayerTable | None,
) -> Launch:
    """The launch of a kernel that moves an item of each of ``lengths`` bytes per id of a page."""
    page_ids = arguments["page_ids"]
    block = min(_MOST_WORDS, triton.next_power_of_2(max(lengths) // WORD))
    parts = len(page_ids) * sum(triton.cdiv(length // WORD, block) for length in lengths)
    moved = (arguments.get(name) for name in ("rows", "first", "second"))
    addresses = [tensor.data_ptr() for tensor in (pages, *moved) if tensor is not None]
    aligned = alignment(*lengths, pages.shape[1], offset, *addresses)
    if layers is not None:
        parts, aligned = parts * len(layers), alignment(aligned, layers.aligned)
    arguments |= {"pages": pages, "page_bytes": pages.shape[1], "offset": offset // aligned}
    arguments |= {"parts": parts, "ALIGNED": aligned, "count": len(page_ids)}
    arguments |= layers.arguments() if layers else ONE_LAYER
    grid = min(copy_programs(page_ids.device), parts)
    return block_launch(kernel, (grid,), block, 512, **arguments)


@triton.jit
def plane_of(plane, table, layer, number: tl.constexpr, ALIGNED: tl.constexpr):
    """Plane ``number`` of a layer; of one layer alone ``plane``, whose type it has."""
    if table is not None:
        plane = tl.multiple_of(tl.load(table + 2 * layer + number).to(plane.dtype), ALIGNED)
    return plane


@triton.jit
def segment_of(pages, page, page_bytes, offset, offsets, layer):
    """Where the segment of a layer begins in a page; of one layer alone at ``offset``."""
    if offsets is not None:
        offset = tl.load(offsets + layer)
    return pages + page * page_bytes + offset


@triton.jit
def _copy(
    segment,  # of the page
    rows,
    part,
    SAVE: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr = 1,
    GROUPS: tl.constexpr = 1,
):
    """Copy part number ``part`` (``BLOCK`` words) of a segment to ``rows``, with ``SAVE`` back. A
    segment is group by group, and there token by token; rows are token by token."""
    # Threads take two neighbouring words at once where the addresses are multiples of 16.
    at = part % ((WORDS + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.multiple_of(segment.to(tl.pointer_type(tl.int64)), ALIGNED)
    rows = tl.multiple_of(rows.to(tl.pointer_type(tl.int64)), ALIGNED)
    in_segment = at
    if GROUPS > 1:
        row: tl.constexpr = WORDS // (TOKENS * GROUPS)
        token, group = at // (GROUPS * row), at // row % GROUPS
        in_segment = (group * TOKENS + token) * row + at % row
    if SAVE:
        tl.store(segment + in_segment, tl.load(rows + at, mask=at < WORDS), mask=at < WORDS)
    else:
        tl.store(rows + at, tl.load(segment + in_segment, mask=at < WORDS), mask=at < WORDS)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ADDRESSES)
def rows_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    rows,  # uint8 [layers, p, 8 * WORDS]
    table,
    offsets,  # int64 [layers], or None
    count,  # p
    page_bytes,
    offset,  # in ALIGNED bytes: the compiler sees how addresses are aligned
    parts,
    SAVE: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one segment of each page, in each layer, to ``rows``, or with ``SAVE`` back."""
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        item = part // ((WORDS + BLOCK - 1) // BLOCK)
        page = tl.load(page_ids + item % count).to(tl.int64)
        segment = segment_of(pages, page, page_bytes, offset * ALIGNED, offsets, item // count)
        _copy(segment, rows + item * (8 * WORDS), part, SAVE, WORDS, ALIGNED, BLOCK)
        part += tl.num_programs(0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ADDRESSES)
def planes_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    first,  # uint8 [pool pages, TOKENS, GROUPS, 8 * FIRST // (TOKENS * GROUPS)]
    second,  # uint8 [pool pages, TOKENS, GROUPS, 8 * SECOND // (TOKENS * GROUPS)]; none if 0
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
    """Copy K and V (FIRST and SECOND words) of pages to pages of the pool; with SAVE back."""
    of_first: tl.constexpr = (FIRST + BLOCK - 1) // BLOCK
    per_item: tl.constexpr = of_first + (SECOND + BLOCK - 1) // BLOCK
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        layer, item = part // per_item // count, part // per_item % count
        at = part % per_item
        page = tl.load(page_ids + item).to(tl.int64)
        place = tl.load(pool_ids + item * SLOTS).to(tl.int64) // SLOTS
        segment = segment_of(pages, page, page_bytes, offset * ALIGNED, offsets, layer)
        if at < of_first:
            rows = plane_of(first, table, layer, 0, ALIGNED) + place * (8 * FIRST)
            _copy(segment, rows, at, SAVE, FIRST, ALIGNED, BLOCK, TOKENS, GROUPS)
        elif SECOND > 0:
            segment += 8 * FIRST
            rows = plane_of(second, table, layer, 1, ALIGNED) + place * (8 * SECOND)
            at -= of_first
            _copy(segment, rows, at, SAVE, SECOND, ALIGNED, BLOCK, TOKENS, GROUPS)
        part += tl.num_programs(0)
