"""The kernels of ``exp4`` and ``exp3``. Words of planes are pairs of values (int32)."""

import triton
import triton.language as tl

from ..exp3.kernel import decode_block, encode_block, lowest_exponents
from ..units import ADDRESSES, WORK, in_plane, unit_bytes_at, unit_values


# By exp4 one word of two values becomes 16 bits of sign and mantissa and 8 bits of codes: nothing
# moves between threads but the ranks of exceptions.
@triton.jit(do_not_specialize=WORK, do_not_specialize_on_alignment=ADDRESSES)
def encode_kernel(
    first,  # words [all items, words of an item]
    second,
    table,  # int64 [layers, 2], or None
    offsets,  # int64 [layers], or None
    items,  # int64 [p * AT.slots], or None
    memory,  # uint8 [all pages, page_bytes]
    pages,  # int64 [p]; None: memory is [layers, p, units of all planes, CODE.size]
    fits,  # uint8 [layers, p, units of all planes]
    page_bytes,
    offset,
    of_layer,  # units of all items in a layer
    parts,  # of all layers
    AT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Encode units one after the other, and note in ``fits`` which of them the code can hold."""
    part = tl.program_id(0)
    while part < parts:
        _encode_unit(
            *(first, second, table, offsets, items, memory, pages, fits + part, page_bytes, offset),
            *(of_layer, (part // of_layer).to(tl.int64), part % of_layer, AT, CODE),
        )
        part += tl.num_programs(0)


@triton.jit
def _encode_unit(
    first,
    second,
    table,
    offsets,
    items,
    memory,
    pages,
    fit,
    page_bytes,
    offset,
    of_layer,
    layer,
    number,
    AT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Encode unit ``number`` of a layer, block by block; ``fit`` gets 1 if its exceptions have
    room, or 0. The parts of an encoded unit are in the references of exp4 and exp3 (which has
    ``CODE.channels``). ``found`` and ``whole``: bytes so far at the two ends of the pool."""
    PAIRS: tl.constexpr = AT.tokens * AT.width
    UNITS: tl.constexpr = AT.planes * AT.groups * AT.pieces
    BLOCK: tl.constexpr = CODE.pairs
    MOST: tl.constexpr = CODE.most
    POOL: tl.constexpr = CODE.pool
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    held = of_layer // UNITS
    encoded = unit_bytes_at(memory, pages, item, held, page_bytes, offsets, layer, offset)
    encoded += unit * CODE.size
    tail = encoded + (CODE.size - CODE.tail)
    if CODE.channels:
        lowest, channel = lowest_exponents(values, AT, CODE), tl.arange(0, 2 * CODE.channels)
        tl.store(tail + channel, lowest.to(tl.uint8), mask=channel < 2 * AT.width)
    else:
        lowest, extra = _window(values, AT, CODE)
        tl.store(tail, lowest.to(tl.uint8))
        tl.store(tail + 1, extra.to(tl.uint8))
    pool = tail + (CODE.tail - MOST)
    found, whole = 0, 0
    for start in range(0, PAIRS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < PAIRS
        pair = tl.load(values + in_plane(at, AT), mask=inside, other=0)
        even, odd = pair >> 7 & 0xFF, pair >> 23 & 0xFF
        if not CODE.channels:
            even_code, odd_code = _code(even, lowest, extra), _code(odd, lowest, extra)
        sign_mantissa = pair & 0x7F | pair >> 8 & 0x80 | pair >> 8 & 0x7F00 | pair >> 16 & 0x8000
        halves = encoded.to(tl.pointer_type(tl.uint16))
        tl.store(halves + at, sign_mantissa.to(tl.uint16), mask=inside)
        starts = (tail + CODE.starts).to(tl.pointer_type(tl.uint16)) + start // BLOCK - 1
        if CODE.channels:
            if start > 0:
                tl.store(starts, found)
                tl.store(starts + CODE.blocks - 1, whole)
            found, whole = encode_block(even, odd, start, lowest, encoded, found, whole, AT, CODE)
        else:
            codes = even_code | odd_code << 4
            tl.store(encoded + 2 * PAIRS + at, codes.to(tl.uint8), mask=inside)
            if start > 0:
                tl.store(starts, found)
            even_out, odd_out = (even_code == 0) & inside, (odd_code == 0) & inside
            count = even_out.to(tl.int32) + odd_out.to(tl.int32)
            rank = found + tl.cumsum(count, 0) - count
            tl.store(pool + rank, even.to(tl.uint8), mask=even_out & (rank < MOST))
            rank += even_out.to(tl.int32)
            tl.store(pool + rank, odd.to(tl.uint8), mask=odd_out & (rank < MOST))
            found += tl.sum(count)
    entry = tl.arange(0, POOL)
    unused = (entry >= found) & (entry < MOST - whole)
    tl.store(pool + entry, tl.zeros([POOL], tl.uint8), mask=unused)
    tl.store(fit, (found + whole <= MOST).to(tl.uint8))


@triton.jit
def _window(values, AT: tl.constexpr, CODE: tl.constexpr):
    """The lowest of the 14 exponents in a row that most of the counted values of a unit have, and
    the extra one: the most frequent exponent of the others."""
    PAIRS: tl.constexpr = AT.tokens * AT.width
    histogram = tl.zeros([256], tl.int32)
    for start in range(0, PAIRS, CODE.counted * CODE.pairs):
        at = start + tl.arange(0, CODE.pairs)
        pair = tl.load(values + in_plane(at, AT), mask=at < PAIRS, other=0)
        histogram += tl.histogram(pair >> 7 & 0xFF, 256, mask=at < PAIRS)
        histogram += tl.histogram(pair >> 23 & 0xFF, 256, mask=at < PAIRS)
    exponent = tl.arange(0, 256)
    up_to = tl.cumsum(histogram, 0)
    window = tl.gather(up_to, tl.minimum(exponent + 13, 255), 0) - up_to + histogram
    lowest = tl.argmax(tl.where(exponent <= 242, window, -1), 0, tie_break_left=True)
    outside = (exponent < lowest) | (exponent >= lowest + 14)
    return lowest, tl.argmax(tl.where(outside, histogram, -1), 0, tie_break_left=True)


@triton.jit
def _code(exponent, lowest, extra):
    code = exponent - lowest + 1
    code = tl.where((code >= 1) & (code <= 14), code, 0)
    return tl.where(exponent == extra, 15, code)


@triton.jit(do_not_specialize_on_alignment=["items", "table", "offsets"])
def decode_kernel(
    encoded,  # uint8 [layers, p, units of all planes, CODE.size]
    first,  # words [all items, words of an item]
    second,
    table,  # int64 [layers, 2], or None
    offsets,
    items,  # int64 [p * AT.slots], or None
    AT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Decode one block of one unit: sign and mantissa, and exponents by their codes."""
    PAIRS: tl.constexpr = AT.tokens * AT.width
    BLOCK: tl.constexpr = CODE.pairs
    UNITS: tl.constexpr = AT.planes * AT.groups * AT.pieces
    number, block = tl.program_id(0) // CODE.blocks, tl.program_id(0) % CODE.blocks
    layer = tl.program_id(1).to(tl.int64)
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    encoded += (layer * (tl.num_programs(0) // CODE.blocks) + number) * CODE.size
    tail = encoded + (CODE.size - CODE.tail)
    starts = (tail + CODE.starts).to(tl.pointer_type(tl.uint16))
    before = tl.load(starts + block - 1, mask=block > 0, other=0).to(tl.int32)

    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < PAIRS
    halves = encoded.to(tl.pointer_type(tl.uint16))
    half = tl.load(halves + at, mask=inside, other=0).to(tl.int32)
    if CODE.channels:
        starts += CODE.blocks - 2 + block
        whole = tl.load(starts, mask=block > 0, other=0).to(tl.int32)
        even, odd = decode_block(encoded, block, before, whole, AT, CODE)
    else:
        lowest, extra = tl.load(tail).to(tl.int32), tl.load(tail + 1).to(tl.int32)
        codes = tl.load(encoded + 2 * PAIRS + at, mask=inside, other=0).to(tl.int32)
        even_code, odd_code = codes & 0xF, codes >> 4
        count = (even_code == 0).to(tl.int32) + (odd_code == 0).to(tl.int32)
        rank = before + tl.cumsum(count, 0) - count
        pool = tail + (CODE.tail - CODE.most)
        even = _exponent(even_code, rank, lowest, extra, pool, inside, CODE.most)
        rank += (even_code == 0).to(tl.int32)
        odd = _exponent(odd_code, rank, lowest, extra, pool, inside, CODE.most)
    pair = even << 7 | half & 0x7F | (half & 0x80) << 8
    pair |= odd << 23 | (half & 0x7F00) << 8 | (half & 0x8000) << 16
    tl.store(values + in_plane(at, AT), pair, mask=inside)


@triton.jit
def _exponent(code, rank, lowest, extra, pool, inside, MOST: tl.constexpr):
    """Exponents by code: 1 to 14 from ``lowest`` on, 15 ``extra``, 0 entry ``rank`` of the pool."""
    listed = inside & (code == 0) & (rank < MOST)
    exception = tl.load(pool + rank, mask=listed, other=0).to(tl.int32)
    exponent = tl.where(code == 15, extra, lowest + code - 1) & 0xFF
    return tl.where(code == 0, exception, exponent)
