"""``none``: the bytes of the row."""

from __future__ import annotations

import torch

from .base import Codec


class ExactCodec(Codec):
    """Rows of any type and width, as they are."""

    name = "none"
    lossless = True
    is_view = True

    def _row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.view(torch.uint8), torch.ones(len(rows), dtype=torch.bool, device=rows.device)

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded.view(self.dtype)
