"""``int8`` and ``fp8``: lossy, one float32 scale for each row.

An encoded row is ``d`` codes, zeros, and the scale in its last four bytes; its length is a multiple
of 16. A value comes back as ``code * scale``.

- ``int8``: codes from -127 to 127, scale ``amax / 127``: the error is at most half a scale,
  whatever the value, so one large value costs all others of its row.
- ``fp8`` (e4m3, largest value 448): scale ``amax / 448``; the error is relative to each value
  (1/16 at most), down to values of ``amax / 28672``.

A row of zeros has scale 0. A row is not ok when a value is not finite, or when its largest
magnitude is neither 0 nor between 2**-100 and 2**100: scale or product would leave float32.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .base import Codec, UnsupportedRows

SMALLEST, GREATEST = 2.0**-100, 2.0**100
INT8_LARGEST = 127.0
FP8_LARGEST = 448.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_bytes(hidden_size: int) -> int:
    """Length of an encoded row."""
    return (hidden_size + 4 + 15) // 16 * 16


class ScaledCodec(Codec):
    """What ``int8`` and ``fp8`` share: rows of float32, bfloat16 or float16, of any width."""

    lossless = False
    largest: ClassVar[float]

    def _row_bytes(self) -> int:
        if self.dtype not in _DTYPES:
            names = ", ".join(str(dtype) for dtype in _DTYPES)
            raise UnsupportedRows(f"codec {self.name!r} takes {names}, not {self.dtype}")
        return row_bytes(self.hidden_size)

    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return encode_reference(rows, self.largest)

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        return decode_reference(encoded, self.hidden_size, self.dtype, self.largest)

    def encode_into(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> None:
        from . import scaled_triton

        if len(rows):
            scaled_triton.encode_launch(rows, encoded, ok, self.largest).run()

    def decode_into(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        from . import scaled_triton

        if len(rows):
            scaled_triton.decode_launch(encoded, rows, self.largest).run()


class Int8Codec(ScaledCodec):
    name = "int8"
    largest = INT8_LARGEST


class Fp8Codec(ScaledCodec):
    name = "fp8"
    largest = FP8_LARGEST


def encode_reference(rows: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode ``rows`` (``[n, d]``): uint8 ``[n, row_bytes]`` and ok, bool ``[n]``.

    Args:
        largest: Value of the largest code; it tells the two codecs apart.
    """
    values = rows.float()
    amax = values.abs().amax(1)
    usable = (amax >= SMALLEST) & (amax <= GREATEST)  # neither of them for a NaN
    amax = torch.where(usable, amax, 0.0)
    limit = torch.full_like(amax, largest)  # torch multiplies by reciprocals of Python's floats
    inverse = torch.where(usable, limit / amax, 0.0)
    values = torch.where(usable[:, None], values, 0.0)
    scaled = (values * inverse[:, None]).clamp(-largest, largest)
    if largest == INT8_LARGEST:
        codes = scaled.round().to(torch.int8)
    else:
        codes = scaled.to(torch.float8_e4m3fn)
    encoded = torch.zeros((len(rows), row_bytes(rows.shape[1])), dtype=torch.uint8)
    encoded[:, : rows.shape[1]] = codes.view(torch.uint8)
    encoded[:, -4:] = (amax / limit)[:, None].view(torch.uint8)
    return encoded, usable | (rows == 0).all(1)


def decode_reference(
    encoded: torch.Tensor, hidden_size: int, dtype: torch.dtype, largest: float
) -> torch.Tensor:
    """Decode uint8 ``[n, row_bytes]`` to ``dtype`` ``[n, hidden_size]``."""
    kind = torch.int8 if largest == INT8_LARGEST else torch.float8_e4m3fn
    codes = encoded[:, :hidden_size].contiguous().view(kind)
    scale = encoded[:, -4:].contiguous().view(torch.float32)
    return (codes.float() * scale).to(dtype)
