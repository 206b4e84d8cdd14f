"""The kernels of ``exp3``. Words of planes are pairs of values (int32)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exp4.kernel import pair_of, sign_mantissa_of
from ..units import in_plane, unit_bytes_at, unit_values


# Three words move between threads: the bits of four pairs make a byte of each plane, an exception
# needs its rank, and the first one of a byte the 4 bits of the next one.
@triton.jit(do_not_specialize_on_alignment=["items", "pages", "fits", "table", "offsets"])
def encode_kernel(
    first,  # words [all items, words of an item]
    second,
    table,  # int64 [layers, 2], or None
    offsets,  # int64 [layers], or None
    items,  # int64 [p * AT.slots], or None
    memory,  # uint8 [all pages, page_bytes]
    pages,  # int64 [p], or None
    fits,  # uint8 [layers, p, units of all planes]
    page_bytes,
    offset,
    AT: tl.constexpr,
    CODE: tl.constexpr,
):
    PAIRS: tl.constexpr = AT.tokens * AT.width
    UNITS: tl.constexpr = AT.planes * AT.groups * AT.pieces
    BLOCK: tl.constexpr = CODE.pairs
    POOL: tl.constexpr = CODE.pool
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    fits += layer * tl.num_programs(0)
    encoded = unit_bytes_at(memory, pages, item, page_bytes, offsets, layer, offset)
    encoded += unit * CODE.size
    halves = encoded.to(tl.pointer_type(tl.uint16))
    pool, end = encoded + (CODE.size - POOL), encoded + (CODE.size - 1)

    channel = tl.arange(0, CODE.channels)
    lowest = _lowest(values, channel, 7, AT, CODE) | _lowest(values, channel, 23, AT, CODE) << 8
    tl.store(halves + PAIRS * 11 // 8 + channel, lowest.to(tl.uint16), mask=channel < AT.width)
    found, found_whole = 0, 0
    lane, fours = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 4)
    for start in range(0, PAIRS, BLOCK):
        at = start + lane
        inside = at < PAIRS
        pair = tl.load(values + in_plane(at, AT), mask=inside, other=0)
        tl.store(halves + at, sign_mantissa_of(pair).to(tl.uint16), mask=inside)
        base = tl.gather(lowest, at % AT.width, 0)
        even, odd = pair >> 7 & 0xFF, pair >> 23 & 0xFF
        even_code, odd_code = _code(even, base & 0xFF), _code(odd, base >> 8)
        bits = _apart(even_code) | _apart(odd_code) << 1
        bits = tl.sum(tl.reshape(bits << 2 * (lane % 4), [BLOCK // 4, 4]), 1)
        for plane in tl.static_range(3):
            byte = (bits >> 8 * plane).to(tl.uint8)
            to = encoded + (8 + plane) * PAIRS // 4 + start // 4 + fours
            tl.store(to, byte, mask=start // 4 + fours < PAIRS // 4)

        if start > 0:
            starts = pool.to(tl.pointer_type(tl.uint16)) - 2 * (CODE.blocks - start // BLOCK)
            tl.store(starts, found)
            tl.store(starts + 1, found_whole)
        even_out, odd_out = (even_code == 0) & inside, (odd_code == 0) & inside
        even_short, odd_short = _short(even, base & 0xFF), _short(odd, base >> 8)
        even_whole, odd_whole = even_out & (even_short == 15), odd_out & (odd_short == 15)
        both = _ones(even_out, even_whole) + _ones(odd_out, odd_whole)  # low and high 16 bits
        before = tl.cumsum(both, 0) - both
        # The 4 bits of the next exception behind this pair, by the order of pairs.
        short = tl.where(even_out, even_short, odd_short)
        later = tl.where(even_out | odd_out, lane << 4 | short, 1 << 30)
        later = tl.associative_scan(later, 0, _least, reverse=True)
        later = tl.gather(later, tl.minimum(lane + 1, BLOCK - 1), 0) & 0xF
        later = tl.where(lane == BLOCK - 1, 0, later)
        rank, rank_whole = before & 0xFFFF, found_whole + (before >> 16)
        byte = even_short | tl.where(odd_out, odd_short, later) << 4
        there = even_out & (rank % 2 == 0) & (found + rank // 2 < POOL)
        tl.store(pool + found + rank // 2, byte.to(tl.uint8), mask=there)
        tl.store(end - rank_whole, even.to(tl.uint8), mask=even_whole & (rank_whole < POOL))
        rank, rank_whole = rank + even_out, rank_whole + even_whole
        byte = odd_short | later << 4
        there = odd_out & (rank % 2 == 0) & (found + rank // 2 < POOL)
        tl.store(pool + found + rank // 2, byte.to(tl.uint8), mask=there)
        tl.store(end - rank_whole, odd.to(tl.uint8), mask=odd_whole & (rank_whole < POOL))
        total = tl.sum(both)
        found += ((total & 0xFFFF) + 1) // 2
        found_whole += total >> 16

    entry = tl.arange(0, CODE.entries)
    unused = (entry >= found) & (entry < POOL - found_whole)
    tl.store(pool + entry, tl.zeros([CODE.entries], tl.uint8), mask=unused)
    tl.store(fits + number, (found + found_whole <= POOL).to(tl.uint8))


@triton.jit
def _lowest(values, channel, SHIFT: tl.constexpr, AT: tl.constexpr, CODE: tl.constexpr):
    """Those of one channel of each pair, whose exponents have this shift."""
    inside, top, second = channel < AT.width, channel * 0, channel * 0
    for run in range(8):
        most = channel * 0
        for token in range(run * (AT.tokens // 8), (run + 1) * (AT.tokens // 8)):
            word = tl.load(values + in_plane(token * AT.width + channel, AT), mask=inside, other=0)
            most = tl.maximum(most, word >> SHIFT & 0xFF)
        second = tl.maximum(second, tl.minimum(top, most))
        top = tl.maximum(top, most)
    top = tl.where(top - second < 2, top, second)
    more = channel * 0
    for token in range(0, AT.tokens, CODE.counted):
        word = tl.load(values + in_plane(token * AT.width + channel, AT), mask=inside, other=0)
        exponent = word >> SHIFT & 0xFF
        more += (exponent == top - 7).to(tl.int32) - (exponent == top).to(tl.int32)
    return tl.maximum(top - (more > 0).to(tl.int32), 6) - 6


@triton.jit
def _code(exponent, lowest):
    code = exponent - lowest + 1
    return tl.where((code >= 1) & (code <= 7), code, 0)


@triton.jit
def _apart(code):
    """Each of three bits in a byte."""
    return code & 1 | (code & 2) << 7 | (code & 4) << 14


@triton.jit
def _short(exponent, lowest):
    above = exponent - lowest + 12 & 0xFF
    short = tl.where(above < 12, above, above - 7)
    return tl.where((above < 12) | (above >= 19) & (above < 22), short, 15)


@triton.jit
def _ones(out, whole):
    return out.to(tl.int32) | whole.to(tl.int32) << 16


@triton.jit
def _least(one, other):
    return tl.minimum(one, other)


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
    PAIRS: tl.constexpr = AT.tokens * AT.width
    UNITS: tl.constexpr = AT.planes * AT.groups * AT.pieces
    POOL: tl.constexpr = CODE.pool
    number, block = tl.program_id(0) // CODE.blocks, tl.program_id(0) % CODE.blocks
    layer = tl.program_id(1).to(tl.int64)
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    encoded += (layer * (tl.num_programs(0) // CODE.blocks) + number) * CODE.size
    halves = encoded.to(tl.pointer_type(tl.uint16))
    pool, end = encoded + (CODE.size - POOL), encoded + (CODE.size - 1)
    starts = pool.to(tl.pointer_type(tl.uint16)) - 2 * (CODE.blocks - block)
    before = tl.load(starts, mask=block > 0, other=0).to(tl.int32)
    before_whole = tl.load(starts + 1, mask=block > 0, other=0).to(tl.int32)

    at = block * CODE.pairs + tl.arange(0, CODE.pairs)
    inside = at < PAIRS
    half = tl.load(halves + at, mask=inside, other=0).to(tl.int32)
    base = tl.load(halves + PAIRS * 11 // 8 + at % AT.width).to(tl.int32)
    codes = at * 0
    for plane in tl.static_range(3):
        byte = tl.load(encoded + (8 + plane) * PAIRS // 4 + at // 4, mask=inside, other=0xFF)
        two = byte.to(tl.int32) >> 2 * (at % 4)
        codes |= (two & 1 | (two & 2) << 7) << plane
    even_code, odd_code = codes & 0xFF, codes >> 8
    even_out, odd_out = (even_code == 0).to(tl.int32), (odd_code == 0).to(tl.int32)
    rank = tl.cumsum(even_out + odd_out, 0) - even_out - odd_out
    even_short = _short_at(pool + before, rank, even_out, POOL - before)
    odd_short = _short_at(pool + before, rank + even_out, odd_out, POOL - before)
    even_whole, odd_whole = (even_short == 15).to(tl.int32), (odd_short == 15).to(tl.int32)
    rank = before_whole + tl.cumsum(even_whole + odd_whole, 0) - even_whole - odd_whole
    even = _exponent(even_code, base & 0xFF, even_short, end, rank, POOL)
    odd = _exponent(odd_code, base >> 8, odd_short, end, rank + even_whole, POOL)
    tl.store(values + in_plane(at, AT), pair_of(half, even, odd), mask=inside)


@triton.jit
def _short_at(pool, rank, out, most):
    """The 4 bits of an exception, 0 of other values."""
    byte = tl.load(pool + rank // 2, mask=(out == 1) & (rank // 2 < most), other=0)
    return byte.to(tl.int32) >> 4 * (rank % 2) & 0xF


@triton.jit
def _exponent(code, lowest, short, end, rank, POOL: tl.constexpr):
    """The exponent of a code, the 4 bits and the rank of the whole one if it is an exception."""
    whole = tl.load(end - rank, mask=(short == 15) & (rank < POOL), other=0).to(tl.int32)
    exception = tl.where(short == 15, whole, lowest + short - tl.where(short < 12, 12, 5))
    return tl.where(code == 0, exception, lowest + code - 1) & 0xFF
