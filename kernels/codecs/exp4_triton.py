"""``exp4`` in Triton; the same bytes as the reference in :mod:`hcache_kernels.codecs.exp4`.

Values are handled in pairs: one 32-bit word of two bfloat16 values becomes 16 bits of sign and
mantissa and 8 bits of codes, so nothing moves between threads.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import Launch
from .exp4 import most_exceptions, tail_bytes

_ENCODE_PAIRS = 1024  # more take all registers of a thread
_DECODE_PAIRS = 2048


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


def encode_launch(rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> Launch:
    """Encode contiguous bfloat16 rows into uint8 ``[n, row_bytes]`` and ``ok``, bool ``[n]``."""
    arguments = {
        "rows": rows.view(torch.int32),
        "encoded": encoded,
        "ok": ok.view(torch.uint8),
    }
    return _launch(encode_kernel, rows, arguments, _ENCODE_PAIRS)


def decode_launch(encoded: torch.Tensor, rows: torch.Tensor) -> Launch:
    """Decode contiguous uint8 ``[n, row_bytes]`` into bfloat16 ``rows``, ``[n, hidden_size]``."""
    arguments = {"encoded": encoded, "rows": rows.view(torch.int32)}
    return _launch(decode_kernel, rows, arguments, _DECODE_PAIRS)


def _launch(kernel: Any, rows: torch.Tensor, arguments: dict[str, Any], most_pairs: int) -> Launch:
    n, hidden_size = rows.shape
    pairs = hidden_size // 2
    block = min(most_pairs, triton.next_power_of_2(pairs))
    sizes = {
        "PAIRS": pairs,
        "ROW_BYTES": 3 * pairs + tail_bytes(hidden_size),
        "MOST": most_exceptions(hidden_size),
        "LIST": triton.next_power_of_2(most_exceptions(hidden_size)),
        "BLOCK": block,
    }
    warps = max(1, min(4, block // 256))
    return Launch(kernel, (n,), arguments | sizes, warps, stages=1)
