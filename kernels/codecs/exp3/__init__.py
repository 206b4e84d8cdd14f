"""``exp3``: lossless for K and V in bfloat16, 0.717 of the bytes (the code: :mod:`.reference`)."""

from __future__ import annotations

import torch

from ..codec import KV, LATENT, UnsupportedRows
from ..exp4 import Exp4
from ..units import Cut
from .kernel import decode_kernel, encode_kernel
from .reference import decode_units, encode_units, form_of

_LEAST_TOKENS, _LEAST_VALUES = 32, 512


class Exp3(Exp4):
    """Units of K and V in bfloat16: at least 32 tokens, a multiple of 8, and 512 to 65536 values, a
    multiple of 64; an even number for each token."""

    name = code = "exp3"

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        if planes == LATENT:
            raise UnsupportedRows("codec 'exp3' takes K and V, not latents")
        if cut.tokens % 8 or cut.tokens < _LEAST_TOKENS:
            raise UnsupportedRows(
                f"codec 'exp3' takes units of K and V whose tokens are a multiple of 8 and at "
                f"least {_LEAST_TOKENS}, not {cut.tokens}"
            )
        if cut.values % 64 or cut.values < _LEAST_VALUES:
            raise UnsupportedRows(
                f"codec 'exp3' takes units whose values are a multiple of 64 and at least "
                f"{_LEAST_VALUES}, not {cut.values}"
            )
        self._take(form_of(cut.tokens, cut.width), encode_kernel, decode_kernel)

    def _encoded(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return encode_units(units)

    def _decoded(self, encoded: torch.Tensor) -> torch.Tensor:
        return decode_units(encoded, self.cut.tokens, self.cut.width)
