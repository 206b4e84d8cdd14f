"""What a codec is: rows of hidden states <-> rows of bytes, each of which stands alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..launch import Launch


class UnsupportedRows(ValueError):
    """A codec cannot hold rows of this width or type; the message says which ones it can."""


class Codec(ABC):
    """Turns rows of hidden states into encoded rows and back.

    - Every encoded row has the same length and decodes without any other: tensor-parallel shares
      read single eighths of a page, and a decode step captures single rows.
    - Encoding a row twice gives the same bytes, on every device.
    - A row that a codec cannot hold is said to be not ok. Its bytes mean nothing; whoever stores
      them anyway stores wrong KV.

    Raises:
        UnsupportedRows: The codec cannot hold rows of that width (in values) or type.

    Attributes:
        name: What options and metrics call it.
        code: What pages call its bytes, at most 8 ASCII characters. When the same rows get other
            bytes, it gets another one: else stored pages would be decoded to wrong values.
        is_view: Whether encoded rows are the rows themselves, seen as bytes.
        row_bytes: Length of an encoded row.
    """

    name: ClassVar[str]
    code: ClassVar[str]
    lossless: ClassVar[bool]
    is_view: ClassVar[bool] = False

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.row_bytes = self._row_bytes()

    @abstractmethod
    def _row_bytes(self) -> int:
        """Length of an encoded row; refuses widths and types."""

    @abstractmethod
    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`encode` in plain torch, for rows on the CPU."""

    @abstractmethod
    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        """:meth:`decode` in plain torch, for bytes on the CPU."""

    def encode_launch(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> Launch:
        """:meth:`encode` as one kernel, into buffers of the caller; all tensors contiguous."""
        raise NotImplementedError

    def decode_launch(self, encoded: torch.Tensor, rows: torch.Tensor) -> Launch:
        """:meth:`decode` as one kernel, into a buffer of the caller; all tensors contiguous."""
        raise NotImplementedError

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode ``rows`` (``[n, hidden_size]``), on their device; a ValueError for other rows.

        Returns:
            The encoded rows, uint8 ``[n, row_bytes]``, and which of them are ok, bool ``[n]``.
        """
        if rows.dim() != 2 or rows.shape[1] != self.hidden_size or rows.dtype != self.dtype:
            raise ValueError(
                f"codec {self.name!r} takes rows [n, {self.hidden_size}] of {self.dtype}, not "
                f"{list(rows.shape)} of {rows.dtype}"
            )
        rows = rows.contiguous()
        if self.is_view or not rows.is_cuda:
            return self.encode_reference(rows)
        encoded = rows.new_empty((len(rows), self.row_bytes), dtype=torch.uint8)
        ok = rows.new_empty(len(rows), dtype=torch.bool)
        self.encode_launch(rows, encoded, ok).run()
        return encoded, ok

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode uint8 ``[n, row_bytes]`` (else a ValueError) to ``[n, hidden_size]``."""
        shape = list(encoded.shape)
        if encoded.dim() != 2 or shape[1] != self.row_bytes or encoded.dtype != torch.uint8:
            raise ValueError(
                f"codec {self.name!r} takes encoded rows [n, {self.row_bytes}] of uint8, not "
                f"{shape} of {encoded.dtype}"
            )
        encoded = encoded.contiguous()
        if self.is_view or not encoded.is_cuda:
            return self.decode_reference(encoded)
        rows = encoded.new_empty((len(encoded), self.hidden_size), dtype=self.dtype)
        self.decode_launch(encoded, rows).run()
        return rows


class ExactCodec(Codec):
    """``none``: rows of any type and width, as they are."""

    name = code = "none"
    lossless = True
    is_view = True

    def _row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.view(torch.uint8), torch.ones(len(rows), dtype=torch.bool, device=rows.device)

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded.view(self.dtype)
