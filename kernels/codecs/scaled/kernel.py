"""The kernels of ``int8`` and ``fp8``. Words of planes are values."""

import triton
import triton.language as tl

from ..units import ADDRESSES, WORK, in_plane, unit_bytes_at, unit_values
from .reference import GREATEST, SMALLEST

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
    CODE: tl.constexpr,
    FIRST: tl.constexpr,  # Lines of the first plane
    SECOND: tl.constexpr,  # of the second one, or None
):
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
            fit = _encode_lines(values, target + unit * FIRST.size, block, AT, CODE, FIRST)
            tl.store(fits + number, fit.to(tl.uint8))
        elif SECOND is not None:
            part -= OF_FIRST
            unit, block = part // SECOND.blocks, part % SECOND.blocks
            values = unit_values(first, second, table, layer, items, item, UNITS + unit, AT)
            target += UNITS * FIRST.size + unit * SECOND.size
            fit = _encode_lines(values, target, block, AT, CODE, SECOND)
            tl.store(fits + number, fit.to(tl.uint8))
        number += tl.num_programs(0)


@triton.jit
def _encode_lines(
    values, encoded, block, AT: tl.constexpr, CODE: tl.constexpr, LINES: tl.constexpr
):
    """Encode a block of lines of a unit; whether they fit, 0 or 1."""
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
    inverse = tl.where(usable, tl.div_rn(CODE.largest, tl.where(usable, most, 1.0)), 0.0)
    for start in range(0, LINES.length, LINES.span):
        at, inside = _in_unit(line, start, LINES)
        value = tl.load(values + in_plane(at, AT), mask=inside, other=0.0).to(tl.float32)
        scaled = tl.where(usable[:, None], value, 0.0) * inverse[:, None]
        code = _nearest_code(scaled, CODE.largest, CODE.fp8)
        tl.store(encoded + at, code.to(tl.uint8), mask=inside)
    scales = (encoded + LINES.scales).to(tl.pointer_type(values.dtype.element_ty))
    tl.store(scales + line, most.to(values.dtype.element_ty), mask=line < LINES.number)
    gap = AT.tokens * AT.width + tl.arange(0, 16)
    tl.store(encoded + gap, tl.zeros([16], tl.uint8), mask=(gap < LINES.scales) & (block == 0))
    return tl.min((usable | (bits == 0)).to(tl.int32), 0)


@triton.jit
def _in_unit(line, start, LINES: tl.constexpr):
    """Which values of a unit are in lines, from a value of each on, ``[lines, span]``; and which of
    them exist."""
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
    CODE: tl.constexpr,
    FIRST: tl.constexpr,  # Lines of the first plane
    SECOND: tl.constexpr,  # of the second one, or None
):
    UNITS: tl.constexpr = AT.groups * AT.pieces
    BLOCKS: tl.constexpr = (AT.tokens * AT.width + CODE.block - 1) // CODE.block
    OF_SECOND: tl.constexpr = 0 if SECOND is None else SECOND.size
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    layer = tl.program_id(1).to(tl.int64)
    item, unit = (number // (AT.planes * UNITS)).to(tl.int64), number % (AT.planes * UNITS)
    count = tl.num_programs(0) // (BLOCKS * AT.planes * UNITS)
    encoded += (layer * count + item) * (UNITS * (FIRST.size + OF_SECOND))
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    if unit < UNITS:
        _decode_lines(encoded + unit * FIRST.size, values, block, AT, CODE, FIRST)
    elif SECOND is not None:
        encoded += UNITS * FIRST.size + (unit - UNITS) * SECOND.size
        _decode_lines(encoded, values, block, AT, CODE, SECOND)


@triton.jit
def _decode_lines(
    encoded, values, block, AT: tl.constexpr, CODE: tl.constexpr, LINES: tl.constexpr
):
    at = block * CODE.block + tl.arange(0, CODE.block)
    inside = at < AT.tokens * AT.width
    dtype = values.dtype.element_ty
    scales = (encoded + LINES.scales).to(tl.pointer_type(dtype))
    most = tl.load(scales + at // LINES.step % LINES.number, mask=inside, other=0.0)
    code = tl.load(encoded + at, mask=inside, other=0).to(tl.int32)
    value = _value_of_code(code, CODE.fp8) * most.to(tl.float32) * CODE.inverse
    tl.store(values + in_plane(at, AT), value.to(dtype), mask=inside)


@triton.jit
def _nearest_code(scaled, LARGEST: tl.constexpr, FP8: tl.constexpr):
    """See :func:`.reference.nearest_codes`: int32, of which the last 8 bits are the code."""
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)  # so not fused with what rounds it
    return _to_fp8(scaled) if FP8 else _to_int8(scaled)


# Both work on the bits of float32: rounding to nearest even has no portable name, and a GPU's own
# conversion to fp8 begins with sm_89.
@triton.jit
def _to_int8(value):
    """Nearest integer of ``value`` (float32, at most 127), ties to even, in the last 8 bits."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 * 2**23


@triton.jit
def _to_fp8(value):
    """Code of e4m3 nearest to ``value`` (float32, at most 448), ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    sign, magnitude = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9: the unit of the last bit of numbers near 2**14.
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(magnitude < (121 << 23), small, normal) | sign


@triton.jit
def _value_of_code(code, FP8: tl.constexpr):
    """The float32 value that a code (int32, 0 to 255) stands for."""
    if FP8:
        # The fields of e4m3 in those of float32; only the exponents' biases differ.
        bits = (code & 0x7F) << 20 | (code & 0x80) << 24
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    else:
        value = (code << 24 >> 24).to(tl.float32)
    return value
