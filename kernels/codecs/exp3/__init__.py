"""``exp3``: lossless for K and V in bfloat16, 0.717 of the bytes (the code: :mod:`.reference`)."""

import torch

from ..codec import KV, LATENT, UnsupportedRows
from ..exp4 import Exp4
from ..units import Cut
from .reference import decode_units, encode_units, form_of


class Exp3(Exp4):
    """Units of K and V in bfloat16: at least 32 tokens, a multiple of 8, and 512 to 65536 values, a
    multiple of 64; an even number for each token."""

    name = code = "exp3"

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        uneven = cut.tokens % 8 or cut.values % 64
        if planes == LATENT or uneven or cut.tokens < 32 or cut.values < 512:
            what = "latents" if planes == LATENT else f"{cut.tokens} times {cut.width}"
            raise UnsupportedRows(
                "codec 'exp3' takes units of K and V whose tokens are a multiple of 8 and at least "
                f"32, and whose values are a multiple of 64 and at least 512, not {what}"
            )
        self._take(form_of(cut.tokens, cut.width))

    _encoded = staticmethod(encode_units)

    def _decoded(self, encoded: torch.Tensor) -> torch.Tensor:
        return decode_units(encoded, self.cut.tokens, self.cut.width)
