"""Codecs for stored hidden states.

====== ======================== ============================== ====================================
name   rows                     bytes of a row of d values     what comes back
====== ======================== ============================== ====================================
none   any                      those of the row               every bit
exp4   bfloat16, d % 16 == 0    49/32 d at most for d >= 256   every bit
int8   float32, 16-bit floats   d + 4, to a multiple of 16     error at most 1/254 of the row's
                                                               largest magnitude
fp8    float32, 16-bit floats   d + 4, to a multiple of 16     error at most 1/16 of each value
====== ======================== ============================== ====================================
"""

from __future__ import annotations

import torch

from .base import Codec, ExactCodec, UnsupportedRows
from .exp4 import Exp4Codec
from .scaled import Fp8Codec, Int8Codec

__all__ = ["CODECS", "Codec", "ExactCodec", "UnsupportedRows", "make_codec"]

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (ExactCodec, Exp4Codec, Int8Codec, Fp8Codec)
}


def make_codec(name: str, hidden_size: int, dtype: torch.dtype) -> Codec:
    """The codec ``name`` for rows of ``hidden_size`` values, or UnsupportedRows."""
    return CODECS[name](hidden_size, dtype)
