"""The kernels of ``int8``. Words of planes are values."""

import triton
import triton.language as tl

from ..units import ADDRESSES, WORK, in_plane, unit_bytes_at, unit_values
from .reference import GREATEST, LARGEST, SMALLEST

_LARGEST, _INVERSE = tl.constexpr(LARGEST), tl.constexpr(1 / LARGEST)
_SMALLEST_BITS = tl.constexpr((127 - 100) << 23)
_GREATEST_BITS = tl.constexpr((127 + 100) << 23)
assert (SMALLEST, GREATEST) == (2.0**-100, 2.0**100), "the bits of float32 above"


@triton.jit(do_not_specialize=WORK, do_not_specialize_on_alignment=ADDRESSES)
def encode_kernel(
    first,  # floats [all items, values of an item]
    second,
    table,  # int64 [layers, 2], or None
    offsets,  # int64 [layers], or None
    items,  # int64 [p * AT.slots], or None
    memory,  # uint8 [all pages, page_bytes]
    pages,  # int64 [p]; None: memory is [layers, p, page_bytes]
    fits,  # uint8 [layers, p, all blocks of lines of an item]
    page_bytes,
    offset,
    of_layer,  # blocks of lines of all items in a layer
    parts,  # of all layers
    AT: tl.constexpr,
    FIRST: tl.constexpr,  # Lines of the first plane
    SECOND: tl.constexpr,  # of the second one, or None
):
    """Encode blocks of lines of all units, and note in ``fits`` which blocks int8 can hold."""
    UNITS: tl.constexpr = AT.groups * AT.pieces
    OF_FIRST: tl.constexpr = UNITS * FIRST.blocks
    OF_SECOND: tl.constexpr = 0 if SECOND is None else UNITS * SECOND.blocks
    number = tl.program_id(0)
    while number < parts:
        layer = (number // of_layer).to(tl.int64)
        item = (number % of_layer // (OF_FIRST + OF_SECOND)).to(tl.int64)
        part, count = number % (OF_FIRST + OF_SECOND), of_layer // (OF_FIRST + OF_SECOND)
        target = unit_bytes_at(memory, pages, item, count, page_bytes, offsets, layer, offset)
        if part < OF_FIRST:
            unit, block = part // FIRST.blocks, part % FIRST.blocks
            values = unit_values(first, second, table, layer, items, item, unit, AT)
            fit = _encode_lines(values, target + unit * FIRST.size, block, AT, FIRST)
            tl.store(fits + number, fit.to(tl.uint8))
        elif SECOND is not None:
            part -= OF_FIRST
            unit, block = part // SECOND.blocks, part % SECOND.blocks
            values = unit_values(first, second, table, layer, items, item, UNITS + unit, AT)
            target += UNITS * FIRST.size + unit * SECOND.size
            fit = _encode_lines(values, target, block, AT, SECOND)
            tl.store(fits + number, fit.to(tl.uint8))
        number += tl.num_programs(0)


@triton.jit
def _encode_lines(values, encoded, block, AT: tl.constexpr, LINES: tl.constexpr):
    """Encode block number ``block`` of the lines of a unit; returns 1 if all of them fit, or 0."""
    AT_ONCE: tl.constexpr = LINES.at_once
    line = block * AT_ONCE + tl.arange(0, AT_ONCE)
    bits = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, LINES.length, LINES.span):
        at, inside = _in_unit(line, start, LINES)
        value = tl.load(values + in_plane(at, AT), mask=inside, other=0.0).to(tl.float32)
        # Magnitudes are in the order of their bits; infinity and NaN stand above all others.
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = tl.maximum(bits, tl.max(magnitude, 1))
    usable = (bits >= _SMALLEST_BITS) & (bits <= _GREATEST_BITS)
    most = tl.where(usable, bits, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, tl.div_rn(_LARGEST, tl.where(usable, most, 1.0)), 0.0)
    for start in range(0, LINES.length, LINES.span):
        at, inside = _in_unit(line, start, LINES)
        value = tl.load(values + in_plane(at, AT), mask=inside, other=0.0).to(tl.float32)
        scaled = tl.where(usable[:, None], value, 0.0) * inverse[:, None]
        code = _nearest_integer(scaled)
        tl.store(encoded + at, code.to(tl.uint8), mask=inside)
    scales = (encoded + LINES.scales).to(tl.pointer_type(values.dtype.element_ty))
    tl.store(scales + line, most.to(values.dtype.element_ty), mask=line < LINES.number)
    gap = AT.tokens * AT.width + tl.arange(0, 16)
    tl.store(encoded + gap, tl.zeros([16], tl.uint8), mask=(gap < LINES.scales) & (block == 0))
    return tl.min((usable | (bits == 0)).to(tl.int32), 0)


@triton.jit
def _in_unit(line, start, LINES: tl.constexpr):
    """Numbers in the unit of the values of each ``line`` from value ``start`` on, ``[lines,
    span]``; and a mask of those that exist."""
    along = start + tl.arange(0, LINES.span)[None, :]
    at = (line * LINES.step)[:, None] + along * LINES.stride
    return at, (line < LINES.number)[:, None] & (along < LINES.length)


@triton.jit(do_not_specialize_on_alignment=["items", "table", "offsets"])
def decode_kernel(
    encoded,  # uint8 [layers, p, units of all planes]
    first,  # floats [all items, values of an item]
    second,
    table,  # int64 [layers, 2], or None
    offsets,
    items,  # int64 [p * AT.slots], or None
    AT: tl.constexpr,
    BLOCK: tl.constexpr,  # values that a program decodes, a power of two
    FIRST: tl.constexpr,  # Lines of the first plane
    SECOND: tl.constexpr,  # of the second one, or None
):
    """Decode one block of values of one unit of an item."""
    UNITS: tl.constexpr = AT.groups * AT.pieces
    BLOCKS: tl.constexpr = (AT.tokens * AT.width + BLOCK - 1) // BLOCK
    OF_SECOND: tl.constexpr = 0 if SECOND is None else SECOND.size
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    layer = tl.program_id(1).to(tl.int64)
    item, unit = (number // (AT.planes * UNITS)).to(tl.int64), number % (AT.planes * UNITS)
    count = tl.num_programs(0) // (BLOCKS * AT.planes * UNITS)
    encoded += (layer * count + item) * (UNITS * (FIRST.size + OF_SECOND))
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    if unit < UNITS:
        _decode_lines(encoded + unit * FIRST.size, values, block, AT, BLOCK, FIRST)
    elif SECOND is not None:
        encoded += UNITS * FIRST.size + (unit - UNITS) * SECOND.size
        _decode_lines(encoded, values, block, AT, BLOCK, SECOND)


@triton.jit
def _decode_lines(
    encoded, values, block, AT: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr
):
    """Decode block number ``block`` of an encoded unit to its plane: code * magnitude / 127."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < AT.tokens * AT.width
    dtype = values.dtype.element_ty
    scales = (encoded + LINES.scales).to(tl.pointer_type(dtype))
    most = tl.load(scales + at // LINES.step % LINES.number, mask=inside, other=0.0)
    code = tl.load(encoded + at, mask=inside, other=0).to(tl.int8, bitcast=True)
    value = code.to(tl.float32) * most.to(tl.float32) * _INVERSE
    tl.store(values + in_plane(at, AT), value.to(dtype), mask=inside)


@triton.jit
def _nearest_integer(scaled):
    """The nearest integers from -127 to 127, ties to even: int32, of which the last 8 bits count.
    By the bits of float32: rounding to nearest even has no portable name."""
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)  # so not fused with the sum below
    return (scaled + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 * 2**23
