"""The code of ``exp3``, in plain torch: lossless for bfloat16, 0.725 of its bytes.

A *unit* is K or V of some heads (``width`` channels) and tokens of a page. Its tokens divide into
eight equal *runs*. A value has a *position* in its run, the same as one value of every other run: a
position belongs to one channel. A *column* is the 16 values at two positions, of channels ``2 c``
and ``2 c + 1``: those of the first position by run, then those of the second. An encoded unit of
``n`` values is

- ``n`` bytes: sign (bit 7) and mantissa of each value;
- three times ``n / 8`` bytes: a 3-bit code for the exponent of each value, a byte of each part for
  each position. The first part has the low two bits of codes in runs 0, 2, 4 and 6, the second part
  those in runs 1, 3, 5 and 7, the third part the high bit of all eight, from the lowest bits on;
- the tail: the *lowest* exponent of each channel, 8 bits each; the *starts*, 16 bits each; the
  *pool*.

Codes 1 to 7 stand for seven exponents of the channel, from its lowest one on. Code 0 is an
*exception*. Each has 4 bits in the pool, column after column, and whole bytes for each column: 0 to
11 stand for the exponents from ``lowest - 12`` on, 12 to 14 for those behind the seven, and 15 says
that the exponent is the next of those at the end of the pool, 8 bits each, backwards. Each block of
256 columns decodes without those before it: for every block but the first there are two starts, of
its bytes and of its whole exponents.

A unit with more exceptions than its pool has room for does not fit. Any bytes decode to something,
and to the same on every device: exponents are taken modulo 256, and what lies behind the end of the
pool is 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

RUNS = 8
WINDOW = 7
BELOW, ABOVE = 12, 3
"""Exponents on both sides of the window that take 4 bits."""
WHOLE = BELOW + ABOVE
BLOCK_COLUMNS = 256
_COUNTED_TOKENS = 128
_EACH = 0x0101010101010101
"""A number in each byte of a word. A mask cuts off the bits that move to other bytes."""
_PAIR = np.arange(0, RUNS, 2, dtype=np.uint64)[:, None, None]
_RUN = np.arange(RUNS, dtype=np.uint64).reshape(-1, 2, 1)
"""The bit of a run in the first two parts, and in the third."""

SHORT = np.full(256, WHOLE, np.uint8)
"""The 4 bits of an exception, by its exponent from ``lowest - 1`` on, modulo 256."""
SHORT[np.arange(1 - BELOW, 1)] = np.arange(BELOW)
SHORT[np.arange(WINDOW, WINDOW + ABOVE) + 1] = np.arange(BELOW, WHOLE)
_LONG = np.array([*range(1 - BELOW, 1), *range(WINDOW + 1, WINDOW + 1 + ABOVE), 0]).astype(np.uint8)
"""The reverse."""


class UnitForm(NamedTuple):
    """What encoded units of some tokens and channels look like, and how kernels go through them."""

    size: int  # bytes, a multiple of 8
    pool: int  # bytes, at the end
    blocks: int  # parts that decode side by side
    columns: int  # of a block
    counted: int  # every so many tokens are counted for the window, at most 128 in all
    lanes: int  # pairs of channels, up to a power of two
    entries: int  # the pool, up to a power of two


@lru_cache
def form_of(tokens: int, width: int) -> UnitForm:
    """The form of a unit: ``tokens`` are a multiple of 8, ``width`` is even, and their product is a
    multiple of 64."""
    values = tokens * width
    blocks = -(-values // (16 * BLOCK_COLUMNS))
    tail = (width + values * 15 // 256) // 8 * 8
    pool = tail - width - 4 * (blocks - 1)
    counted, lanes = -(-tokens // _COUNTED_TOKENS), 1 << (width // 2 - 1).bit_length()
    entries = 1 << (pool - 1).bit_length()
    return UnitForm(
        *(values * 11 // 8 + tail, pool, blocks, BLOCK_COLUMNS, counted, lanes, entries)
    )


def encode_units(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode bfloat16 ``[units, tokens, width]``.

    Returns:
        uint8 ``[units, size]``, and whether each unit fits, bool ``[units]``. The bytes of a unit
        that does not fit mean nothing.
    """
    count, tokens, width = units.shape
    form, n = form_of(tokens, width), tokens * width
    bits = units.contiguous().view(torch.int16).numpy().view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8)
    lowest = lowest_exponents(exponents, form.counted)
    offsets = exponents - (lowest - 1)[:, None]
    codes = offsets * (offsets - 1 < WINDOW).view(np.uint8)

    result = units.new_zeros((count, form.size), dtype=torch.uint8)
    encoded = result.numpy()
    bits = bits.reshape(count, n)
    sign_mantissa = bits >> 8
    sign_mantissa &= 0x80
    sign_mantissa |= bits & 0x7F
    encoded[:, :n] = sign_mantissa
    encoded[:, n * 11 // 8 : n * 11 // 8 + width] = lowest
    parts, by_run = _parts(encoded, n), codes.reshape(count, RUNS // 2, 2, n // RUNS)
    by_run = by_run.view(np.uint64)
    parts[:, :2] = np.bitwise_or.reduce((by_run & _EACH * 3) << _PAIR, axis=1)
    by_run &= _EACH * 4
    by_run >>= np.uint64(2)
    by_run <<= _RUN
    parts[:, 2] = np.bitwise_or.reduce(by_run, axis=(1, 2))

    found = _Exceptions(encoded, n, form)
    short = SHORT[offsets.reshape(-1)[found.places]]
    whole = np.flatnonzero(short == WHOLE)
    before = np.stack((found.bytes_before, found.begins_of(whole)), axis=-1)
    of_unit = before[:: form.blocks]
    fits = np.diff(of_unit, axis=0).sum(1) <= form.pool
    if not fits.all():  # they have no room
        result[fits] = encode_units(units[torch.from_numpy(fits)])[0]
        return result, torch.from_numpy(fits)
    starts = before[:-1].reshape(count, form.blocks, 2) - of_unit[:-1, None]
    _starts(encoded, form)[:] = starts[:, 1:]
    flat, halves = encoded.reshape(-1), found.halves(starts)
    odd = halves & 1 == 1
    short[:-1] |= (short[1:] << 4) * odd[1:]
    even = np.flatnonzero(~odd)
    flat[halves[even] >> 1] = short[even]
    flat[found.ends(whole) - found.whole_at(whole, starts)] = exponents.reshape(-1)[
        found.places[whole]
    ]
    return result, torch.from_numpy(fits)


def decode_units(encoded: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """Decode uint8 ``[units, size]`` to bfloat16 ``[units, tokens, width]``."""
    form, n, count = form_of(tokens, width), tokens * width, len(encoded)
    bytes_ = encoded.contiguous().numpy()
    parts = _parts(bytes_, n)
    codes = parts[:, None, :2] >> _PAIR
    codes &= _EACH * 3
    high = parts[:, 2, None, None] >> _RUN
    high &= _EACH
    high <<= np.uint64(2)
    codes |= high
    lowest = bytes_[:, n * 11 // 8 : n * 11 // 8 + width]
    exponents = codes.view(np.uint8).reshape(count, tokens, width)
    exponents += (lowest - 1)[:, None]

    found, flat = _Exceptions(bytes_, n, form), bytes_.reshape(-1)
    starts = np.zeros((count, form.blocks, 2), np.int64)
    starts[:, 1:] = _starts(bytes_, form)
    short = found.short_of(bytes_, starts)
    exponents.reshape(-1)[found.places] += _LONG[short]
    whole = np.flatnonzero(short == WHOLE)
    back = found.whole_at(whole, starts)
    there = flat[found.ends(whole) - np.minimum(back, form.pool)] * (back <= form.pool)
    exponents.reshape(-1)[found.places[whole]] = there

    bits = bytes_[:, :n].astype(np.uint16)
    bits *= 0x0101
    bits &= 0x807F
    wide = exponents.reshape(count, n).astype(np.uint16)
    wide <<= 7
    decoded = encoded.new_empty((count, tokens, width), dtype=torch.bfloat16)
    np.bitwise_or(
        bits, wide, out=decoded.view(torch.int16).numpy().view(np.uint16).reshape(count, n)
    )
    return decoded


def lowest_exponents(exponents: Bytes, counted: int) -> Bytes:
    """Lowest exponent of each channel of uint8 ``[units, tokens, width]``.

    The window ends with the largest exponent, or that of all runs but one, if it is smaller by two
    or more: a token may stand out. It ends one lower if it then holds more of the counted values.
    """
    count, tokens, width = exponents.shape
    runs = exponents.reshape(count, RUNS, tokens // RUNS, width).max(2)
    top = runs.max(1)
    highest = runs == top[:, None]
    second = (runs * ~highest).max(1)
    top = np.where((highest.sum(1) > 1) | (top - second < 2), top, second)
    below = top[:, None] - exponents[:, ::counted]  # of higher ones it is large, modulo 256
    outside = (below >= WINDOW).view(np.uint8).sum(1, dtype=np.uint8)
    below -= 1
    top -= (below >= WINDOW).view(np.uint8).sum(1, dtype=np.uint8) < outside
    return np.maximum(top, WINDOW - 1) - (WINDOW - 1)


def _parts(encoded: Bytes, n: int) -> Words:
    """View of the three parts of the codes, in words of 8 bytes: ``[units, 3, n / 64]``."""
    return encoded[:, n : n * 11 // 8].view(np.uint64).reshape(len(encoded), 3, n // 64)


def _starts(encoded: Bytes, form: UnitForm) -> npt.NDArray[np.uint16]:
    """View of the starts, ``[units, blocks - 1, 2]``."""
    end = form.size - form.pool
    starts = encoded[:, end - 4 * (form.blocks - 1) : end].view(np.uint16)
    return starts.reshape(len(encoded), form.blocks - 1, 2)


@lru_cache
def _set_bits() -> tuple[Places, Bytes]:
    """The numbers of the set bits of every 16-bit number, one after the other, and where those of
    each number begin."""
    numbers = np.arange(1 << 16, dtype="<u2")
    counts = np.bitwise_count(numbers)
    bits = np.unpackbits(numbers.view(np.uint8), bitorder="little")
    return np.cumsum(counts, dtype=np.int64) - counts, (np.flatnonzero(bits) & 15).astype(np.uint8)


class _Exceptions:
    """Values with code 0 in encoded units, of all units in their order.

    Attributes:
        places: Where they are among the values of all units.
        bytes_before: Of all pools, before each block of each unit and at the end.
    """

    def __init__(self, encoded: Bytes, n: int, form: UnitForm) -> None:
        self._form, of_unit = form, n // 16
        low, high, last = _parts(encoded, n).transpose(1, 0, 2)
        coded = low >> 1
        coded |= low
        coded &= _EACH * 0x55
        odd_runs = high << 1
        odd_runs |= high
        odd_runs &= _EACH * 0xAA
        coded |= odd_runs
        coded |= last
        masks = np.invert(coded, out=coded).view("<u2").reshape(-1)
        columns = np.flatnonzero(masks != 0)
        masks = masks[columns]
        counts = np.bitwise_count(masks)
        self._before = np.cumsum(counts, dtype=np.int64) - counts
        self._column = np.repeat(np.arange(len(columns)), counts)
        begins, lists = _set_bits()
        self._ranks = np.arange(len(self._column))
        bits = lists[self._ranks + (begins[masks] - self._before)[self._column]]
        self._columns, self._units = columns, columns // of_unit
        first = self._units * (n - 2 * of_unit) + 2 * columns
        of_column = np.arange(2)[:, None] + np.arange(RUNS) * (n // RUNS)
        self.places = first[self._column] + of_column.reshape(-1)[bits]

        blocks = np.arange(len(encoded))[:, None] * of_unit + np.arange(form.blocks) * BLOCK_COLUMNS
        self._blocks = np.append(blocks.reshape(-1), len(encoded) * of_unit)
        self._begins = np.searchsorted(columns, self._blocks)
        self._bytes = np.append(0, np.cumsum(counts + 1 >> 1, dtype=np.int64))
        self.bytes_before = self._bytes[self._begins]

    def ends(self, some: Places) -> Places:
        """Where the units of ``some`` exceptions end among the bytes of all units."""
        return (self._units[self._column[some]] + 1) * self._form.size

    def begins_of(self, some: Places) -> Places:
        """How many of ``some`` exceptions are before each block of each unit, and at the end."""
        return np.searchsorted(self._columns[self._column[some]], self._blocks)

    def halves(self, starts: Places) -> Places:
        """Where the 4 bits of each are among the halves of the bytes of all units: the low half of
        a byte is the first one. ``starts``: int64 ``[units, blocks, 2]``."""
        begins = self._begins_in_pool(starts) + (self._units + 1) * self._form.size
        begins -= self._form.pool
        return self._ranks + (2 * begins - self._before)[self._column]

    def short_of(self, encoded: Bytes, starts: Places) -> Bytes:
        """The 4 bits of each."""
        halves = self.halves(starts)
        short = encoded.reshape(-1).take(halves >> 1, mode="clip")
        short >>= (halves & 1).astype(np.uint8) << 2
        short &= 15
        most = self._form.pool - np.diff(self._bytes)
        if (self._begins_in_pool(starts) > most).any():  # damaged
            short[halves >> 1 >= self.ends(np.arange(len(halves)))] = 0
        return short

    def _begins_in_pool(self, starts: Places) -> Places:
        """Where the bytes of each column with exceptions begin in the pool."""
        shift = starts[:, :, 0].reshape(-1) - self.bytes_before[:-1]
        return self._bytes[:-1] + np.repeat(shift, np.diff(self._begins))

    def whole_at(self, whole: Places, starts: Places) -> Places:
        """How far before the end of its unit each of ``whole`` has its exponent: 1 and more."""
        before = self.begins_of(whole)
        shift = starts[:, :, 1].reshape(-1) - before[:-1]
        return np.arange(1, len(whole) + 1) + np.repeat(shift, np.diff(before))
