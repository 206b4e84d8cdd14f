"""The kernels of ``int8`` and ``fp8`` of K and V (:mod:`.scaled_segments`)."""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from ..page_kernels import plane_of
from .exp4 import in_plane, item_place
from .scaled import GREATEST_BITS, SMALLEST_BITS, nearest_code, value_of_code


@triton.jit
def _first_value(
    items,
    item,
    unit,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where the values of a unit begin in its plane."""
    page = item_place(items, item, SLOTS)
    token = (page * PIECES + unit % PIECES) * TOKENS
    return (token * GROUPS + unit // PIECES) * WIDTH


@triton.jit(do_not_specialize_on_alignment=["items", "pages", "fits", "table", "offsets"])
def encode_kernel(
    k,  # floats [all items, PIECES * TOKENS * GROUPS * WIDTH]
    v,
    table,  # int64 [layers, 2], or None
    offsets,  # int64 [layers], or None
    items,  # int64 [p * SLOTS]
    memory,  # uint8 [all pages, page_bytes]
    pages,  # int64 [p]
    fits,  # uint8 [layers, p, all blocks of lines of an item]
    page_bytes,
    offset,
    ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_SPAN: tl.constexpr,
    V_SPAN: tl.constexpr,
    K_AT_ONCE: tl.constexpr,
    V_AT_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
):
    UNITS: tl.constexpr = GROUPS * PIECES
    HEADS: tl.constexpr = TOKENS * (WIDTH // DIM)
    K_BLOCKS: tl.constexpr = (WIDTH + K_AT_ONCE - 1) // K_AT_ONCE
    V_BLOCKS: tl.constexpr = (HEADS + V_AT_ONCE - 1) // V_AT_ONCE
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, v = plane_of(k, table, layer, 0, ALIGNED), plane_of(v, table, layer, 1, ALIGNED)
    fits += layer * tl.num_programs(0)
    if offsets is not None:
        offset = tl.load(offsets + layer)
    item = (number // (UNITS * (K_BLOCKS + V_BLOCKS))).to(tl.int64)
    part = number % (UNITS * (K_BLOCKS + V_BLOCKS))
    target = memory + tl.load(pages + item).to(tl.int64) * page_bytes + offset
    if part < UNITS * K_BLOCKS:
        unit, block = part // K_BLOCKS, part % K_BLOCKS
        first = _first_value(items, item, unit, SLOTS, GROUPS, PIECES, TOKENS, WIDTH)
        channel = block * K_AT_ONCE + tl.arange(0, K_AT_ONCE)
        token = tl.arange(0, K_SPAN)[None, :]
        fit = _encode_lines(
            k + first + channel[:, None] + token * (GROUPS * WIDTH),
            target + unit * K_BYTES,
            channel[:, None] + token * WIDTH,
            (channel < WIDTH)[:, None] & (token < TOKENS),
            channel,
            WIDTH,
            TOKENS * WIDTH,
            K_BYTES,
            block == 0,
            LARGEST,
            FP8,
        )
    else:
        part -= UNITS * K_BLOCKS
        unit, block = part // V_BLOCKS, part % V_BLOCKS
        first = _first_value(items, item, unit, SLOTS, GROUPS, PIECES, TOKENS, WIDTH)
        head = block * V_AT_ONCE + tl.arange(0, V_AT_ONCE)
        value = tl.arange(0, V_SPAN)[None, :]
        at = (head * DIM)[:, None] + value
        fit = _encode_lines(
            v + first + in_plane(at, GROUPS, WIDTH),
            target + UNITS * K_BYTES + unit * V_BYTES,
            at,
            (head < HEADS)[:, None] & (value < DIM),
            head,
            HEADS,
            TOKENS * WIDTH,
            V_BYTES,
            block == 0,
            LARGEST,
            FP8,
        )
    tl.store(fits + number, fit.to(tl.uint8))


@triton.jit
def _encode_lines(
    source,  # pointers [lines, span]
    encoded,  # the unit's first byte
    at,  # which values of the unit, [lines, span]
    inside,
    line,  # which lines of the unit, [lines]
    LINES: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    first,  # whether these are the first ones of the unit
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
):
    """Encode lines of a unit; whether they fit, 0 or 1."""
    loaded = tl.load(source, mask=inside, other=0.0)
    value = loaded.to(tl.float32)
    # Magnitudes are in the order of their bits; infinity and NaN stand above all others.
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    usable = (bits >= SMALLEST_BITS) & (bits <= GREATEST_BITS)
    most = tl.where(usable, bits, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, tl.div_rn(LARGEST, tl.where(usable, most, 1.0)), 0.0)
    scaled = tl.where(usable[:, None], value, 0.0) * inverse[:, None]
    tl.store(encoded + at, nearest_code(scaled, LARGEST, FP8).to(tl.uint8), mask=inside)
    scales = (encoded + (BYTES - 2 * LINES)).to(tl.pointer_type(loaded.dtype))
    tl.store(scales + line, most.to(loaded.dtype), mask=line < LINES)
    gap = VALUES + tl.arange(0, 16)
    tl.store(encoded + gap, tl.zeros([16], tl.uint8), mask=(gap < BYTES - 2 * LINES) & first)
    return tl.min((usable | (bits == 0)).to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=["items", "table", "offsets"])
def decode_kernel(
    encoded,  # uint8 [layers, p, GROUPS * PIECES * (K_BYTES + V_BYTES)]
    k,  # floats [all items, PIECES * TOKENS * GROUPS * WIDTH]
    v,
    table,  # int64 [layers, 2], or None
    offsets,
    items,  # int64 [p * SLOTS]
    ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    INVERSE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    UNITS: tl.constexpr = GROUPS * PIECES
    VALUES: tl.constexpr = TOKENS * WIDTH
    BLOCKS: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    layer = tl.program_id(1).to(tl.int64)
    k, v = plane_of(k, table, layer, 0, ALIGNED), plane_of(v, table, layer, 1, ALIGNED)
    item, unit = (number // (2 * UNITS)).to(tl.int64), number % (2 * UNITS)
    items_of_layer = tl.num_programs(0) // (BLOCKS * 2 * UNITS)
    encoded += (layer * items_of_layer + item) * (UNITS * (K_BYTES + V_BYTES))
    first = _first_value(items, item, unit % UNITS, SLOTS, GROUPS, PIECES, TOKENS, WIDTH)
    at = block * BLOCK + tl.arange(0, BLOCK)
    place, inside = first + in_plane(at, GROUPS, WIDTH), at < VALUES
    dtype = k.dtype.element_ty
    if unit < UNITS:
        encoded += unit * K_BYTES
        scales = (encoded + (K_BYTES - 2 * WIDTH)).to(tl.pointer_type(dtype))
        most = tl.load(scales + at % WIDTH, mask=inside, other=0.0)
        tl.store(k + place, _decoded(encoded + at, inside, most, INVERSE, FP8), mask=inside)
    else:
        encoded += UNITS * K_BYTES + (unit - UNITS) * V_BYTES
        scales = (encoded + (V_BYTES - 2 * (VALUES // DIM))).to(tl.pointer_type(dtype))
        most = tl.load(scales + at // DIM, mask=inside, other=0.0)
        tl.store(v + place, _decoded(encoded + at, inside, most, INVERSE, FP8), mask=inside)


@triton.jit
def _decoded(codes, inside, most, INVERSE: tl.constexpr, FP8: tl.constexpr):
    """Values of codes whose lines have these largest magnitudes, in the type of these."""
    code = tl.load(codes, mask=inside, other=0).to(tl.int32)
    return (value_of_code(code, FP8) * most.to(tl.float32) * INVERSE).to(most.dtype)
