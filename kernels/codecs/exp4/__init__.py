"""``exp4``: lossless for bfloat16, 0.77 of its bytes (the code: :mod:`.reference`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..codec import KV, REFERENCE_VALUES, Codec, Program, UnsupportedRows
from ..units import Cut
from .kernel import decode_kernel, encode_kernel
from .reference import (
    BLOCK_VALUES,
    HEAD_BYTES,
    blocks_of,
    counted_blocks,
    decode_units,
    encode_units,
    most_exceptions,
    tail_bytes,
    unit_bytes,
)

_MOST_VALUES = 1 << 16
_THREAD_PAIRS = 8
"""Pairs of values of a thread: 16 bytes of sign and mantissa."""


class Exp4Code(NamedTuple):
    """What the kernels know of a unit."""

    starts: int  # where the starts are in the tail
    most: int  # exceptions that there is room for
    tail: int  # bytes
    counted: int  # one block in this many is counted
    pool: int  # most, up to a power of two
    block: int  # pairs of values that a program takes at once


class Exp4(Codec):
    """Units of bfloat16: a multiple of 16 values, at most 65536; an even number for each token."""

    name = "exp4"
    code = "exp4.2"  # before, exceptions had positions
    lossless = True
    word = torch.int32

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        values = cut.values
        if dtype != torch.bfloat16:
            what = "K and V in bfloat16" if planes == KV else "bfloat16 hidden states"
            raise UnsupportedRows(f"codec 'exp4' takes {what}, not {dtype}")
        if cut.width % 2:
            raise UnsupportedRows(
                f"codec 'exp4' takes an even number of values per token and group, not {cut.width}"
            )
        if values % 16 or not 16 <= values <= _MOST_VALUES:
            raise UnsupportedRows(
                f"codec 'exp4' takes rows and units whose values are a multiple of 16 and at most "
                f"{_MOST_VALUES}, not {values}"
            )
        self.unit_bytes = (unit_bytes(values),) * len(planes)
        most = most_exceptions(values)
        block = min(BLOCK_VALUES, triton.next_power_of_2(values)) // 2
        counted, pool = counted_blocks(values), triton.next_power_of_2(most)
        code = Exp4Code(HEAD_BYTES, most, tail_bytes(values), counted, pool, block)
        warps, units = max(1, block // (32 * _THREAD_PAIRS)), len(planes) * cut.units
        self.encoder = Program(encode_kernel, units, warps, code)
        self.decoder = Program(decode_kernel, units * blocks_of(values), warps, code)

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = encode_units(units.reshape(-1, self.cut.values))
        fits = fits.view(len(units), self.flags).all(1)
        return encoded.view(len(units), self.segment_bytes), fits

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        cut = self.cut
        shape = (len(encoded), len(self.planes), cut.units, cut.tokens, cut.width)
        units = encoded.reshape(-1, self.unit_bytes[0])
        parts = units.split(max(1, REFERENCE_VALUES // cut.values))
        return torch.cat([decode_units(some, cut.values) for some in parts]).view(shape)
