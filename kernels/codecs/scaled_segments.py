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

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import triton

from ..launch import Launch
from ..layers import ONE_LAYER, LayerTable
from .base import UnsupportedRows
from .exp4 import Cut
from .scaled import FP8_LARGEST, GREATEST, INT8_LARGEST, SMALLEST, nearest_codes, values_of_codes
from .scaled_segment_kernels import decode_kernel, encode_kernel
from .segment_codecs import SegmentCodec

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

    def _stands_for(self, encoded: torch.Tensor, units: torch.Tensor, back: torch.Tensor) -> bool:
        """As for other codecs, or the reference encodes the units to the pages, which come back as
        near to them as :meth:`_bound` says."""
        if super()._stands_for(encoded, units, back):
            return True
        if not torch.equal(self.encode_units(units)[0], encoded):
            return False
        info = torch.finfo(self.dtype)
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
        encoded = torch.zeros(shape, dtype=torch.uint8, device=values.device)
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
        layers: LayerTable | None = None,
        slots: int = 1,
    ) -> Launch:
        return self._launch(
            encode_kernel,
            len(pages) * self.flags,
            max(a * b for a, b in zip(self._spans, self._at_once, strict=True)),
            layers,
            slots,
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
        self,
        encoded: torch.Tensor,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        layers: LayerTable | None = None,
        slots: int = 1,
    ) -> Launch:
        block = min(_BLOCK_VALUES, triton.next_power_of_2(self.cut.values))
        blocks = triton.cdiv(self.cut.values, block)
        return self._launch(
            decode_kernel,
            encoded.shape[-2] * 2 * self.cut.units * blocks,
            block,
            layers,
            slots,
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
        layers: LayerTable | None,
        slots: int,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        **arguments: Any,
    ) -> Launch:
        arguments |= {
            "k": planes[0],
            "v": planes[1],
            "items": items,
            **(ONE_LAYER if layers is None else layers.arguments()),
            "ALIGNED": 1 if layers is None else layers.aligned,
            "SLOTS": slots,
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
        grid = (programs, 1 if layers is None else len(layers))
        return Launch(kernel, grid, arguments, warps, stages=1)


class Int8Segments(ScaledSegments):
    name = code = "int8"
    largest = INT8_LARGEST

    def _bound(self, magnitudes: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        return most.expand_as(magnitudes) / 254


class Fp8Segments(ScaledSegments):
    name = code = "fp8"
    largest = FP8_LARGEST

    def _bound(self, magnitudes: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        return torch.maximum(magnitudes / 16, most / 448 / 1024)
