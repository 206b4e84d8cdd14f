"""The code of ``exp3``, in plain torch: lossless for bfloat16, 0.717 of its bytes.

A *unit* is K or V of some heads (``width`` channels) and tokens of a page. An encoded unit of ``n``
values is

- ``n`` bytes: sign (bit 7) and mantissa of each value;
- three times ``n / 8`` bytes: bits 0, 1 and 2 of a 3-bit code for the exponent of each value, the
  first of eight values in the lowest bit;
- the tail: the *lowest* exponent of each channel, 8 bits each; the *starts*, 16 bits each; the
  *pool*, and zeros between its two ends.

Codes 1 to 7 stand for seven exponents of the channel, from its lowest one on. Code 0 is an
*exception*. Exceptions are in the order of the values, and each has 4 bits in the pool, the first
of two in the low half of a byte. 0 to 11 stand for the exponents from ``lowest - 12`` on, 12 to 14
for those behind the seven. 15 says that the exponent is the next of the *whole* ones, which are at
the end of the pool, 8 bits each, backwards. Each block of 4096 values decodes without those before
it, and its exceptions begin with a byte. For every block but the first there are two starts, of its
bytes and of its whole exponents.

A unit whose exceptions need more bytes than its pool has does not fit. Any bytes decode to
something, and to the same on every device: exponents are taken modulo 256, and what lies behind the
end of the pool is 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..exp4.reference import (
    BLOCK_VALUES,
    Bytes,
    Places,
    before_blocks,
    listed,
    places_of,
    ranks_of,
    sign_mantissa_of,
    values_of,
)

WINDOW = 7
BELOW, ABOVE = 12, 3
"""Exponents on both sides of the window that take 4 bits."""
WHOLE = BELOW + ABOVE
_RUNS = 8
_COUNTED_TOKENS = 64

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
    pairs: int  # of values, that a program takes at once
    counted: int  # every so many tokens are counted for the window, at most 64 in all
    channels: int  # pairs of channels, up to a power of two
    entries: int  # the pool, up to a power of two


@lru_cache
def form_of(tokens: int, width: int) -> UnitForm:
    """The form of a unit: ``tokens`` are a multiple of 8, ``width`` is even, and their product is a
    multiple of 64."""
    values = tokens * width
    blocks, tail = -(-values // BLOCK_VALUES), (width + values * 11 // 256) // 8 * 8
    pool = tail - width - 4 * (blocks - 1)
    whole, channels, entries = (1 << (n - 1).bit_length() for n in (values, width // 2, pool))
    size, pairs = values * 11 // 8 + tail, min(BLOCK_VALUES, whole) // 2
    return UnitForm(size, pool, blocks, pairs, -(-tokens // _COUNTED_TOKENS), channels, entries)


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
    codes = (offsets * (offsets - 1 < WINDOW).view(np.uint8)).reshape(count, n)

    result = units.new_zeros((count, form.size), dtype=torch.uint8)
    encoded, split = result.numpy(), n * 11 // 8
    encoded[:, :n] = sign_mantissa_of(bits.reshape(count, n))
    for bit in range(3):
        plane = np.packbits(codes & (1 << bit), axis=1, bitorder="little")
        encoded[:, n + bit * n // 8 : n + (bit + 1) * n // 8] = plane
    encoded[:, split : split + width] = lowest

    places = places_of(codes == 0)
    short = SHORT[offsets.reshape(-1)[places]]
    whole = places[short == WHOLE]
    before, before_whole = (before_blocks(some, count, n) for some in (places, whole))
    found = np.diff(before.reshape(-1), append=len(places)).reshape(before.shape)
    starts = np.zeros((count, form.blocks + 1, 2), np.int64)
    np.cumsum(found + 1 >> 1, axis=1, out=starts[:, 1:, 0])
    starts[:, :-1, 1] = before_whole - before_whole[:, :1]
    starts[:, -1, 1] = np.diff(before_whole[:, 0], append=len(whole))
    fits = torch.from_numpy(starts[:, -1].sum(1) <= form.pool)
    if not fits.all():  # others have no room
        result[fits] = encode_units(units[fits])[0]
        return result, fits
    _starts(encoded, form)[:] = starts[:, 1:-1]
    halves, pool = np.zeros((count, 2 * form.pool), np.uint8), encoded[:, -form.pool :]
    halves[places // n, ranks_of(places, n, 2 * starts[:, :-1, 0])] = short
    pool[:] = halves[:, ::2] | halves[:, 1::2] * np.uint8(16)
    rank = ranks_of(whole, n, starts[:, :-1, 1])
    pool[whole // n, -1 - rank] = exponents.reshape(-1)[whole]
    return result, fits


def decode_units(encoded: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """Decode uint8 ``[units, size]`` to bfloat16 ``[units, tokens, width]``."""
    form, n, count = form_of(tokens, width), tokens * width, len(encoded)
    bytes_, split = encoded.numpy(), n * 11 // 8
    offsets, *lower = (
        np.unpackbits(bytes_[:, n + at : n + at + n // 8], axis=1, bitorder="little")
        for at in (n // 4, n // 8, 0)
    )
    for bits in lower:
        offsets += offsets
        offsets |= bits
    lowest = bytes_[:, split : split + width]
    exponents = offsets.reshape(count, tokens, width) + (lowest - 1)[:, None]

    starts = np.zeros((2, count, form.blocks), np.int64)
    starts[:, :, 1:] = _starts(bytes_, form).transpose(2, 0, 1)
    pool, places = bytes_[:, -form.pool :], places_of(offsets == 0)
    halves = np.stack((pool & 15, pool >> 4), axis=2).reshape(count, -1)
    short = listed(halves, places, n, 2 * starts[0])
    exponents.reshape(-1)[places] += _LONG.take(short)
    whole = places[short == WHOLE]
    if len(whole):
        exponents.reshape(-1)[whole] = listed(pool[:, ::-1], whole, n, starts[1])
    return values_of(bytes_[:, :n], exponents.reshape(count, n)).view(count, tokens, width)


def lowest_exponents(exponents: Bytes, counted: int) -> Bytes:
    """Lowest exponent of each channel of uint8 ``[units, tokens, width]``.

    The window ends with the largest exponent, or that of all runs but one, if it is smaller by two
    or more: a token may stand out. It ends one lower if it then holds more of the counted values.
    A run is an eighth of the tokens.
    """
    count, tokens, width = exponents.shape
    runs = exponents.reshape(count * _RUNS, tokens // _RUNS, width)
    top = _folded(np.maximum, runs).reshape(count, _RUNS, width)
    second = np.zeros_like(top)
    for half in (4, 2, 1):
        one, other = top[:, :half], top[:, half:]
        second = np.maximum(second[:, :half], second[:, half:])
        second, top = np.maximum(second, np.minimum(one, other)), np.maximum(one, other)
    top = np.where(top - second < 2, top, second)
    seen = exponents[:, ::counted]
    more = (seen == top - np.uint8(WINDOW)).view(np.int8)
    more -= (seen == top).view(np.int8)
    top -= (_folded(np.add, more) > 0)[:, None]
    return (np.maximum(top, WINDOW - 1) - (WINDOW - 1))[:, 0]


def _folded(operation: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``values`` reduced over axis 1, in operations on long rows."""
    while (half := values.shape[1] // 2) * 2 == values.shape[1]:
        values = operation(values[:, :half], values[:, half:])
    return operation.reduce(values, axis=1)


def _starts(encoded: Bytes, form: UnitForm) -> Places:
    """View of the starts, uint16 ``[units, blocks - 1, 2]``."""
    end = form.size - form.pool
    starts = encoded[:, end - 4 * (form.blocks - 1) : end].view(np.uint16)
    return starts.reshape(len(encoded), form.blocks - 1, 2)
