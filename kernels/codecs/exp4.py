"""``exp4`` (the code: :mod:`.exp4_code`): rows of hidden states, and the kernels for all units.

A kernel finds the values of its unit in one or two *planes* (rows, or K and V of a layer), by a
:class:`Cut`; each is ``[items, values]``: rows, or pages of the KV pool.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Launch
from ..layers import ONE_LAYER, LayerTable
from ..page_kernels import plane_of
from .base import Codec, UnsupportedRows
from .exp4_code import (
    BLOCK_VALUES,
    HEAD_BYTES,
    REFERENCE_VALUES,
    blocks_of,
    counted_blocks,
    decode_units,
    encode_units,
    most_exceptions,
    tail_bytes,
    unit_bytes,
)

_MOST_VALUES = 1 << 16
_THREAD_PAIRS = 8
"""Pairs of values of a thread: 16 bytes of sign and mantissa."""


class Cut(NamedTuple):
    """How the values of an item divide into units: groups of channels, each into runs of tokens.

    Attributes:
        width: Values of a token in a unit, an even number.
        tokens: Tokens of a unit; together with ``width`` a multiple of 16 values, at most 65536.
        groups: Groups of a token's values.
        pieces: Units of a group.
    """

    width: int
    tokens: int = 1
    groups: int = 1
    pieces: int = 1

    @property
    def values(self) -> int:
        """Values of a unit."""
        return self.width * self.tokens

    @property
    def units(self) -> int:
        """Units of an item in one plane, group after group."""
        return self.groups * self.pieces


class Exp4Codec(Codec):
    """Rows of bfloat16, width a multiple of 16, at most 65536."""

    name = "exp4"
    code = "exp4.2"  # before, exceptions had positions
    lossless = True

    def _row_bytes(self) -> int:
        if self.dtype != torch.bfloat16:
            raise UnsupportedRows(f"codec 'exp4' takes bfloat16 hidden states, not {self.dtype}")
        if self.hidden_size % 16 or not 16 <= self.hidden_size <= _MOST_VALUES:
            raise UnsupportedRows(
                f"codec 'exp4' takes rows and units whose values are a multiple of 16 and at most "
                f"{_MOST_VALUES}, not {self.hidden_size}"
            )
        return unit_bytes(self.hidden_size)

    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [encode_units(some) for some in rows.split(self._rows_at_once)]
        encoded, ok = zip(*parts, strict=True)
        return torch.cat(encoded), torch.cat(ok)

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        parts = encoded.split(self._rows_at_once)
        return torch.cat([decode_units(some, self.hidden_size) for some in parts])

    @property
    def _rows_at_once(self) -> int:
        return max(1, REFERENCE_VALUES // self.hidden_size)

    def encode_launch(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> Launch:
        return encode_launch((rows,), None, Cut(self.hidden_size), encoded, None, 0, ok)

    def decode_launch(self, encoded: torch.Tensor, rows: torch.Tensor) -> Launch:
        return decode_launch(encoded, (rows,), None, Cut(self.hidden_size))


def encode_launch(
    planes: Sequence[torch.Tensor],
    items: torch.Tensor | None,
    cut: Cut,
    memory: torch.Tensor,
    pages: torch.Tensor | None,
    offset: int,
    fits: torch.Tensor,
    layers: LayerTable | None = None,
    slots: int = 1,
) -> Launch:
    """Encode units of some items of the planes into pages.

    Args:
        planes: One or two, contiguous bfloat16 ``[all items, ...]``, cut alike.
        items: Which items, int64 ``[p]``; None: the first ones.
        cut: The units of an item in each plane.
        memory: uint8 ``[all pages, page_bytes]``, which the device can write: its own, or pinned.
        pages: The page of each item, int64 ``[p]``; None: as many pages as items, in their order.
        offset: Where the units of an item begin in its page, a multiple of 8. The units of the
            first plane come first.
        fits: Which units fit, bool ``[p, planes * units]``; of several layers ``[layers, p, ...]``.
        layers: Several layers, whose planes and offsets stand there, in this one launch.
        slots: Slots of an item: ``items`` are the first ones of these, int64 ``[p * slots]``.
    """
    return _launch(
        encode_kernel,
        fits.numel() // (1 if layers is None else len(layers)),
        cut,
        layers,
        slots,
        planes,
        items,
        memory=memory,
        pages=pages,
        page_bytes=memory.shape[1],
        offset=offset,
        fits=fits.view(torch.uint8),
        COUNTED=counted_blocks(cut.values),
        POOL=triton.next_power_of_2(most_exceptions(cut.values)),
    )


def decode_launch(
    encoded: torch.Tensor,
    planes: Sequence[torch.Tensor],
    items: torch.Tensor | None,
    cut: Cut,
    layers: LayerTable | None = None,
    slots: int = 1,
) -> Launch:
    """Decode the units of some items into the planes.

    Args:
        encoded: Contiguous uint8 ``[p, planes * units * unit_bytes]``, as :func:`encode_launch`
            writes them (of several layers ``[layers, p, ...]``); bytes of any other kind decode to
            something.
        planes: As there; so ``items``, ``cut``, ``layers`` and ``slots``.
    """
    return _launch(
        decode_kernel,
        encoded.shape[-2] * len(planes) * cut.units * blocks_of(cut.values),
        cut,
        layers,
        slots,
        planes,
        items,
        encoded=encoded,
    )


def _launch(
    kernel: Any,
    programs: int,
    cut: Cut,
    layers: LayerTable | None,
    slots: int,
    planes: Sequence[torch.Tensor],
    items: torch.Tensor | None,
    **arguments: Any,
) -> Launch:
    values = cut.values
    block = min(BLOCK_VALUES, triton.next_power_of_2(values)) // 2
    arguments |= {
        "first": planes[0].view(torch.int32),
        "second": planes[-1].view(torch.int32),
        "items": items,
        **(ONE_LAYER if layers is None else layers.arguments()),
        "ALIGNED": 1 if layers is None else layers.aligned,
        "SLOTS": slots,
        "PLANES": len(planes),
        "GROUPS": cut.groups,
        "PIECES": cut.pieces,
        "TOKENS": cut.tokens,
        "WIDTH": cut.width // 2,
        "STARTS": HEAD_BYTES,
        "MOST": most_exceptions(values),
        "TAIL": tail_bytes(values),
        "BLOCK": block,
    }
    grid = (programs, 1 if layers is None else len(layers))
    return Launch(kernel, grid, arguments, max(1, block // (32 * _THREAD_PAIRS)), stages=1)


@triton.jit
def item_place(items, item, SLOTS: tl.constexpr):
    """The number of an item in its plane."""
    return tl.load(items + item * SLOTS).to(tl.int64) // SLOTS


@triton.jit
def _unit_values(
    first,
    second,
    table,
    layer,
    items,
    item,
    unit,
    ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where the values of a unit begin; unit is its number among those of its item."""
    plane = plane_of(first, table, layer, 0, ALIGNED)
    if PLANES == 2:
        other = plane_of(second, table, layer, 1, ALIGNED)
        plane = tl.where(unit < GROUPS * PIECES, plane, other)
        unit = unit % (GROUPS * PIECES)
    place = item
    if items is not None:
        place = item_place(items, item, SLOTS)
    token = (place * PIECES + unit % PIECES) * TOKENS
    return plane + (token * GROUPS + unit // PIECES) * WIDTH


@triton.jit
def in_plane(at, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Places of pairs of a unit, behind its first one, in the plane."""
    return at if GROUPS == 1 else at // WIDTH * (GROUPS * WIDTH) + at % WIDTH


# One word of two values becomes 16 bits of sign and mantissa and 8 bits of codes: nothing moves
# between threads but the ranks of exceptions.
@triton.jit(do_not_specialize_on_alignment=["items", "pages", "fits", "table", "offsets"])
def encode_kernel(
    first,  # int32 [all items, PIECES * TOKENS * GROUPS * WIDTH]: two bfloat16 values each
    second,
    table,  # int64 [layers, 2], or None
    offsets,  # int64 [layers], or None
    items,  # int64 [p * SLOTS], or None
    memory,  # uint8 [all pages, page_bytes]
    pages,  # int64 [p], or None
    fits,  # uint8 [layers, p, PLANES * GROUPS * PIECES]
    page_bytes,
    offset,
    ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    STARTS: tl.constexpr,
    MOST: tl.constexpr,
    TAIL: tl.constexpr,
    COUNTED: tl.constexpr,
    POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PAIRS: tl.constexpr = TOKENS * WIDTH
    UNITS: tl.constexpr = PLANES * GROUPS * PIECES
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = _unit_values(
        first,
        second,
        table,
        layer,
        items,
        item,
        unit,
        ALIGNED,
        SLOTS,
        PLANES,
        GROUPS,
        PIECES,
        TOKENS,
        WIDTH,
    )
    fits += layer * tl.num_programs(0)
    page = item
    if pages is not None:
        page = tl.load(pages + item).to(tl.int64)
    if offsets is not None:
        offset = tl.load(offsets + layer)
    encoded = memory + page * page_bytes + offset + unit * (3 * PAIRS + TAIL)

    histogram = tl.zeros([256], tl.int32)
    for start in range(0, PAIRS, COUNTED * BLOCK):
        at = start + tl.arange(0, BLOCK)
        pair = tl.load(values + in_plane(at, GROUPS, WIDTH), mask=at < PAIRS, other=0)
        histogram += tl.histogram(pair >> 7 & 0xFF, 256, mask=at < PAIRS)
        histogram += tl.histogram(pair >> 23 & 0xFF, 256, mask=at < PAIRS)
    exponent = tl.arange(0, 256)
    up_to = tl.cumsum(histogram, 0)
    window = tl.gather(up_to, tl.minimum(exponent + 13, 255), 0) - up_to + histogram
    lowest = tl.argmax(tl.where(exponent <= 242, window, -1), 0, tie_break_left=True)
    outside = (exponent < lowest) | (exponent >= lowest + 14)
    extra = tl.argmax(tl.where(outside, histogram, -1), 0, tie_break_left=True)

    tail = encoded + 3 * PAIRS
    tl.store(tail, lowest.to(tl.uint8))
    tl.store(tail + 1, extra.to(tl.uint8))
    pool = tail + (TAIL - MOST)
    found = 0
    for start in range(0, PAIRS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < PAIRS
        pair = tl.load(values + in_plane(at, GROUPS, WIDTH), mask=inside, other=0)
        even, odd = pair >> 7 & 0xFF, pair >> 23 & 0xFF
        sign_mantissa = pair & 0x7F | pair >> 8 & 0x80 | pair >> 8 & 0x7F00 | pair >> 16 & 0x8000
        even_code, odd_code = _code(even, lowest, extra), _code(odd, lowest, extra)
        halves = encoded.to(tl.pointer_type(tl.uint16))
        tl.store(halves + at, sign_mantissa.to(tl.uint16), mask=inside)
        codes = even_code | odd_code << 4
        tl.store(encoded + 2 * PAIRS + at, codes.to(tl.uint8), mask=inside)
        if start > 0:
            starts = (tail + STARTS).to(tl.pointer_type(tl.uint16))
            tl.store(starts + start // BLOCK - 1, found)
        even_out, odd_out = (even_code == 0) & inside, (odd_code == 0) & inside
        count = even_out.to(tl.int32) + odd_out.to(tl.int32)
        rank = found + tl.cumsum(count, 0) - count
        tl.store(pool + rank, even.to(tl.uint8), mask=even_out & (rank < MOST))
        rank += even_out.to(tl.int32)
        tl.store(pool + rank, odd.to(tl.uint8), mask=odd_out & (rank < MOST))
        found += tl.sum(count)

    entry = tl.arange(0, POOL)
    tl.store(pool + entry, tl.zeros([POOL], tl.uint8), mask=(entry >= found) & (entry < MOST))
    tl.store(fits + number, (found <= MOST).to(tl.uint8))


@triton.jit
def _code(exponent, lowest, extra):
    code = exponent - lowest + 1
    code = tl.where((code >= 1) & (code <= 14), code, 0)
    return tl.where(exponent == extra, 15, code)


@triton.jit(do_not_specialize_on_alignment=["items", "table", "offsets"])
def decode_kernel(
    encoded,  # uint8 [layers, p, PLANES * GROUPS * PIECES, 6 * TOKENS * WIDTH + TAIL]
    first,  # int32 [all items, PIECES * TOKENS * GROUPS * WIDTH]
    second,
    table,  # int64 [layers, 2], or None
    offsets,
    items,  # int64 [p * SLOTS], or None
    ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    STARTS: tl.constexpr,
    MOST: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PAIRS: tl.constexpr = TOKENS * WIDTH
    BLOCKS: tl.constexpr = (PAIRS + BLOCK - 1) // BLOCK
    UNITS: tl.constexpr = PLANES * GROUPS * PIECES
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    layer = tl.program_id(1).to(tl.int64)
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = _unit_values(
        first,
        second,
        table,
        layer,
        items,
        item,
        unit,
        ALIGNED,
        SLOTS,
        PLANES,
        GROUPS,
        PIECES,
        TOKENS,
        WIDTH,
    )
    encoded += (layer * (tl.num_programs(0) // BLOCKS) + number) * (3 * PAIRS + TAIL)
    tail = encoded + 3 * PAIRS
    lowest, extra = tl.load(tail).to(tl.int32), tl.load(tail + 1).to(tl.int32)
    starts = (tail + STARTS).to(tl.pointer_type(tl.uint16))
    before = tl.load(starts + block - 1, mask=block > 0, other=0).to(tl.int32)

    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < PAIRS
    halves = encoded.to(tl.pointer_type(tl.uint16))
    half = tl.load(halves + at, mask=inside, other=0).to(tl.int32)
    codes = tl.load(encoded + 2 * PAIRS + at, mask=inside, other=0).to(tl.int32)
    even, odd = codes & 0xF, codes >> 4
    count = (even == 0).to(tl.int32) + (odd == 0).to(tl.int32)
    rank = before + tl.cumsum(count, 0) - count
    pool = tail + (TAIL - MOST)
    even_bits = _exponent(even, rank, lowest, extra, pool, inside, MOST) << 7
    rank += (even == 0).to(tl.int32)
    odd_bits = _exponent(odd, rank, lowest, extra, pool, inside, MOST) << 23
    pair = even_bits | half & 0x7F | (half & 0x80) << 8
    pair |= odd_bits | (half & 0x7F00) << 8 | (half & 0x8000) << 16
    tl.store(values + in_plane(at, GROUPS, WIDTH), pair, mask=inside)


@triton.jit
def _exponent(code, rank, lowest, extra, pool, inside, MOST: tl.constexpr):
    listed = inside & (code == 0) & (rank < MOST)
    exception = tl.load(pool + rank, mask=listed, other=0).to(tl.int32)
    exponent = tl.where(code == 15, extra, lowest + code - 1) & 0xFF
    return tl.where(code == 0, exception, exponent)
