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

    def encode_into(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> None:
        encoded.copy_(rows.view(torch.uint8))
        ok.fill_(True)

    def decode_into(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        rows.copy_(encoded.view(self.dtype))
