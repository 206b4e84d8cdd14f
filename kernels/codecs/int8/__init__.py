"""``int8``: lossy, 0.51 of the bytes of 16-bit types in pages of 64 tokens.

Channels of K are of very different scales, tokens of V are: values in one *line* share a scale. A
line of K is a channel, over all tokens of a unit; a line of V is one head of a token; a row of
hidden states is one line. An encoded unit of ``n`` values is

- ``n`` codes in the order of the values: integers from -127 to 127;
- zeros, so that the length is a multiple of 16;
- the largest magnitude of every line in the type of the values: channel by channel, or token by
  token and there head by head.

A value comes back as ``code * magnitude * (1 / 127)``, computed in float32 and rounded to the type:
within 1/254 of the line's largest magnitude. In a 16-bit type the largest one comes back as it is.
So what was decoded has the same bytes when it is encoded again, unless it falls among the denormals
of its type.

An item does not fit when a value is not finite, or when the largest magnitude of a line is neither
0 nor between 2**-100 and 2**100: products would leave float32.
"""

from typing import NamedTuple

import torch
import triton

from ..codec import KV, LATENT, ROWS, Codec, Program, UnsupportedRows
from ..units import Cut
from .kernel import decode_kernel, encode_kernel
from .reference import LARGEST, encode_lines

_BLOCK_VALUES = 2048
_LONGEST = 1024  # values of a line of K or V: one program holds several lines
_THREAD_VALUES = 16
_KV_TYPES = (torch.bfloat16, torch.float16)
_ROW_TYPES = (torch.float32, *_KV_TYPES)


class Lines(NamedTuple):
    """The lines of a unit in one plane, for kernels."""

    number: int  # how many
    length: int  # values of one
    step: int  # from the first value of a line to that of the next one
    stride: int  # from a value of a line to the next one
    span: int  # values of a line that a program takes at once, a power of two
    at_once: int  # lines that a program takes
    scales: int  # where the magnitudes begin in an encoded unit
    size: int  # bytes of an encoded unit
    blocks: int  # programs of a unit


class Int8(Codec):
    """K and V in bfloat16 or float16 of any width; rows of hidden states in float32, too."""

    name = "int8"
    lossless = False

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        if planes == LATENT:  # whose error nobody has measured
            raise UnsupportedRows(f"codec {self.name!r} takes no latents of MLA")
        # ".2": pages of code "int8" have rows with a float32 scale in their last four bytes.
        self.code = f"{self.name}.2" if planes == ROWS else self.name
        what, types = ("hidden states", _ROW_TYPES) if planes == ROWS else ("K and V", _KV_TYPES)
        if dtype not in types:
            names = [str(each).removeprefix("torch.") for each in types]
            raise UnsupportedRows(
                f"codec {self.name!r} takes {what} in {', '.join(names[:-1])} or {names[-1]}, not "
                f"{dtype}"
            )
        if cut.width % dim:
            raise UnsupportedRows(
                f"codec {self.name!r} takes groups of whole heads, not {cut.width} values of heads "
                f"of {dim}"
            )
        if planes != ROWS and max(cut.tokens, dim) > _LONGEST:
            raise UnsupportedRows(
                f"codec {self.name!r} takes at most {_LONGEST} tokens per unit and values per "
                f"head, not {cut.tokens} and {dim}"
            )
        self.word = dtype
        self._lines = [self._lines_of(plane) for plane in planes]
        self.unit_bytes = tuple(lines.size for lines in self._lines)
        block = min(_BLOCK_VALUES, triton.next_power_of_2(cut.values))
        held = max(lines.span * lines.at_once for lines in self._lines)
        # Not in one record: Triton 3.6 takes none inside of others.
        code = {"FIRST": self._lines[0], "SECOND": self._lines[1] if len(planes) > 1 else None}
        per_item = cut.units * sum(lines.blocks for lines in self._lines)
        self.encoder = Program(encode_kernel, per_item, _warps(held), code)
        per_item = len(planes) * cut.units * -(-cut.values // block)
        self.decoder = Program(decode_kernel, per_item, _warps(block), {"BLOCK": block, **code})

    def _lines_of(self, plane: str) -> Lines:
        """Lines of a unit of plane ``k`` (a channel each) or of another plane (a head each)."""
        cut = self.cut
        if plane == "k":
            number, length, step, stride = cut.width, cut.tokens, 1, cut.width
        else:
            number, length, step, stride = cut.values // self.dim, self.dim, self.dim, 1
        span = min(_BLOCK_VALUES, triton.next_power_of_2(length))
        scales = number * self.dtype.itemsize
        size = -(-(cut.values + scales) // 16) * 16
        at_once = min(_BLOCK_VALUES // span, triton.next_power_of_2(number))
        blocks = -(-number // at_once)
        return Lines(number, length, step, stride, span, at_once, size - scales, size, blocks)

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode ``[p, planes, units, tokens, width]`` to uint8 ``[p, bytes]``; which items fit."""
        parts, fits = [], []
        for plane, lines, values in zip(self.planes, self._lines, units.unbind(1), strict=True):
            in_lines, along = self._in_lines(plane, values.float())
            codes, most, fit = encode_lines(in_lines, along)
            encoded = codes.new_zeros((*values.shape[:2], lines.size))
            encoded[..., : self.cut.values] = codes.flatten(2)
            scales = most.to(self.dtype).flatten(2).contiguous()
            encoded[..., lines.scales :] = scales.view(torch.uint8)
            parts.append(encoded.flatten(1))
            fits.append(fit.flatten(1).all(1))
        return torch.cat(parts, dim=1), torch.stack(fits).all(0)

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode uint8 ``[p, bytes]`` to ``[p, planes, units, tokens, width]``."""
        cut, planes = self.cut, []
        parts = encoded.split([cut.units * size for size in self.unit_bytes], dim=1)
        for plane, lines, part in zip(self.planes, self._lines, parts, strict=True):
            units = part.unflatten(1, (cut.units, -1))
            codes = units[..., : cut.values].contiguous().view(torch.int8).float()
            values, along = self._in_lines(plane, codes.unflatten(2, (cut.tokens, cut.width)))
            scales = units[..., lines.scales :].contiguous().view(self.dtype).float()
            scales = scales.view(*values.shape[:along], 1, *values.shape[along + 1 :])
            planes.append((values * scales * (1 / LARGEST)).to(self.dtype).flatten(2))
        return torch.stack(planes, dim=1).unflatten(3, (cut.tokens, cut.width))

    def _in_lines(self, plane: str, units: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Units ``[p, units, tokens, width]`` of a plane, and the dimension of its lines."""
        return (units, 2) if plane == "k" else (units.unflatten(3, (-1, self.dim)), 4)

    def _near(self, back: torch.Tensor, units: torch.Tensor) -> bool:
        """True if each decoded value is within half a step of its line, and rounding, of its own.
        ``back`` and ``units``: ``[p, planes, units, tokens, width]``."""
        info = torch.finfo(self.dtype)
        for number, plane in enumerate(self.planes):
            got, _ = self._in_lines(plane, back[:, number].float())
            want, along = self._in_lines(plane, units[:, number].float())
            most = want.abs().amax(along, keepdim=True)
            rounding = info.eps * (want.abs() + info.smallest_normal)  # to the type
            bound = most / (2 * LARGEST) + rounding
            if not bool(((got - want).abs() <= bound).all()):
                return False
        return True


def _warps(values: int) -> int:
    return max(1, min(8, values // (32 * _THREAD_VALUES)))
