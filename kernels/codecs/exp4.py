"""``exp4``: lossless for bfloat16, 0.77 of its bytes (docs/options.md). An encoded row is

- ``d`` bytes: sign (bit 7) and mantissa of each value;
- ``d / 2`` bytes: a 4-bit code for the exponent of each value, even positions in the low half;
- the tail: exceptions (their positions, 16 bits each, then their exponents, 8 bits each), the base
  byte, and zeros up to a multiple of 8.

Code 0 means exponent 0, code ``c`` from 1 to 15 exponent ``base + c``; all other values are
exceptions. Entries of their list that are not needed repeat the exponent of position 0.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import Launch, block_launch
from .base import Codec, UnsupportedRows

WINDOW = 15
_MOST_VALUES = 1 << 16
_ENCODE_PAIRS = 1024  # more take all registers of a thread
_DECODE_PAIRS = 2048


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

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        n, d, most = len(encoded), self.hidden_size, most_exceptions(self.hidden_size)
        sign_mantissa, packed, tail = encoded.to(torch.int32).split(
            [d, d // 2, tail_bytes(d)], dim=1
        )
        codes = torch.stack([packed & 0xF, packed >> 4], dim=2).view(n, d)
        exponents = torch.where(codes > 0, codes + tail[:, 3 * most, None], 0)
        positions = tail[:, 0 : 2 * most : 2] | tail[:, 1 : 2 * most : 2] << 8
        exponents.scatter_(1, positions.long(), tail[:, 2 * most : 3 * most])
        bits = (sign_mantissa & 0x80) << 8 | exponents << 7 | sign_mantissa & 0x7F
        return bits.to(torch.int16).view(torch.bfloat16)

    def encode_launch(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> Launch:
        ok = ok.view(torch.uint8)
        return self._launch(encode_kernel, _ENCODE_PAIRS, rows, encoded=encoded, ok=ok)

    def decode_launch(self, encoded: torch.Tensor, rows: torch.Tensor) -> Launch:
        return self._launch(decode_kernel, _DECODE_PAIRS, rows, encoded=encoded)

    def _launch(
        self, kernel: Any, most_pairs: int, rows: torch.Tensor, **buffers: torch.Tensor
    ) -> Launch:
        pairs, most = self.hidden_size // 2, most_exceptions(self.hidden_size)
        return block_launch(
            kernel,
            grid=(len(rows),),
            block=min(most_pairs, triton.next_power_of_2(pairs)),
            warp_values=256,
            rows=rows.view(torch.int32),
            **buffers,
            PAIRS=pairs,
            ROW_BYTES=self.row_bytes,
            MOST=most,
            LIST=triton.next_power_of_2(most),
        )


def _best_window(exponents: torch.Tensor) -> torch.Tensor:
    """Exponent ``[n]`` below the window that holds most of ``[n, d]``; the lowest of equals."""
    histogram = torch.zeros((len(exponents), 256), dtype=torch.int32)
    histogram.scatter_add_(1, exponents.long(), torch.ones_like(exponents))
    up_to = histogram.cumsum(1)
    return (up_to[:, WINDOW:] - up_to[:, :-WINDOW]).argmax(1).to(torch.int32)


# One word of two values becomes 16 bits of sign and mantissa and 8 bits of codes: nothing moves
# between threads.
@triton.jit
def encode_kernel(
    rows,  # int32 [n, PAIRS]: two bfloat16 values each
    encoded,  # uint8 [n, ROW_BYTES]
    ok,  # uint8 [n]
    PAIRS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * PAIRS
    encoded += row * ROW_BYTES
    halves = encoded.to(tl.pointer_type(tl.uint16))
    tail = encoded + 3 * PAIRS
    listed = tail.to(tl.pointer_type(tl.uint16))

    histogram = tl.zeros([256], tl.int32)
    for start in range(0, PAIRS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        pair = tl.load(rows + at, mask=at < PAIRS, other=0)
        histogram += tl.histogram(pair >> 7 & 0xFF, 256, mask=at < PAIRS)
        histogram += tl.histogram(pair >> 23 & 0xFF, 256, mask=at < PAIRS)
    exponent = tl.arange(0, 256)
    up_to = tl.cumsum(histogram, 0)
    window = tl.gather(up_to, tl.minimum(exponent + 15, 255), 0) - up_to
    base = tl.argmax(tl.where(exponent <= 240, window, -1), 0, tie_break_left=True)

    found = 0
    for start in range(0, PAIRS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < PAIRS
        pair = tl.load(rows + at, mask=inside, other=0)
        even, odd = pair >> 7 & 0xFF, pair >> 23 & 0xFF
        sign_mantissa = pair & 0x7F | pair >> 8 & 0x80 | pair >> 8 & 0x7F00 | pair >> 16 & 0x8000
        even_in = (even > base) & (even <= base + 15)
        odd_in = (odd > base) & (odd <= base + 15)
        codes = tl.where(even_in, even - base, 0) | tl.where(odd_in, odd - base, 0) << 4
        tl.store(halves + at, sign_mantissa.to(tl.uint16), mask=inside)
        tl.store(encoded + 2 * PAIRS + at, codes.to(tl.uint8), mask=inside)
        even_out = (even > 0) & ~even_in & inside
        odd_out = (odd > 0) & ~odd_in & inside
        outside = even_out.to(tl.int32) + odd_out.to(tl.int32)
        count = tl.sum(outside)
        if count > 0:  # few rows have any, and the scan is dear
            rank = found + tl.cumsum(outside, 0) - outside
            keep = even_out & (rank < MOST)
            tl.store(listed + rank, (2 * at).to(tl.uint16), mask=keep)
            tl.store(tail + 2 * MOST + rank, even.to(tl.uint8), mask=keep)
            rank += even_out.to(tl.int32)
            keep = odd_out & (rank < MOST)
            tl.store(listed + rank, (2 * at + 1).to(tl.uint16), mask=keep)
            tl.store(tail + 2 * MOST + rank, odd.to(tl.uint8), mask=keep)
        found += count

    entry = tl.arange(0, LIST)
    unused = (entry >= found) & (entry < MOST)
    first = tl.load(rows) >> 7 & 0xFF
    tl.store(listed + entry, tl.zeros([LIST], tl.uint16), mask=unused)
    tl.store(tail + 2 * MOST + entry, tl.zeros([LIST], tl.uint8) + first.to(tl.uint8), mask=unused)
    rest = 3 * MOST + tl.arange(0, 4)  # the base byte, then fewer than three of padding
    tl.store(
        tail + rest,
        tl.where(rest == 3 * MOST, base, 0).to(tl.uint8),
        mask=rest < ROW_BYTES - 3 * PAIRS,
    )
    tl.store(ok + row, (found <= MOST).to(tl.uint8))


@triton.jit
def decode_kernel(
    encoded,  # uint8: rows of ROW_BYTES
    rows,  # int32 [n, PAIRS]
    PAIRS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    encoded += row * ROW_BYTES
    rows += row * PAIRS
    tail = encoded + 3 * PAIRS
    base = tl.load(tail + 3 * MOST).to(tl.int32)
    for start in range(0, PAIRS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < PAIRS
        halves = encoded.to(tl.pointer_type(tl.uint16))
        half = tl.load(halves + at, mask=inside, other=0).to(tl.int32)
        codes = tl.load(encoded + 2 * PAIRS + at, mask=inside, other=0).to(tl.int32)
        even, odd = codes & 0xF, codes >> 4
        even = tl.where(even > 0, base + even, 0) << 7 | half & 0x7F | (half & 0x80) << 8
        odd = tl.where(odd > 0, base + odd, 0) << 23 | (half & 0x7F00) << 8 | (half & 0x8000) << 16
        tl.store(rows + at, even | odd, mask=inside)

    tl.debug_barrier()  # exceptions overwrite what other threads of this program stored
    entry = tl.arange(0, LIST)
    listed = tail.to(tl.pointer_type(tl.uint16))
    position = tl.load(listed + entry, mask=entry < MOST, other=0).to(tl.int32)
    inside = (entry < MOST) & (position < 2 * PAIRS)
    exponent = tl.load(tail + 2 * MOST + entry, mask=inside, other=0).to(tl.int32)
    byte = tl.load(encoded + position, mask=inside, other=0).to(tl.int32)
    value = byte & 0x7F | (byte & 0x80) << 8 | exponent << 7
    single = rows.to(tl.pointer_type(tl.uint16))
    tl.store(single + position, value.to(tl.uint16), mask=inside)
