"""``int8`` and ``fp8``: lossy, one float32 scale for each row.

An encoded row is ``d`` codes, zeros, and the scale in its last four bytes: ``amax / 127`` or
``amax / 448``; its length is a multiple of 16. A value comes back as ``code * scale``. A row is not
ok when a value is not finite, or when its largest magnitude is neither 0 nor between 2**-100 and
2**100: scale or product would leave float32.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from ..launch import Launch, block_launch
from .base import Codec, UnsupportedRows

SMALLEST, GREATEST = 2.0**-100, 2.0**100
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)
GREATEST_BITS = tl.constexpr((127 + 100) << 23)
INT8_LARGEST = 127.0
FP8_LARGEST = 448.0
_MOST_VALUES = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ScaledCodec(Codec):
    """What ``int8`` and ``fp8`` share: rows of float32, bfloat16 or float16, of any width."""

    lossless = False
    largest: ClassVar[float]

    def _row_bytes(self) -> int:
        if self.dtype not in _DTYPES:
            names = ", ".join(str(dtype) for dtype in _DTYPES)
            raise UnsupportedRows(f"codec {self.name!r} takes {names}, not {self.dtype}")
        return (self.hidden_size + 4 + 15) // 16 * 16

    def encode_reference(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows.float()
        amax = values.abs().amax(1)
        usable = (amax >= SMALLEST) & (amax <= GREATEST)  # neither of them for a NaN
        amax = torch.where(usable, amax, 0.0)
        # A tensor: torch multiplies by reciprocals of Python's floats.
        limit = torch.full_like(amax, self.largest)
        inverse = torch.where(usable, limit / amax, 0.0)
        values = torch.where(usable[:, None], values, 0.0)
        encoded = torch.zeros((len(rows), self.row_bytes), dtype=torch.uint8)
        encoded[:, : self.hidden_size] = nearest_codes(values * inverse[:, None], self.largest)
        encoded[:, -4:] = (amax / limit)[:, None].view(torch.uint8)
        return encoded, usable | (rows == 0).all(1)

    def decode_reference(self, encoded: torch.Tensor) -> torch.Tensor:
        values = values_of_codes(encoded[:, : self.hidden_size], self.largest)
        scale = encoded[:, -4:].contiguous().view(torch.float32)
        return (values * scale).to(self.dtype)

    def encode_launch(self, rows: torch.Tensor, encoded: torch.Tensor, ok: torch.Tensor) -> Launch:
        only = {"ok": ok.view(torch.uint8), "LARGEST": self.largest}
        return self._launch(encode_kernel, rows=rows, encoded=encoded, **only)

    def decode_launch(self, encoded: torch.Tensor, rows: torch.Tensor) -> Launch:
        return self._launch(decode_kernel, rows=rows, encoded=encoded)

    def _launch(self, kernel: Any, rows: torch.Tensor, **arguments: Any) -> Launch:
        return block_launch(
            kernel,
            grid=(len(rows),),
            block=min(_MOST_VALUES, triton.next_power_of_2(self.hidden_size)),
            warp_values=512,
            rows=rows,
            **arguments,
            WIDTH=self.hidden_size,
            ROW_BYTES=self.row_bytes,
            FP8=self.largest == FP8_LARGEST,
        )


class Int8Codec(ScaledCodec):
    name = code = "int8"
    largest = INT8_LARGEST


class Fp8Codec(ScaledCodec):
    name = code = "fp8"
    largest = FP8_LARGEST


def nearest_codes(scaled: torch.Tensor, largest: float) -> torch.Tensor:
    """Codes (uint8) of the integers, or the values of e4m3, that are nearest to float32 values.

    ``largest`` is that of the code, :data:`INT8_LARGEST` or :data:`FP8_LARGEST`; what is beyond it
    gets the code of it.
    """
    scaled = scaled.clamp(-largest, largest)
    if largest == INT8_LARGEST:
        return scaled.round().to(torch.int8).view(torch.uint8)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def values_of_codes(codes: torch.Tensor, largest: float) -> torch.Tensor:
    """The float32 values that codes (uint8) stand for."""
    kind = torch.int8 if largest == INT8_LARGEST else torch.float8_e4m3fn
    return codes.contiguous().view(kind).float()


@triton.jit
def encode_kernel(
    rows,  # floats [n, WIDTH]
    encoded,  # uint8 [n, ROW_BYTES]
    ok,  # uint8 [n]
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * WIDTH
    encoded += row * ROW_BYTES
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(rows + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        # Magnitudes are in the order of their bits; infinity and NaN stand above all others.
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(most, 0)
    usable = (bits >= SMALLEST_BITS) & (bits <= GREATEST_BITS)
    amax = tl.where(usable, bits, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, LARGEST)
    inverse = tl.where(usable, tl.div_rn(LARGEST, tl.where(usable, amax, 1.0)), 0.0)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(rows + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        code = nearest_code(tl.where(usable, value, 0.0) * inverse, LARGEST, FP8)
        tl.store(encoded + at, code.to(tl.uint8), mask=at < WIDTH)
    gap = WIDTH + tl.arange(0, 16)
    tl.store(encoded + gap, tl.zeros([16], tl.uint8), mask=gap < ROW_BYTES - 4)
    tl.store((encoded + ROW_BYTES - 4).to(tl.pointer_type(tl.float32)), scale)
    tl.store(ok + row, (usable | (bits == 0)).to(tl.uint8))


@triton.jit
def nearest_code(scaled, LARGEST: tl.constexpr, FP8: tl.constexpr):
    """See :func:`nearest_codes`: int32, of which the last 8 bits are the code."""
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)  # so not fused with what rounds it
    return _to_fp8(scaled) if FP8 else _to_int8(scaled)


# Both work on the bits of float32: rounding to nearest even has no portable name, and a GPU's own
# conversion to fp8 begins with sm_89.
@triton.jit
def _to_int8(value):
    """Nearest integer of ``value`` (float32, at most 127), ties to even, in the last 8 bits."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 * 2**23


@triton.jit
def _to_fp8(value):
    """Code of e4m3 nearest to ``value`` (float32, at most 448), ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    sign, magnitude = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9: the unit of the last bit of numbers near 2**14.
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(magnitude < (121 << 23), small, normal) | sign


@triton.jit
def decode_kernel(
    encoded,  # uint8 [n, ROW_BYTES]
    rows,  # floats [n, WIDTH]
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    encoded += row * ROW_BYTES
    rows += row * WIDTH
    scale = tl.load((encoded + ROW_BYTES - 4).to(tl.pointer_type(tl.float32)))
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        code = tl.load(encoded + at, mask=at < WIDTH, other=0).to(tl.int32)
        value = (value_of_code(code, FP8) * scale).to(rows.dtype.element_ty)
        tl.store(rows + at, value, mask=at < WIDTH)


@triton.jit
def value_of_code(code, FP8: tl.constexpr):
    """The float32 value that a code (int32, 0 to 255) stands for."""
    if FP8:
        # The fields of e4m3 in those of float32; only the exponents' biases differ.
        bits = (code & 0x7F) << 20 | (code & 0x80) << 24
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    else:
        value = (code << 24 >> 24).to(tl.float32)
    return value
