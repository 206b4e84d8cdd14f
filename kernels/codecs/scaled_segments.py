"""``int8`` and ``fp8`` of K and V: lossy, 0.51 of the bytes of 16-bit types in pages of 64 tokens.

Channels of K are of very different scales, tokens of V are: values in one *line* share a scale. A
line of K is a channel, over all tokens of a unit; a line of V is one head of a token. An encoded
unit of ``n`` values is

- ``n`` codes in the order of the values: integers up to 127, or e4m3 up to 448;
- zeros, so that the length is a multiple of 16;
- the largest magnitude of every line in the type of K and V: channel by channel, or token by token
  and there head by head.

A value comes back as ``code * magnitude * (1 / 127)``, or ``1 / 448``, computed in float32 and
rounded to the type: within 1/254 of the line's largest magnitude with ``int8``, within 1/16 of
itself with ``fp8``. The largest one comes back as it is; so what was decoded has the same bytes
when it is encoded again, unless it falls among the denormals of its type.

A page does not fit when a value is not finite, or when the largest magnitude of a line is neither 0
nor between 2**-100 and 2**100: products would leave float32.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from ..launch import Launch
from .base import UnsupportedRows
from .exp4 import Cut, in_plane
from .scaled import (
    FP8_LARGEST,
    GREATEST,
    GREATEST_BITS,
    INT8_LARGEST,
    SMALLEST,
    SMALLEST_BITS,
    nearest_code,
    nearest_codes,
    value_of_code,
    values_of_codes,
)
from .segments import SegmentCodec

_BLOCK_VALUES = 2048
_LONGEST = 1024
"""Values of a line: one program holds it."""
_THREAD_VALUES = 16


class ScaledSegments(SegmentCodec):
    """What ``int8`` and ``fp8`` share: bfloat16 or float16 of any width."""

    lossless = False
    largest: ClassVar[float]

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        super().__init__(cut, dim, dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedRows(
                f"codec {self.name!r} takes K and V in bfloat16 or float16, not {dtype}"
            )
        if cut.width % dim:
            raise UnsupportedRows(
                f"codec {self.name!r} takes groups of whole heads, not {cut.width} values of heads "
                f"of {dim}"
            )
        lengths = cut.tokens, dim
        if max(lengths) > _LONGEST:
            raise UnsupportedRows(
                f"codec {self.name!r} takes at most {_LONGEST} tokens per unit and values per "
                f"head, not {cut.tokens} and {dim}"
            )
        self._lines = cut.width, cut.values // dim
        k_bytes, v_bytes = (-(-(cut.values + 2 * lines) // 16) * 16 for lines in self._lines)
        self.unit_bytes = k_bytes, v_bytes
        self._spans = [triton.next_power_of_2(length) for length in lengths]
        self._at_once = [max(1, _BLOCK_VALUES // span) for span in self._spans]
        blocks = map(triton.cdiv, self._lines, self._at_once)
        self.flags = cut.units * sum(blocks)

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._in_lines(units.float())
        parts = self._encoded(k, 2, 0), self._encoded(v, 4, 1)
        encoded, fits = zip(*parts, strict=True)
        return torch.cat(encoded, dim=1), torch.stack(fits).all(0)

    def is_code_of(self, encoded: torch.Tensor, plain: torch.Tensor, decoded: torch.Tensor) -> bool:
        cut, info = self.cut, torch.finfo(self.dtype)
        shape = (1, 2, cut.units, cut.tokens, cut.width)
        units, back = (part.view(self.dtype).view(shape) for part in (plain, decoded))
        if not torch.equal(self.encode_units(units)[0][0], encoded):
            return False
        found, exact = (self._in_lines(values.float()) for values in (back, units))
        for got, want, along in zip(found, exact, (2, 4), strict=True):
            bound = self._bound(want.abs(), want.abs().amax(along, keepdim=True))
            bound += info.eps * (want.abs() + info.smallest_normal)  # of rounding to the type
            if not bool(((got - want).abs() <= bound).all()):
                return False
        return True

    @abstractmethod
    def _bound(self, magnitudes: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """The largest error of values, by their magnitudes and the largest ones of their lines."""

    def _in_lines(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K, whose lines are those along dimension 2, and V, whose are those along dimension 4."""
        k, v = units.unbind(1)
        return k, v.unflatten(3, (-1, self.dim))

    def _encoded(
        self, values: torch.Tensor, along: int, part: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Units of K (``part`` 0) or V, whose lines are those ``along`` a dimension."""
        most = values.abs().amax(along, keepdim=True)
        usable = (most >= SMALLEST) & (most <= GREATEST)  # neither of them for a NaN
        fits = (usable | (values == 0).all(along, keepdim=True)).flatten(1).all(1)
        most = torch.where(usable, most, 0.0)
        # A tensor: torch multiplies by reciprocals of Python's floats.
        inverse = torch.where(usable, torch.full_like(most, self.largest) / most, 0.0)
        codes = nearest_codes(torch.where(usable, values, 0.0) * inverse, self.largest)
        shape = (*values.shape[:2], self.unit_bytes[part])
        encoded = torch.zeros(shape, dtype=torch.uint8)
        encoded[..., : self.cut.values] = codes.flatten(2)
        scales = most.to(self.dtype).flatten(2).contiguous().view(torch.uint8)
        encoded[..., -scales.shape[2] :] = scales
        return encoded.flatten(1), fits

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        cut = self.cut
        k, v = encoded.split([cut.units * size for size in self.unit_bytes], dim=1)
        heads = cut.width // self.dim
        parts = (
            self._decoded(k, (cut.tokens, cut.width), (1, cut.width)),
            self._decoded(v, (cut.tokens, heads, self.dim), (cut.tokens, heads, 1)).flatten(3),
        )
        return torch.stack(parts, dim=1)

    def _decoded(
        self, encoded: torch.Tensor, unit: tuple[int, ...], lines: tuple[int, ...]
    ) -> torch.Tensor:
        """Units of K or V, of that shape, whose scales have the shape ``lines``."""
        units = encoded.unflatten(1, (self.cut.units, -1))
        values = values_of_codes(units[..., : self.cut.values], self.largest).unflatten(2, unit)
        scales = units[..., -2 * math.prod(lines) :].contiguous().view(self.dtype)
        return (values * scales.float().unflatten(2, lines) * (1 / self.largest)).to(self.dtype)

    def encode_launch(
        self,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        memory: torch.Tensor,
        pages: torch.Tensor,
        offset: int,
        fits: torch.Tensor,
    ) -> Launch:
        return self._launch(
            encode_kernel,
            len(items) * self.flags,
            max(a * b for a, b in zip(self._spans, self._at_once, strict=True)),
            planes,
            items,
            memory=memory,
            pages=pages,
            page_bytes=memory.shape[1],
            offset=offset,
            fits=fits.view(torch.uint8),
            K_SPAN=self._spans[0],
            V_SPAN=self._spans[1],
            K_AT_ONCE=self._at_once[0],
            V_AT_ONCE=self._at_once[1],
            LARGEST=self.largest,
        )

    def decode_launch(
        self, encoded: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> Launch:
        block = min(_BLOCK_VALUES, triton.next_power_of_2(self.cut.values))
        blocks = triton.cdiv(self.cut.values, block)
        return self._launch(
            decode_kernel,
            len(items) * 2 * self.cut.units * blocks,
            block,
            planes,
            items,
            encoded=encoded,
            INVERSE=1 / self.largest,
            BLOCK=block,
        )

    def _launch(
        self,
        kernel: Any,
        programs: int,
        block: int,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        **arguments: Any,
    ) -> Launch:
        arguments |= {
            "k": planes[0],
            "v": planes[1],
            "items": items,
            "GROUPS": self.cut.groups,
            "PIECES": self.cut.pieces,
            "TOKENS": self.cut.tokens,
            "WIDTH": self.cut.width,
            "DIM": self.dim,
            "K_BYTES": self.unit_bytes[0],
            "V_BYTES": self.unit_bytes[1],
            "FP8": self.largest == FP8_LARGEST,
        }
        warps = max(1, min(8, block // (32 * _THREAD_VALUES)))
        return Launch(kernel, (programs,), arguments, warps, stages=1)


class Int8Segments(ScaledSegments):
    name = "int8"
    largest = INT8_LARGEST

    def _bound(self, magnitudes: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        return most.expand_as(magnitudes) / 254


class Fp8Segments(ScaledSegments):
    name = "fp8"
    largest = FP8_LARGEST

    def _bound(self, magnitudes: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        return torch.maximum(magnitudes / 16, most / 448 / 1024)


@triton.jit
def _first_value(
    items,
    item,
    unit,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where the values of a unit begin in its plane."""
    page = tl.load(items + item).to(tl.int64)
    token = (page * PIECES + unit % PIECES) * TOKENS
    return (token * GROUPS + unit // PIECES) * WIDTH


@triton.jit
def encode_kernel(
    k,  # floats [all items, PIECES * TOKENS * GROUPS * WIDTH]
    v,
    items,  # int64 [p]
    memory,  # uint8 [all pages, page_bytes]
    pages,  # int64 [p]
    fits,  # uint8 [p, all blocks of lines of an item]
    page_bytes,
    offset,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_SPAN: tl.constexpr,
    V_SPAN: tl.constexpr,
    K_AT_ONCE: tl.constexpr,
    V_AT_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
):
    UNITS: tl.constexpr = GROUPS * PIECES
    HEADS: tl.constexpr = TOKENS * (WIDTH // DIM)
    K_BLOCKS: tl.constexpr = (WIDTH + K_AT_ONCE - 1) // K_AT_ONCE
    V_BLOCKS: tl.constexpr = (HEADS + V_AT_ONCE - 1) // V_AT_ONCE
    number = tl.program_id(0)
    item = (number // (UNITS * (K_BLOCKS + V_BLOCKS))).to(tl.int64)
    part = number % (UNITS * (K_BLOCKS + V_BLOCKS))
    target = memory + tl.load(pages + item).to(tl.int64) * page_bytes + offset
    if part < UNITS * K_BLOCKS:
        unit, block = part // K_BLOCKS, part % K_BLOCKS
        first = _first_value(items, item, unit, GROUPS, PIECES, TOKENS, WIDTH)
        channel = block * K_AT_ONCE + tl.arange(0, K_AT_ONCE)
        token = tl.arange(0, K_SPAN)[None, :]
        fit = _encode_lines(
            k + first + channel[:, None] + token * (GROUPS * WIDTH),
            target + unit * K_BYTES,
            channel[:, None] + token * WIDTH,
            (channel < WIDTH)[:, None] & (token < TOKENS),
            channel,
            WIDTH,
            TOKENS * WIDTH,
            K_BYTES,
            block == 0,
            LARGEST,
            FP8,
        )
    else:
        part -= UNITS * K_BLOCKS
        unit, block = part // V_BLOCKS, part % V_BLOCKS
        first = _first_value(items, item, unit, GROUPS, PIECES, TOKENS, WIDTH)
        head = block * V_AT_ONCE + tl.arange(0, V_AT_ONCE)
        value = tl.arange(0, V_SPAN)[None, :]
        at = (head * DIM)[:, None] + value
        fit = _encode_lines(
            v + first + in_plane(at, GROUPS, WIDTH),
            target + UNITS * K_BYTES + unit * V_BYTES,
            at,
            (head < HEADS)[:, None] & (value < DIM),
            head,
            HEADS,
            TOKENS * WIDTH,
            V_BYTES,
            block == 0,
            LARGEST,
            FP8,
        )
    tl.store(fits + number, fit.to(tl.uint8))


@triton.jit
def _encode_lines(
    source,  # pointers [lines, span]
    encoded,  # the unit's first byte
    at,  # which values of the unit, [lines, span]
    inside,
    line,  # which lines of the unit, [lines]
    LINES: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    first,  # whether these are the first ones of the unit
    LARGEST: tl.constexpr,
    FP8: tl.constexpr,
):
    """Encode lines of a unit; whether they fit, 0 or 1."""
    loaded = tl.load(source, mask=inside, other=0.0)
    value = loaded.to(tl.float32)
    # Magnitudes are in the order of their bits; infinity and NaN stand above all others.
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    usable = (bits >= SMALLEST_BITS) & (bits <= GREATEST_BITS)
    most = tl.where(usable, bits, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, tl.div_rn(LARGEST, tl.where(usable, most, 1.0)), 0.0)
    scaled = tl.where(usable[:, None], value, 0.0) * inverse[:, None]
    tl.store(encoded + at, nearest_code(scaled, LARGEST, FP8).to(tl.uint8), mask=inside)
    scales = (encoded + (BYTES - 2 * LINES)).to(tl.pointer_type(loaded.dtype))
    tl.store(scales + line, most.to(loaded.dtype), mask=line < LINES)
    gap = VALUES + tl.arange(0, 16)
    tl.store(encoded + gap, tl.zeros([16], tl.uint8), mask=(gap < BYTES - 2 * LINES) & first)
    return tl.min((usable | (bits == 0)).to(tl.int32), 0)


@triton.jit
def decode_kernel(
    encoded,  # uint8 [p, GROUPS * PIECES * (K_BYTES + V_BYTES)]
    k,  # floats [all items, PIECES * TOKENS * GROUPS * WIDTH]
    v,
    items,  # int64 [p]
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    INVERSE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    UNITS: tl.constexpr = GROUPS * PIECES
    VALUES: tl.constexpr = TOKENS * WIDTH
    BLOCKS: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    item, unit = (number // (2 * UNITS)).to(tl.int64), number % (2 * UNITS)
    encoded += item * (UNITS * (K_BYTES + V_BYTES))
    first = _first_value(items, item, unit % UNITS, GROUPS, PIECES, TOKENS, WIDTH)
    at = block * BLOCK + tl.arange(0, BLOCK)
    place, inside = first + in_plane(at, GROUPS, WIDTH), at < VALUES
    dtype = k.dtype.element_ty
    if unit < UNITS:
        encoded += unit * K_BYTES
        scales = (encoded + (K_BYTES - 2 * WIDTH)).to(tl.pointer_type(dtype))
        most = tl.load(scales + at % WIDTH, mask=inside, other=0.0)
        tl.store(k + place, _decoded(encoded + at, inside, most, INVERSE, FP8), mask=inside)
    else:
        encoded += UNITS * K_BYTES + (unit - UNITS) * V_BYTES
        scales = (encoded + (V_BYTES - 2 * (VALUES // DIM))).to(tl.pointer_type(dtype))
        most = tl.load(scales + at // DIM, mask=inside, other=0.0)
        tl.store(v + place, _decoded(encoded + at, inside, most, INVERSE, FP8), mask=inside)


@triton.jit
def _decoded(codes, inside, most, INVERSE: tl.constexpr, FP8: tl.constexpr):
    """Values of codes whose lines have these largest magnitudes, in the type of these."""
    code = tl.load(codes, mask=inside, other=0).to(tl.int32)
    return (value_of_code(code, FP8) * most.to(tl.float32) * INVERSE).to(most.dtype)
