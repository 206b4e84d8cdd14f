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
it, and its exceptions begin with a byte. For every block but the first there are two starts, one
list behind the other: of its bytes and of its whole exponents.

A unit whose exceptions need more bytes than its pool has does not fit. Any bytes decode to
something, and to the same on every device: exponents are taken modulo 256, and what lies behind the
end of the pool is 0.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..exp4 import reference as exp4
from ..exp4.reference import Bytes, UnitForm, found_in_blocks, listed, places_of, ranks_of

WINDOW, WHOLE = 7, 15
_RUNS = 8
_BITS = np.array([[1], [2], [4]], np.uint8)

SHORT = np.full(256, WHOLE, np.uint8)
"""The 4 bits of an exception, by its exponent from ``lowest - 1`` on, modulo 256."""
SHORT[np.arange(-11, 1)], SHORT[8:11] = np.arange(12), (12, 13, 14)
_LONG = np.array([*range(-11, 1), 8, 9, 10, 0]).astype(np.uint8)  # the reverse of SHORT


@lru_cache
def form_of(tokens: int, width: int) -> UnitForm:
    """The form of a unit: ``tokens`` are a multiple of 8, ``width`` is even, and their product is a
    multiple of 64."""
    values = tokens * width
    form, tail = exp4.form_of(values), (width + values * 11 // 256) // 8 * 8
    most = tail - width - 4 * (form.blocks - 1)
    pool, channels = (1 << (n - 1).bit_length() for n in (most, width // 2))
    size, counted = values * 11 // 8 + tail, -(-tokens // 64)
    return UnitForm(size, tail, width, most, form.blocks, counted, pool, form.pairs, channels)


def encode_units(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode bfloat16 ``[units, tokens, width]``. Returns uint8 ``[units, size]``, and whether each
    unit fits, bool ``[units]``: otherwise its bytes mean nothing."""
    count, tokens, width = units.shape
    form, n = form_of(tokens, width), tokens * width
    bits = units.contiguous().view(torch.int16).numpy().view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8)
    lowest = lowest_exponents(exponents, form.counted)
    offsets = exponents - (lowest - 1)[:, None]
    codes = (offsets * (offsets - 1 < WINDOW).view(np.uint8)).reshape(count, n)

    result = units.new_zeros((count, form.size), dtype=torch.uint8)
    encoded = result.numpy()
    tail = encoded[:, -form.tail :]
    encoded[:, :n] = exp4.sign_mantissa_of(bits.reshape(count, n))
    planes = np.packbits(codes[:, None] & _BITS, axis=2, bitorder="little")
    encoded[:, n : -form.tail] = planes.reshape(count, 3 * n // 8)
    tail[:, :width] = lowest

    places = places_of(codes == 0)
    short = SHORT[offsets.reshape(-1)[places]]
    whole = places[short == WHOLE]
    used = np.stack([found_in_blocks(some, count, n) for some in (places, whole)], axis=1)
    used[:, 0] = used[:, 0] + 1 >> 1  # [units, (bytes of 4 bits, whole), blocks]
    ends = used.cumsum(2)
    fits = torch.from_numpy(ends[:, :, -1].sum(1) <= form.most)
    if not fits.all():  # encode those that do: the pools of the others have no room
        result[fits] = encode_units(units[fits])[0]
        return result, fits
    starts, halves = ends - used, np.zeros((count, 2 * form.most), np.uint8)
    there = tail[:, width : -form.most].view(np.uint16)
    there[:] = starts[:, :, 1:].reshape(there.shape)
    halves[places // n, ranks_of(places, n, 2 * starts[:, 0])] = short
    tail[:, -form.most :] = halves[:, ::2] | halves[:, 1::2] * np.uint8(16)
    tail[whole // n, -1 - ranks_of(whole, n, starts[:, 1])] = exponents.reshape(-1)[whole]
    return result, fits


def decode_units(encoded: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """Decode uint8 ``[units, size]`` to bfloat16 ``[units, tokens, width]``."""
    form, n, count = form_of(tokens, width), tokens * width, len(encoded)
    bytes_ = encoded.numpy()
    tail, pool = bytes_[:, -form.tail :], bytes_[:, -form.most :]
    planes = np.unpackbits(bytes_[:, n : -form.tail], axis=1, bitorder="little")
    offsets, middle, low = planes.reshape(count, 3, n)[:, ::-1].transpose(1, 0, 2)
    for bits in (middle, low):
        offsets = offsets + offsets
        offsets |= bits
    exponents = offsets.reshape(count, tokens, width) + (tail[:, :width] - 1)[:, None]

    starts, places = np.zeros((count, 2, form.blocks), np.int64), places_of(offsets == 0)
    there = tail[:, width : -form.most].view(np.uint16)
    starts[:, :, 1:] = there.reshape(count, 2, form.blocks - 1)
    halves = np.stack((pool & 15, pool >> 4), axis=2).reshape(count, 2 * form.most)
    short = listed(halves, places, n, 2 * starts[:, 0])
    exponents.reshape(-1)[places] += _LONG.take(short)
    whole = places[short == WHOLE]
    exponents.reshape(-1)[whole] = listed(pool[:, ::-1], whole, n, starts[:, 1])
    return exp4.values_of(bytes_[:, :n], exponents.reshape(count, n)).view(count, tokens, width)


def lowest_exponents(exponents: Bytes, counted: int) -> Bytes:
    """Lowest exponent of each channel of uint8 ``[units, tokens, width]``. Its window ends with the
    largest exponent, or that of all runs but one, if it is smaller by two or more: a token may
    stand out. It ends one lower if it then holds more of the counted values, of at most 64 tokens.
    A run is an eighth of the tokens."""
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
    lowest = np.maximum(top, WINDOW - 1)[:, 0] - (WINDOW - 1)
    lowest -= (_folded(np.add, more) > 0) & (lowest > 0)
    return lowest


def _folded(operation: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``values`` reduced over axis 1, in operations on long rows."""
    while (half := values.shape[1] // 2) * 2 == values.shape[1]:
        values = operation(values[:, :half], values[:, half:])
    return operation.reduce(values, axis=1)
