"""The code of ``exp4``, in plain torch: lossless for bfloat16, 0.77 of its bytes.

A *unit* is encoded as a whole: a row of hidden states, or K or V of some heads and tokens of a
page. An encoded unit of ``n`` values is

- ``n`` bytes: sign (bit 7) and mantissa of each value;
- ``n / 2`` bytes: a 4-bit code for the exponent of each value, even positions in the low half;
- the tail, 1/32 of ``n`` bytes: the lowest exponent of the *window*, the *extra* exponent, the
  *starts* (16 bits each), then the *exceptions* (exponents, 8 bits each) and zeros.

Codes 1 to 14 stand for the exponents of the window, 15 for the extra one, which is the most
frequent exponent outside: 0 where many values are 0. Code 0 says that the exponent is the next of
the exceptions, which are in the order of the values. Each block of 4096 values decodes without
those before it: for every block but the first there is a start, the number of exceptions before it.
Window and extra exponent are those of every ``counted``-th block, from the first one on.

A unit with more exceptions than its tail has room for does not fit. Any bytes decode to something,
and to the same on every device: exponents are taken modulo 256, and what lies behind the end of the
exceptions is exponent 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

WINDOW = 14
EXTRA = WINDOW + 1
BLOCK_VALUES = 4096


class UnitForm(NamedTuple):
    """What an encoded unit of some number of values looks like, and how kernels go through it."""

    size: int  # bytes, a multiple of 8
    tail: int  # bytes behind the codes, whole words of 8 bytes
    starts: int  # where the starts begin in the tail: behind the window and the extra exponent
    most: int  # exceptions that there is room for
    blocks: int  # parts that decode side by side
    counted: int  # one block in this many is counted: all up to seven, of more at least four
    pool: int  # most, up to a power of two
    pairs: int  # of values, that a program takes at once


@lru_cache
def form_of(values: int) -> UnitForm:
    """The form of a unit of ``values`` values, a multiple of 16."""
    tail, blocks = max(8, values // 32 // 8 * 8), -(-values // BLOCK_VALUES)
    most = tail - 2 - 2 * (blocks - 1)
    pool, pairs = (
        1 << (most - 1).bit_length(),
        min(BLOCK_VALUES, 1 << (values - 1).bit_length()) // 2,
    )
    return UnitForm(values * 3 // 2 + tail, tail, 2, most, blocks, max(1, blocks // 4), pool, pairs)


def encode_units(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode bfloat16 ``[units, n]``, ``n`` a multiple of 16.

    Returns:
        uint8 ``[units, size]``, and whether each unit fits, bool ``[units]``. The bytes of a unit
        that does not fit mean nothing.
    """
    count, n = units.shape
    form, split = form_of(n), n * 3 // 2
    most = form.most
    bits = units.view(torch.int16).numpy().view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8)
    lowest, extra = (found.numpy()[:, None] for found in _window(torch.from_numpy(exponents)))
    codes = exponents - (lowest - 1)
    codes *= (codes - 1 < WINDOW).view(np.uint8)  # what is below the window is far above it
    codes += (exponents == extra).view(np.uint8) * np.uint8(EXTRA)

    result = units.new_zeros((count, form.size), dtype=torch.uint8)
    encoded = result.numpy()
    sign_mantissa = bits >> 8
    sign_mantissa &= 0x80
    sign_mantissa |= bits & 0x7F
    encoded[:, :n] = sign_mantissa
    places = _places(codes == 0)
    pairs = codes.view(np.uint16)
    pairs |= pairs >> 4
    encoded[:, n:split] = pairs

    tail = encoded[:, split:]
    tail[:, :1], tail[:, 1:2] = lowest, extra
    before = _before_blocks(places, count, n)
    pool = tail.shape[1] - most
    starts = before[:, 1:] - before[:, :1]
    tail[:, form.starts : pool] = starts.astype(np.uint16).view(np.uint8)
    found = np.diff(before[:, 0], append=len(places))
    rank = np.arange(len(places)) - np.repeat(before[:, 0], found)
    places, rank = places[rank < most], rank[rank < most]
    tail[places // n, pool + rank] = exponents.reshape(-1)[places]
    fits = units.new_empty(count, dtype=torch.bool)
    np.less_equal(found, most, out=fits.numpy())
    return result, fits


def decode_units(encoded: torch.Tensor, values: int) -> torch.Tensor:
    """Decode uint8 ``[units, size]`` to bfloat16 ``[units, values]``."""
    whole, split = encoded.numpy(), values * 3 // 2
    sign_mantissa, packed, tail = whole[:, :values], whole[:, values:split], whole[:, split:]
    lowest, extra = tail[:, :1], tail[:, 1:2]
    pairs = packed.astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.view(np.uint8)
    exponents = codes + (lowest - 1)
    exponents += (codes == EXTRA).view(np.uint8) * (extra - lowest - WINDOW)
    places = _places(codes == 0)
    if len(places):
        exponents.reshape(-1)[places] = _exceptions(tail, places, values)

    bits = sign_mantissa.astype(np.uint16)
    bits *= 0x0101
    bits &= 0x807F
    wide = exponents.astype(np.uint16)
    wide <<= 7
    decoded = encoded.new_empty((len(encoded), values), dtype=torch.bfloat16)
    np.bitwise_or(bits, wide, out=decoded.view(torch.int16).numpy().view(np.uint16))
    return decoded


def _exceptions(tail: Bytes, places: Places, values: int) -> Bytes:
    """The exponents of values with code 0, at ``places`` among those of all units, in order."""
    form = form_of(values)
    most, pool = form.most, form.tail - form.most
    ranks_before = np.zeros((len(tail), form.blocks), np.int64)
    ranks_before[:, 1:] = tail[:, form.starts : pool].copy().view(np.uint16)
    before = _before_blocks(places, len(tail), values).reshape(-1)
    found = np.diff(before, append=len(places))
    rank = np.arange(len(places)) + np.repeat(ranks_before.reshape(-1) - before, found)
    unit = places // values
    listed = tail[unit, pool + np.minimum(rank, most - 1)]
    listed *= rank < most
    return listed


def _window(exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest exponent of the window that holds most of uint8 ``[units, n]``, and the most frequent
    exponent outside of it: uint8 ``[units]`` each, the lowest of equals."""
    count, n = exponents.shape
    counted = exponents.split(BLOCK_VALUES, dim=1)[:: form_of(n).counted]
    numbers = torch.cat(counted, dim=1).to(torch.int32)
    numbers += 256 * torch.arange(count, dtype=torch.int32)[:, None]
    histogram = torch.bincount(numbers.view(-1), minlength=256 * count).view(count, 256)
    up_to = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    lowest = (up_to[:, WINDOW:] - up_to[:, :-WINDOW]).argmax(1)
    histogram.scatter_(1, lowest[:, None] + torch.arange(WINDOW), -1)
    return lowest.to(torch.uint8), histogram.argmax(1).to(torch.uint8)


def _places(mask: npt.NDArray[np.bool_]) -> Places:
    """Where ``[units, n]`` is True, ``n`` a multiple of 8: places among those of all units, in
    order. Few are, so words of 8 are looked at first."""
    words = np.flatnonzero(mask.view(np.uint64))
    places = np.flatnonzero(mask.reshape(-1, 8)[words])
    return words[places >> 3] * 8 + (places & 7)


def _before_blocks(places: Places, units: int, values: int) -> Places:
    """How many ``places`` there are before each block, int64 ``[units, blocks]``."""
    begins = np.arange(units)[:, None] * values + np.arange(form_of(values).blocks) * BLOCK_VALUES
    return np.searchsorted(places, begins.reshape(-1)).reshape(begins.shape)
