"""``exp3``: lossless for K and V in bfloat16, 0.725 of the bytes (the code: :mod:`.reference`)."""

from __future__ import annotations

import torch

from ..codec import KV, LATENT, REFERENCE_VALUES, Codec, Program, UnsupportedRows
from ..units import Cut
from .kernel import decode_kernel, encode_kernel
from .reference import decode_units, encode_units, form_of

_LEAST_TOKENS, _LEAST_VALUES, _MOST_VALUES = 32, 512, 1 << 16
_WARPS = 8  # a thread for each column of a block


class Exp3(Codec):
    """Units of K and V in bfloat16: at least 32 tokens, a multiple of 8, and 512 to 65536 values, a
    multiple of 64; an even number for each token."""

    name = code = "exp3"
    lossless = True
    word = torch.int32
    reference_values = 2 * REFERENCE_VALUES  # of more and shorter steps than those of exp4

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        if dtype != torch.bfloat16 or planes == LATENT:
            what = "latents" if planes == LATENT else dtype
            raise UnsupportedRows(f"codec 'exp3' takes K and V in bfloat16, not {what}")
        if cut.tokens % 8 or cut.tokens < _LEAST_TOKENS:
            raise UnsupportedRows(
                f"codec 'exp3' takes units of K and V whose tokens are a multiple of 8 and at "
                f"least {_LEAST_TOKENS}, not {cut.tokens}"
            )
        if cut.width % 2 or cut.values % 64 or not _LEAST_VALUES <= cut.values <= _MOST_VALUES:
            raise UnsupportedRows(
                f"codec 'exp3' takes units whose values are a multiple of 64, an even number for "
                f"each token, and {_LEAST_VALUES} to {_MOST_VALUES} in all, not {cut.tokens} times "
                f"{cut.width}"
            )
        form = form_of(cut.tokens, cut.width)
        self.unit_bytes = (form.size,) * len(planes)
        units = len(planes) * cut.units
        self.encoder = Program(encode_kernel, units, _WARPS, {"CODE": form})
        self.decoder = Program(decode_kernel, units * form.blocks, _WARPS, {"CODE": form})

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = encode_units(units.reshape(-1, self.cut.tokens, self.cut.width))
        fits = fits.view(len(units), self.flags).all(1)
        return encoded.view(len(units), self.segment_bytes), fits

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        cut = self.cut
        shape = (len(encoded), len(self.planes), cut.units, cut.tokens, cut.width)
        units = encoded.reshape(-1, self.unit_bytes[0])
        return decode_units(units, cut.tokens, cut.width).view(shape)
