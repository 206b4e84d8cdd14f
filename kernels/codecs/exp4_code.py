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
Window and extra exponent are those of every ``counted_blocks``-th block, from the first one on.

A unit with more exceptions than its tail has room for does not fit. Any bytes decode to something,
and to the same on every device: exponents are taken modulo 256, and what lies behind the end of the
exceptions is exponent 0.
"""

from __future__ import annotations

import numpy as np
import torch

WINDOW = 14
EXTRA = WINDOW + 1
BLOCK_VALUES = 4096
HEAD_BYTES = 2
"""What stands before the starts: the window's lowest exponent, and the extra one."""


def tail_bytes(values: int) -> int:
    """Bytes behind the codes of a unit, whole words of 8 bytes."""
    return max(8, values // 32 // 8 * 8)


def unit_bytes(values: int) -> int:
    """Bytes of an encoded unit of ``values`` values, a multiple of 16."""
    return values * 3 // 2 + tail_bytes(values)


def blocks_of(values: int) -> int:
    """Parts of a unit that decode side by side."""
    return -(-values // BLOCK_VALUES)


def counted_blocks(values: int) -> int:
    """One block in so many is counted to find the window: all up to seven, else at least four."""
    return max(1, blocks_of(values) // 4)


def most_exceptions(values: int) -> int:
    """Exceptions that a unit has room for."""
    return tail_bytes(values) - HEAD_BYTES - 2 * (blocks_of(values) - 1)


def encode_units(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode bfloat16 ``[units, n]``, ``n`` a multiple of 16.

    Returns:
        uint8 ``[units, unit_bytes(n)]``, and whether each unit fits, bool ``[units]``. The bytes of
        a unit that does not fit mean nothing.
    """
    count, n = units.shape
    most, blocks = most_exceptions(n), blocks_of(n)
    bits = units.view(torch.int16)
    exponents = (bits >> 7).to(torch.uint8)
    lowest, extra = _window(exponents)
    codes = exponents - (lowest[:, None] - 1)
    codes *= codes - 1 < WINDOW  # uint8: what is below the window is far above it
    codes += (exponents == extra[:, None]).view(torch.uint8) * EXTRA

    unit, position = _places(codes == 0)
    found = torch.bincount(unit, minlength=count)
    rank = _rank(unit, found)
    tail = torch.zeros((count, tail_bytes(n)), dtype=torch.uint8)
    tail[:, 0], tail[:, 1] = lowest, extra
    block = unit * blocks + position // BLOCK_VALUES
    by_block = torch.bincount(block, minlength=count * blocks).view(count, blocks)
    starts = by_block.cumsum(1)[:, :-1].to(torch.int16).contiguous()
    pool = tail.shape[1] - most
    tail[:, HEAD_BYTES:pool] = starts.view(torch.uint8)
    unit, position, rank = (part[rank < most] for part in (unit, position, rank))
    tail[unit, pool + rank] = exponents[unit, position]

    sign_mantissa = bits >> 8
    sign_mantissa &= 0x80
    sign_mantissa |= bits & 0x7F
    packed = codes.view(torch.int16)
    packed |= packed >> 4
    parts = sign_mantissa.to(torch.uint8), packed.to(torch.uint8), tail
    return torch.cat(parts, dim=1), found <= most


def decode_units(encoded: torch.Tensor, values: int) -> torch.Tensor:
    """Decode uint8 ``[units, unit_bytes(values)]`` to bfloat16 ``[units, values]``."""
    count, blocks, most = len(encoded), blocks_of(values), most_exceptions(values)
    sign_mantissa, packed, tail = encoded.split([values, values // 2, tail_bytes(values)], dim=1)
    lowest, extra = tail[:, :1], tail[:, 1:2]
    pairs = packed.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.view(torch.uint8)
    exponents = codes + (lowest - 1)
    exponents += (codes == EXTRA) * (extra - lowest - WINDOW)

    unit, position = _places(codes == 0)
    block = unit * blocks + position // BLOCK_VALUES
    pool = tail.shape[1] - most
    starts = torch.zeros((count, blocks), dtype=torch.int64)
    starts[:, 1:] = tail[:, HEAD_BYTES:pool].contiguous().view(torch.uint16)
    rank = starts.view(-1)[block] + _rank(block, torch.bincount(block, minlength=count * blocks))
    exception = tail[unit, (pool + rank).clamp_max(tail.shape[1] - 1)]
    exponents[unit, position] = exception * (rank < most)

    bits = sign_mantissa.to(torch.int16)
    bits |= (bits & 0x80) << 8
    bits &= ~0x80
    bits |= exponents.to(torch.int16) << 7
    return bits.view(torch.bfloat16)


def _window(exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest exponent of the window that holds most of uint8 ``[units, n]``, and the most frequent
    exponent outside of it: uint8 ``[units]`` each, the lowest of equals."""
    count, n = exponents.shape
    counted = exponents.split(BLOCK_VALUES, dim=1)[:: counted_blocks(n)]
    numbers = torch.cat(counted, dim=1).to(torch.int32)
    numbers += 256 * torch.arange(count, dtype=torch.int32)[:, None]
    histogram = torch.bincount(numbers.view(-1), minlength=256 * count).view(count, 256)
    up_to = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    lowest = (up_to[:, WINDOW:] - up_to[:, :-WINDOW]).argmax(1)
    histogram.scatter_(1, lowest[:, None] + torch.arange(WINDOW), -1)
    return lowest.to(torch.uint8), histogram.argmax(1).to(torch.uint8)


def _places(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit and position of what is True in ``[units, n]``, in order: int64 each."""
    places = torch.from_numpy(np.flatnonzero(mask.numpy()))  # many times as fast as torch's
    return places // mask.shape[1], places % mask.shape[1]


def _rank(group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Place of every entry within its group; groups follow each other and have these sizes."""
    return torch.arange(len(group)) - (sizes.cumsum(0) - sizes)[group]
