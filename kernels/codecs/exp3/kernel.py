"""The parts of the kernels of ``exp4`` that ``exp3`` does in another way."""

import triton
import triton.language as tl

from ..units import in_plane


@triton.jit
def lowest_exponents(values, AT: tl.constexpr, CODE: tl.constexpr):
    """The lowest exponent of each channel's window, int32 ``[2 * CODE.channels]``: six below the
    largest (of all but one of eight runs of tokens, if that is smaller by two), or seven below."""
    channels = tl.arange(0, CODE.channels)
    top = tl.arange(0, 2 * CODE.channels) * 0
    second, more = top, top
    for run in range(8):
        most = top * 0
        for token in range(run * (AT.tokens // 8), (run + 1) * (AT.tokens // 8)):
            most = tl.maximum(most, _exponents(values, token, channels, AT))
        second = tl.maximum(second, tl.minimum(top, most))
        top = tl.maximum(top, most)
    top = tl.where(top - second < 2, top, second)
    for token in range(0, AT.tokens, CODE.counted):
        exponents = _exponents(values, token, channels, AT)
        more += (exponents == top - 7).to(tl.int32) - (exponents == top).to(tl.int32)
    return tl.maximum(top - (more > 0).to(tl.int32), 6) - 6


@triton.jit
def _exponents(values, token, channels, AT: tl.constexpr):
    at = in_plane(token * AT.width + channels, AT)
    pairs = tl.load(values + at, mask=channels < AT.width, other=0)
    return tl.interleave(pairs >> 7 & 0xFF, pairs >> 23 & 0xFF)


# Words move between threads: the bits of eight values make a byte of each plane, an exception needs
# its rank, and the first one of a byte the 4 bits of the next one.
@triton.jit
def encode_block(
    even, odd, start, lowest, encoded, found, whole, AT: tl.constexpr, CODE: tl.constexpr
):
    """Encode the exponents (``even``, ``odd``) of a block of pairs, the first of number ``start``.
    Returns bytes and whole exponents in the pool after it; ``found`` and ``whole`` are before."""
    PLANE: tl.constexpr = AT.tokens * AT.width // 4
    VALUES: tl.constexpr = 2 * CODE.pairs
    lane, eights = tl.arange(0, VALUES), start // 4 + tl.arange(0, VALUES // 8)
    exponent = tl.interleave(even, odd)
    base = tl.gather(lowest, (2 * start + lane) % (2 * AT.width), 0)
    code = exponent - base + 1
    code = tl.where((code >= 1) & (code <= 7), code, 0)
    bits = code & 1 | (code & 2) << 7 | (code & 4) << 14
    bits = tl.sum(tl.reshape(bits << lane % 8, [VALUES // 8, 8]), 1)
    for plane in tl.static_range(3):
        to = encoded + (8 + plane) * PLANE + eights
        tl.store(to, (bits >> 8 * plane).to(tl.uint8), mask=eights < PLANE)

    above = exponent - base + 12 & 0xFF
    short = tl.where(above < 12, above, above - 7)
    short = tl.where((above < 12) | (above >= 19) & (above < 22), short, 15)
    # Of an exception its exponent and 4 bits, otherwise -1: in one register.
    out = tl.where((code == 0) & (start + lane // 2 < 4 * PLANE), exponent << 4 | short, -1)
    is_out, is_whole = out >= 0, (out >= 0) & (out & 0xF == 15)
    both = is_out.to(tl.int32) | is_whole.to(tl.int32) << 16
    before, total = tl.cumsum(both, 0) - both, tl.sum(both)
    pool, rank = encoded + (CODE.size - CODE.most), whole + (before >> 16)
    there = is_whole & (rank < CODE.most)
    tl.store(pool + CODE.most - 1 - rank, (out >> 4).to(tl.uint8), mask=there)
    later = tl.where(is_out, lane << 4 | out & 0xF, VALUES << 4)
    later = tl.associative_scan(later, 0, _least, reverse=True)
    later = tl.gather(later, tl.minimum(lane + 1, VALUES - 1), 0) & 0xF
    later = tl.where(lane == VALUES - 1, 0, later)
    rank = before & 0xFFFF
    there = is_out & (rank % 2 == 0) & (found + rank // 2 < CODE.most)
    tl.store(pool + found + rank // 2, (out & 0xF | later << 4).to(tl.uint8), mask=there)
    return found + ((total & 0xFFFF) + 1) // 2, whole + (total >> 16)


@triton.jit
def _least(one, other):
    return tl.minimum(one, other)


@triton.jit
def decode_block(encoded, block, before, whole_before, AT: tl.constexpr, CODE: tl.constexpr):
    """Exponents of the pairs of a block. ``before`` and ``whole_before``: bytes and whole exponents
    that earlier blocks of the unit have in the pool."""
    PLANE: tl.constexpr = AT.tokens * AT.width // 4
    VALUES: tl.constexpr = 2 * CODE.pairs
    at = block * VALUES + tl.arange(0, VALUES)
    base = tl.load(encoded + 11 * PLANE + at % (2 * AT.width)).to(tl.int32)
    code = at * 0
    for plane in tl.static_range(3):
        byte = tl.load(encoded + (8 + plane) * PLANE + at // 8, mask=at < 8 * PLANE, other=0xFF)
        code |= (byte.to(tl.int32) >> at % 8 & 1) << plane
    is_out = (code == 0).to(tl.int32)
    rank = tl.cumsum(is_out, 0) - is_out
    pool, place = encoded + (CODE.size - CODE.most), before + rank // 2
    byte = tl.load(pool + place, mask=(is_out == 1) & (place < CODE.most), other=0)
    short = byte.to(tl.int32) >> 4 * (rank % 2) & 0xF
    is_whole = is_out * (short == 15).to(tl.int32)
    rank = whole_before + tl.cumsum(is_whole, 0) - is_whole
    there = (is_whole == 1) & (rank < CODE.most)
    exception = tl.load(pool + CODE.most - 1 - rank, mask=there, other=0).to(tl.int32)
    near = base + short - tl.where(short < 12, 12, 5)
    exception = tl.where(is_whole == 1, exception, near)
    exponent = tl.where(code == 0, exception, base + code - 1) & 0xFF
    return tl.split(tl.reshape(exponent, [VALUES // 2, 2]))
