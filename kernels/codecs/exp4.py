"""``exp4``: lossless for bfloat16, 0.77 of its bytes (the idea of SplitZip, arXiv 2605.01708).

Of the 16 bits of a bfloat16 value, sign and mantissa look random and the exponent does not: the
values of a row lie within a few binades. An encoded row is

- ``d`` bytes: sign (bit 7) and mantissa of each value;
- ``d / 2`` bytes: a 4-bit code for the exponent of each value, even positions in the low half;
- the tail: exceptions (their positions, 16 bits each, then their exponents, 8 bits each), the base
  byte, and zeros up to a multiple of 8.

Code 0 means exponent 0: sums of bfloat16 numbers are often exactly zero, one in a thousand in a
residual stream. Code ``c`` from 1 to 15 means exponent ``base + c``: a window of 15 consecutive
exponents, chosen **for each row** so that the fewest of its values fall outside. A table for a
whole layer would not do: what the norm makes of attention-sink tokens has quite another scale than
all other rows, so the first page of every conversation would overflow, and with it the whole
conversation would go unstored: a radix node is stored only when every row of it is, and its
descendants only after it.

Values outside both are exceptions. A row with more of them than the tail holds is not ok:
it is not stored, never truncated. Entries of the list that are not needed repeat the exponent of
position 0, so that decoding applies them all without looking.
"""

from __future__ import annotations

import torch

from .base import Codec, UnsupportedRows

WINDOW = 15
_MOST_VALUES = 1 << 16


def tail_bytes(hidden_size: int) -> int:
    """Bytes behind the codes: what 0.77 leaves of the row, in whole words of 8 bytes."""
    return max(8, hidden_size // 25 // 8 * 8)


def most_exceptions(hidden_size: int) -> int:
    """Values of a row that may lie outside its window."""
    return (tail_bytes(hidden_size) - 1) // 3


class Exp4Codec(Codec):
    """Rows of bfloat16, width a multiple of 16, at most 65536."""

    name = "exp4"
    lossless = True

    def _row_bytes(self) -> int:
        if self.dtype != torch.bfloat16:
            raise UnsupportedRows(f"codec 'exp4' takes bfloat16 hidden states, not {self.dtype}")
        if self.hidden_size % 16 or not 16 <= self.hidden_size <= _MOST_VALUES:
            raise UnsupportedRows(
                f"codec 'exp4' takes a hidden size that is a multiple of 16 and at most "
                f"{_MOST_VALUES}, not {self.hidden_size}"
            )
        return self.hidden_size * 3 // 2 + tail_bytes(self.hidden_size)

    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return encode_reference(rows)

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        return decode_reference(encoded, self.hidden_size)

    def encode_into(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> None:
        from . import exp4_triton

        if len(rows):
            exp4_triton.encode_launch(rows, encoded, ok).run()

    def decode_into(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        from . import exp4_triton

        if len(rows):
            exp4_triton.decode_launch(encoded, rows).run()


def encode_reference(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode bfloat16 ``rows`` (``[n, d]``): uint8 ``[n, row_bytes]`` and ok, bool ``[n]``."""
    n, d = rows.shape
    most = most_exceptions(d)
    bits = rows.view(torch.int16).to(torch.int32)
    exponents = bits >> 7 & 0xFF
    base = _best_window(exponents)
    codes = exponents - base[:, None]
    inside = (codes >= 1) & (codes <= WINDOW)
    codes = codes.masked_fill(~inside, 0).to(torch.uint8)
    outside = ~inside & (exponents > 0)

    positions = torch.zeros((n, most), dtype=torch.int32)
    values = exponents[:, :1].repeat(1, most)
    ranks = outside.cumsum(1) - 1
    row, position = (outside & (ranks < most)).nonzero(as_tuple=True)
    positions[row, ranks[row, position]] = position.to(torch.int32)
    values[row, ranks[row, position]] = exponents[row, position]

    tail = torch.zeros((n, tail_bytes(d)), dtype=torch.uint8)
    tail[:, 0 : 2 * most : 2] = positions.to(torch.uint8)
    tail[:, 1 : 2 * most : 2] = (positions >> 8).to(torch.uint8)
    tail[:, 2 * most : 3 * most] = values.to(torch.uint8)
    tail[:, 3 * most] = base.to(torch.uint8)
    sign_mantissa = (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)
    encoded = torch.cat([sign_mantissa, codes[:, 0::2] | codes[:, 1::2] << 4, tail], dim=1)
    return encoded, outside.sum(1) <= most


def decode_reference(encoded: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """Decode uint8 ``[n, row_bytes]`` to bfloat16 ``[n, hidden_size]``."""
    n, d, most = len(encoded), hidden_size, most_exceptions(hidden_size)
    sign_mantissa, packed, tail = encoded.to(torch.int32).split([d, d // 2, tail_bytes(d)], dim=1)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=2).view(n, d)
    exponents = torch.where(codes > 0, codes + tail[:, 3 * most, None], 0)
    positions = tail[:, 0 : 2 * most : 2] | tail[:, 1 : 2 * most : 2] << 8
    exponents.scatter_(1, positions.long(), tail[:, 2 * most : 3 * most])
    bits = (sign_mantissa & 0x80) << 8 | exponents << 7 | sign_mantissa & 0x7F
    return bits.to(torch.int16).view(torch.bfloat16)


def _best_window(exponents: torch.Tensor) -> torch.Tensor:
    """Exponent below the window that holds most values of a row; the lowest of equals.

    ``exponents`` is int32 ``[n, d]``, the result ``[n]``.
    """
    histogram = torch.zeros((len(exponents), 256), dtype=torch.int32)
    histogram.scatter_add_(1, exponents.long(), torch.ones_like(exponents))
    up_to = histogram.cumsum(1)
    return (up_to[:, WINDOW:] - up_to[:, :-WINDOW]).argmax(1).to(torch.int32)
