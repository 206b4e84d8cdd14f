"""Codecs for stored hidden states, and for K and V.

Hidden states are encoded row by row:

====== ======================== ============================== ====================================
name   rows                     bytes of a row of d values     what comes back
====== ======================== ============================== ====================================
none   any                      those of the row               every bit
exp4   bfloat16, d % 16 == 0    49/32 d at most for d >= 256   every bit
int8   float32, 16-bit floats   d + 4, to a multiple of 16     error at most 1/254 of the row's
                                                               largest magnitude
fp8    float32, 16-bit floats   d + 4, to a multiple of 16     error at most 1/16 of each value
====== ======================== ============================== ====================================

K and V are encoded unit by unit (:mod:`hcache_backend.format.units`): ``exp4`` of bfloat16,
``int8`` and ``fp8`` of 16-bit floats.
"""

from __future__ import annotations

import torch

from .base import Codec, ExactCodec, UnsupportedRows
from .exp4 import Cut, Exp4Codec
from .scaled import Fp8Codec, Int8Codec
from .scaled_segments import Fp8Segments, Int8Segments
from .segment_codecs import Exp4Segments, SegmentCodec

__all__ = [
    "CODECS",
    "SEGMENT_CODECS",
    "Codec",
    "Cut",
    "ExactCodec",
    "SegmentCodec",
    "UnsupportedRows",
    "make_codec",
    "make_segment_codec",
]

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (ExactCodec, Exp4Codec, Int8Codec, Fp8Codec)
}

SEGMENT_CODECS: dict[str, type[SegmentCodec]] = {
    codec.name: codec for codec in (Exp4Segments, Int8Segments, Fp8Segments)
}


def make_codec(name: str, hidden_size: int, dtype: torch.dtype) -> Codec:
    """The codec ``name`` for rows of ``hidden_size`` values, or UnsupportedRows."""
    return CODECS[name](hidden_size, dtype)


def make_segment_codec(name: str, cut: Cut, dim: int, dtype: torch.dtype) -> SegmentCodec:
    """The codec ``name`` for K and V cut into such units, in heads of ``dim`` values, or
    UnsupportedRows."""
    return SEGMENT_CODECS[name](cut, dim, dtype)
