"""The kernels of ``exp3``. Words of planes are pairs of values (int32); a thread has a column."""

from __future__ import annotations

import triton
import triton.language as tl

from ..units import in_plane, unit_bytes_at, unit_values


# Nothing moves between threads but lowest exponents and ranks in the pool.
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
    COLUMNS: tl.constexpr = AT.tokens * AT.width // 8
    UNITS: tl.constexpr = AT.planes * AT.groups * AT.pieces
    POOL: tl.constexpr = CODE.pool
    ENTRIES: tl.constexpr = CODE.entries
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    item, unit = (number // UNITS).to(tl.int64), number % UNITS
    values = unit_values(first, second, table, layer, items, item, unit, AT)
    fits += layer * tl.num_programs(0)
    encoded = unit_bytes_at(memory, pages, item, page_bytes, offsets, layer, offset)
    encoded += unit * CODE.size
    halves = encoded.to(tl.pointer_type(tl.uint16))
    pool, end = encoded + (CODE.size - POOL), encoded + (CODE.size - 1)

    lane = tl.arange(0, CODE.lanes)
    lowest = _lowest(values, lane, 7, AT, CODE) | _lowest(values, lane, 23, AT, CODE) << 8
    tl.store(halves + 11 * COLUMNS + lane, lowest.to(tl.uint16), mask=lane < AT.width)
    found, found_whole = 0, 0
    for start in range(0, COLUMNS, CODE.columns):
        at = start + tl.arange(0, CODE.columns)
        inside = at < COLUMNS
        base = tl.gather(lowest, at % AT.width, 0)
        even_base, odd_base = base & 0xFF, base >> 8
        low, high, last, out = at * 0, at * 0, at * 0, at * 0
        shorts, even_whole, odd_whole = (
            at.to(tl.int64) * 0,
            at.to(tl.int64) * 0,
            at.to(tl.int64) * 0,
        )
        for run in tl.static_range(8):
            word = tl.load(values + in_plane(run * COLUMNS + at, AT), mask=inside, other=0)
            half = word & 0x7F | word >> 8 & 0x80 | word >> 8 & 0x7F00 | word >> 16 & 0x8000
            tl.store(halves + run * COLUMNS + at, half.to(tl.uint16), mask=inside)
            even, odd = word >> 7 & 0xFF, word >> 23 & 0xFF
            even_code, odd_code = _code(even, even_base), _code(odd, odd_base)
            two = (even_code & 3 | (odd_code & 3) << 8) << (run & 6)
            if run & 1:
                high |= two
            else:
                low |= two
            last |= (even_code >> 2 | odd_code >> 2 << 8) << run
            out |= ((even_code == 0).to(tl.int32) | (odd_code == 0).to(tl.int32) << 8) << run
            shorts |= _short(even, even_base).to(tl.int64) << (4 * run)
            shorts |= _short(odd, odd_base).to(tl.int64) << (4 * run + 32)
            even_whole |= even.to(tl.int64) << (8 * run)
            odd_whole |= odd.to(tl.int64) << (8 * run)
        codes = halves + 8 * COLUMNS + at
        tl.store(codes, low.to(tl.uint16), mask=inside)
        tl.store(codes + COLUMNS, high.to(tl.uint16), mask=inside)
        tl.store(codes + 2 * COLUMNS, last.to(tl.uint16), mask=inside)

        if start > 0:
            starts = pool.to(tl.pointer_type(tl.uint16)) - 2 * (CODE.blocks - start // CODE.columns)
            tl.store(starts, found)
            tl.store(starts + 1, found_whole)
        out = tl.where(inside, out, 0)
        packed, rank, whole = at.to(tl.int64) * 0, at * 0, at * 0
        for bit in tl.static_range(16):
            short, is_out = shorts >> (4 * bit) & 0xF, out >> bit & 1
            packed |= short * is_out << 4 * rank
            whole |= (short == 15).to(tl.int32) * is_out << bit
            rank += is_out
        size, count = (rank + 1) // 2, _ones(whole)
        place = found + tl.cumsum(size, 0) - size
        for number_of_byte in tl.static_range(8):
            there = (number_of_byte < size) & (place + number_of_byte < POOL)
            byte = (packed >> (8 * number_of_byte)).to(tl.uint8)
            tl.store(pool + place + number_of_byte, byte, mask=there)
        place = found_whole + tl.cumsum(count, 0) - count
        for bit in tl.static_range(16):
            exponents = even_whole if bit < 8 else odd_whole
            exponent, is_whole = (exponents >> (8 * (bit % 8))).to(tl.uint8), whole >> bit & 1
            tl.store(end - place, exponent, mask=(is_whole == 1) & (place < POOL))
            place += is_whole
        found += tl.sum(size)
        found_whole += tl.sum(count)

    entry = tl.arange(0, ENTRIES)
    unused = (entry >= found) & (entry < POOL - found_whole)
    tl.store(pool + entry, tl.zeros([ENTRIES], tl.uint8), mask=unused)
    tl.store(fits + number, (found + found_whole <= POOL).to(tl.uint8))


@triton.jit
def _lowest(values, lane, SHIFT: tl.constexpr, AT: tl.constexpr, CODE: tl.constexpr):
    """Those of one channel of each lane, whose exponents have this shift."""
    inside, top, second = lane < AT.width, lane * 0, lane * 0
    for run in range(8):
        most = lane * 0
        for token in range(run * (AT.tokens // 8), (run + 1) * (AT.tokens // 8)):
            word = tl.load(values + in_plane(token * AT.width + lane, AT), mask=inside, other=0)
            most = tl.maximum(most, word >> SHIFT & 0xFF)
        second = tl.maximum(second, tl.minimum(top, most))
        top = tl.maximum(top, most)
    top = tl.where(top - second < 2, top, second)
    more = lane * 0  # values that a lower window does not hold, less those that it holds alone
    for token in range(0, AT.tokens, CODE.counted):
        word = tl.load(values + in_plane(token * AT.width + lane, AT), mask=inside, other=0)
        below = top - (word >> SHIFT & 0xFF)
        more += ((below - 1 & 0xFF) >= 7).to(tl.int32) - ((below & 0xFF) >= 7).to(tl.int32)
    return tl.maximum(top - (more < 0).to(tl.int32), 6) - 6


@triton.jit
def _code(exponent, lowest):
    code = exponent - lowest + 1
    return tl.where((code >= 1) & (code <= 7), code, 0)


@triton.jit
def _short(exponent, lowest):
    above = exponent - lowest + 12 & 0xFF
    short = tl.where(above < 12, above, above - 7)
    return tl.where((above < 12) | (above >= 19) & (above < 22), short, 15)


@triton.jit
def _ones(bits):
    """How many of 16 bits are set."""
    bits -= bits >> 1 & 0x5555
    bits = (bits & 0x3333) + (bits >> 2 & 0x3333)
    bits = bits + (bits >> 4) & 0x0F0F
    return bits + (bits >> 8) & 0x1F


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
    COLUMNS: tl.constexpr = AT.tokens * AT.width // 8
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

    at = block * CODE.columns + tl.arange(0, CODE.columns)
    inside = at < COLUMNS
    codes = halves + 8 * COLUMNS + at
    low = tl.load(codes, mask=inside, other=0).to(tl.int32)
    high = tl.load(codes + COLUMNS, mask=inside, other=0).to(tl.int32)
    last = tl.load(codes + 2 * COLUMNS, mask=inside, other=0xFFFF).to(tl.int32)
    base = tl.load(halves + 11 * COLUMNS + at % AT.width).to(tl.int32)
    even_base, odd_base = base & 0xFF, base >> 8

    out = ((low | low >> 1) & 0x5555 | (high | high << 1) & 0xAAAA | last) ^ 0xFFFF
    size = (_ones(out) + 1) // 2
    place = before + tl.cumsum(size, 0) - size
    packed = at.to(tl.int64) * 0
    for number_of_byte in tl.static_range(8):
        there = (number_of_byte < size) & (place + number_of_byte < POOL)
        byte = tl.load(pool + place + number_of_byte, mask=there, other=0)
        packed |= byte.to(tl.int64) << (8 * number_of_byte)
    shorts, whole, rank = at.to(tl.int64) * 0, at * 0, at * 0
    for bit in tl.static_range(16):
        short, is_out = packed >> 4 * rank & 0xF, out >> bit & 1
        whole |= (short == 15).to(tl.int32) * is_out << bit
        shorts |= short << (4 * bit)
        rank += is_out
    count = _ones(whole)
    even_place = before_whole + tl.cumsum(count, 0) - count
    odd_place = even_place + _ones(whole & 0xFF)
    for run in tl.static_range(8):
        two = (high if run & 1 else low) >> (run & 6)
        even_code = two & 3 | (last >> run & 1) << 2
        odd_code = two >> 8 & 3 | (last >> (run + 8) & 1) << 2
        short = (shorts >> (4 * run)).to(tl.int32)
        even = _exponent(even_code, even_base, short & 0xF, end - even_place, even_place < POOL)
        short = (shorts >> (4 * run + 32)).to(tl.int32)
        odd = _exponent(odd_code, odd_base, short & 0xF, end - odd_place, odd_place < POOL)
        even_place += whole >> run & 1
        odd_place += whole >> (run + 8) & 1
        half = tl.load(halves + run * COLUMNS + at, mask=inside, other=0).to(tl.int32)
        word = even << 7 | odd << 23 | half & 0x7F | (half & 0x80) << 8
        word |= (half & 0x7F00) << 8 | (half & 0x8000) << 16
        tl.store(values + in_plane(run * COLUMNS + at, AT), word, mask=inside)


@triton.jit
def _exponent(code, lowest, short, place, inside):
    """The exponent of a code, the 4 bits and the place of the whole one if it is an exception."""
    is_whole = (code == 0) & (short == 15)
    whole = tl.load(place, mask=is_whole & inside, other=0).to(tl.int32)
    exception = tl.where(is_whole, whole, lowest + short - tl.where(short < 12, 12, 5))
    return tl.where(code == 0, exception, lowest + code - 1) & 0xFF
