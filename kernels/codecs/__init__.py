"""Codecs for stored hidden states, and for K and V: one interface (:mod:`.codec`).

====== ============================== ========================== ==================================
name   takes                          bytes                      what comes back
====== ============================== ========================== ==================================
none   any hidden states              those of the values        every bit
exp3   K and V in bfloat16, units of  0.717 of them, if a unit   every bit
       at least 32 tokens             has 64 tokens
exp4   bfloat16                       49/64 of them, if a unit   every bit
                                      has 256 values
int8   float32 (hidden states only),  a byte per value, and one  error at most 1/254 of the line's
       bfloat16, float16              value per line             largest magnitude
====== ============================== ========================== ==================================

Codes ``fp8`` and ``fp8.2`` are of a codec that is gone. Stores may have pages of it, which are
misses: no other codec gets these codes.
"""

from contextlib import suppress

import torch

from .codec import KV, LATENT, Codec, ExactCodec, UnsupportedRows
from .exp3 import Exp3
from .exp4 import Exp4
from .int8 import Int8
from .units import Cut

__all__ = [
    "CODECS", "KV", "LATENT", "SEGMENT_CODECS", "Codec", "Cut", "ExactCodec", "Int8",
    "UnsupportedRows", "make_codec", "make_segment_codec",
]  # fmt: skip

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (ExactCodec, Exp4, Int8)}

SEGMENT_CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Exp3, Exp4, Int8)}
"""Those of K and V, which are copied as they are without one."""


def make_codec(name: str, hidden_size: int, dtype: torch.dtype) -> Codec:
    """The codec ``name`` for rows of ``hidden_size`` values, or UnsupportedRows; ``exp4`` if K and
    V have ``exp3``."""
    return CODECS["exp4" if name == "exp3" else name].of_rows(hidden_size, dtype)


def make_segment_codec(
    name: str, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV
) -> Codec:
    """The codec ``name`` for K and V, or latents, cut into such units, in heads of ``dim`` values,
    or UnsupportedRows; a KeyError if there is none of that name. ``exp4`` takes the place of
    ``exp3`` for units that ``exp3`` does not take."""
    if name == "exp3":
        with suppress(UnsupportedRows):
            return Exp3(cut, dim, dtype, planes)
        name = "exp4"
    return SEGMENT_CODECS[name](cut, dim, dtype, planes)
