"""``exp4``: lossless for bfloat16, 0.77 of its bytes (the code: :mod:`.reference`)."""

import torch

from ..codec import KV, LATENT, Codec, Program, UnsupportedRows
from ..units import Cut
from .kernel import decode_kernel, encode_kernel
from .reference import UnitForm, decode_units, encode_units, form_of

_MOST_VALUES = 1 << 16
_THREAD_PAIRS = 8  # pairs of values of a thread: 16 bytes of sign and mantissa


class Exp4(Codec):
    """Units of bfloat16: a multiple of 16 values, at most 65536; an even number for each token."""

    name = "exp4"
    code = "exp4.2"  # before, exceptions had positions
    lossless = True
    word = torch.int32

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        values, takes = cut.values, f"codec {self.name!r} takes"
        if dtype != torch.bfloat16:
            what = "bfloat16 hidden states"
            if planes in (KV, LATENT):
                what = f"{'K and V' if planes == KV else 'latents'} in bfloat16"
            raise UnsupportedRows(f"{takes} {what}, not {dtype}")
        if cut.width % 2:
            raise UnsupportedRows(
                f"{takes} an even number of values per token and group, not {cut.width}"
            )
        if values % 16 or not 16 <= values <= _MOST_VALUES:
            raise UnsupportedRows(
                f"{takes} rows and units whose values are a multiple of 16 and at most "
                f"{_MOST_VALUES}, not {values}"
            )
        self._take(form_of(values))

    def _take(self, form: UnitForm) -> None:
        """Set the bytes of a unit, and the kernels that encode and decode units of this form."""
        units, warps = len(self.planes) * self.cut.units, max(1, form.pairs // (32 * _THREAD_PAIRS))
        self.unit_bytes = (form.size,) * len(self.planes)
        # Twice as many, so that threads of exp3 have 128 registers instead of 255.
        encoding = 2 * warps if form.channels else warps
        self.encoder = Program(encode_kernel, units, encoding, {"CODE": form})
        self.decoder = Program(decode_kernel, units * form.blocks, warps, {"CODE": form})

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = self._encoded(units.flatten(0, 2))
        fits = fits.view(len(units), self.flags).all(1)
        return encoded.view(len(units), self.segment_bytes), fits

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        cut = self.cut
        shape = (len(encoded), len(self.planes), cut.units, cut.tokens, cut.width)
        units = encoded.reshape(-1, self.unit_bytes[0])
        return self._decoded(units).view(shape)

    def _encoded(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return encode_units(units.flatten(1))

    def _decoded(self, encoded: torch.Tensor) -> torch.Tensor:
        return decode_units(encoded, self.cut.values)
