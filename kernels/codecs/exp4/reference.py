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
    starts: int  # where the starts begin in the tail: behind what tells the windows
    most: int  # bytes of exceptions that there is room for
    blocks: int  # parts that decode side by side
    counted: int  # one block in this many is counted for the window; with channels, one token
    pool: int  # most, up to a power of two
    pairs: int  # of values, that a program takes at once
    channels: int = 0  # pairs of them that have windows, up to a power of two; 0: the unit has one


@lru_cache
def form_of(values: int) -> UnitForm:
    """The form of a unit of ``values`` values, a multiple of 16: exceptions share the tail with two
    bytes for the window and the extra exponent, and two for the start of each later block."""
    tail, blocks = max(8, values // 32 // 8 * 8), -(-values // BLOCK_VALUES)
    most = tail - 2 - 2 * (blocks - 1)
    pool = 1 << (most - 1).bit_length()
    pairs = min(BLOCK_VALUES, 1 << (values - 1).bit_length()) // 2
    size, starts, counted = values * 3 // 2 + tail, 2, max(1, blocks // 4)
    return UnitForm(size, tail, starts, most, blocks, counted, pool, pairs)


def encode_units(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode bfloat16 ``[units, n]``, ``n`` a multiple of 16. Returns uint8 ``[units, size]``, and
    whether each unit fits, bool ``[units]``: otherwise its bytes mean nothing."""
    count, n = units.shape
    form, split = form_of(n), n * 3 // 2
    most = form.most
    bits = units.view(torch.int16).numpy().view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8)
    lowest, extra = (found.numpy()[:, None] for found in _window(torch.from_numpy(exponents)))
    codes = exponents - (lowest - 1)  # modulo 256, so exponents below the window are far above it
    codes *= (codes - 1 < WINDOW).view(np.uint8)  # 0: an exception
    codes += (exponents == extra).view(np.uint8) * np.uint8(EXTRA)

    result = units.new_zeros((count, form.size), dtype=torch.uint8)
    encoded = result.numpy()
    encoded[:, :n] = sign_mantissa_of(bits)
    places = places_of(codes == 0)
    pairs = codes.view(np.uint16)
    pairs |= pairs >> 4  # two codes of 4 bits in the low byte
    encoded[:, n:split] = pairs

    tail = encoded[:, split:]
    tail[:, :1], tail[:, 1:2] = lowest, extra
    found, pool = found_in_blocks(places, count, n), tail.shape[1] - most  # pool: its first byte
    starts = found.cumsum(1) - found
    tail[:, form.starts : pool] = starts[:, 1:].astype(np.uint16).view(np.uint8)
    rank = ranks_of(places, n, starts)
    places, rank = places[rank < most], rank[rank < most]
    tail[places // n, pool + rank] = exponents.reshape(-1)[places]
    return result, torch.from_numpy(found.sum(1) <= most)


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
    form, places = form_of(values), places_of(codes == 0)
    pool, starts = form.tail - form.most, np.zeros((len(tail), form.blocks), np.int64)
    starts[:, 1:] = tail[:, form.starts : pool].view(np.uint16)
    exponents.reshape(-1)[places] = listed(tail[:, pool:], places, values, starts)
    return values_of(sign_mantissa, exponents)


def sign_mantissa_of(bits: npt.NDArray[np.uint16]) -> Bytes:
    """Sign (bit 7) and mantissa of bits of bfloat16."""
    found = bits >> 8
    found &= 0x80
    found |= bits & 0x7F
    return found.astype(np.uint8)


def values_of(sign_mantissa: Bytes, exponents: Bytes) -> torch.Tensor:
    """bfloat16 ``[units, n]`` of these parts."""
    bits = sign_mantissa.astype(np.uint16)
    bits *= 0x0101
    bits &= 0x807F
    wide = exponents.astype(np.uint16)
    wide *= 0x80  # faster than a shift
    bits |= wide
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def listed(pool: Bytes, places: Places, values: int, starts: Places) -> Bytes:
    """Entries of ``places`` in the pools of their units, ``[units, most]``, if the list of a block
    begins at ``starts``, int64 ``[units, blocks]``: 0 behind the end of the pool."""
    units, most = pool.shape
    at = ranks_of(places, values, starts + most * np.arange(units)[:, None])
    found = pool.reshape(-1).take(at, mode="clip")
    found *= at < most * (places // values + 1)
    return found


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


def places_of(mask: npt.NDArray[np.bool_]) -> Places:
    """Where ``[units, n]`` is True, ``n`` a multiple of 8: places among those of all units, in
    order. Few are, so words of 8 are looked at first."""
    words = mask.view(np.uint64).reshape(-1)
    some = np.flatnonzero(words != 0)
    places = np.flatnonzero(words[some].view(np.bool_))
    return some[places >> 3] * 8 + (places & 7)


def found_in_blocks(places: Places, units: int, values: int) -> Places:
    """How many ``places`` there are in each block, int64 ``[units, blocks]``."""
    begins = np.arange(units)[:, None] * values + np.arange(0, values, BLOCK_VALUES)
    before = np.searchsorted(places, begins.reshape(-1))
    return np.diff(before, append=len(places)).reshape(begins.shape)


def ranks_of(places: Places, values: int, starts: Places) -> Places:
    """The rank of each of ``places`` in the list of its unit, if the list of a block begins at
    ``starts``, int64 ``[units, blocks]``."""
    found = found_in_blocks(places, len(starts), values).reshape(-1)
    return np.arange(len(places)) + np.repeat(starts.reshape(-1) - found.cumsum() + found, found)
