"""Two layers in about the bytes of one: reference encoders and decoders of a slot.

``merged``: after MiniCache, K (and V) of both layers have one direction and a magnitude each. An
encoded unit of ``n`` tokens is, in the type of K and V,

- the values of every token: a direction of length 1 in each head, halfway between the directions of
  both layers (spherical interpolation with t = 1/2);
- the magnitudes in the first layer, token by token and there head by head; those in the second;
- the values in the second layer of the *retained* tokens, whose directions differ most between the
  layers. They are not merged: their values above are those of the first layer;
- the numbers of the retained tokens in the unit, ascending, uint16;
- zeros up to a multiple of 16 bytes.

MiniCache and Krul leave t open (MiniCache prefers 0.6). With 1/2 both layers lose the same, and
bytes follow from float32 sums, products, quotients and square roots in a fixed order.

``fp8``: both layers through codec ``fp8``, the first one first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import torch
from torch.nn import functional

from hcache_kernels.codecs import Cut, UnsupportedRows
from hcache_kernels.codecs.scaled_segments import Fp8Segments

_MOST_TOKENS = 1 << 16


class PairForm(ABC):
    """Encodes K and V of two layers into a slot: the same values give the same bytes, or ``name``
    must change, because stored pages would be decoded to wrong values.

    ``cut``: the units of a page in K of one layer, like those in V; ``dim``: values of a head.

    Raises:
        UnsupportedRows: The form does not take such units.
    """

    name: ClassVar[str]
    slot_bytes: int  # of an encoded page in both layers

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        self.cut, self.dim = cut, dim

    @abstractmethod
    def encode(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode pages of two layers, K and V as ``[p, 2, units, tokens, width]``. Returns uint8
        ``[p, slot_bytes]``, and bool ``[p]``: bytes of a page that does not fit mean nothing."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode uint8 ``[p, slot_bytes]`` to units of both layers."""


class Fp8Pair(PairForm):
    name = "fp8"

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        super().__init__(cut, dim, dtype)
        self._codec = Fp8Segments(cut, dim, dtype)
        self.slot_bytes = 2 * self._codec.segment_bytes

    def encode(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = zip(*map(self._codec.encode_units, (first, second)), strict=True)
        return torch.cat(encoded, dim=1), torch.stack(fits).all(0)

    def decode(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = encoded.chunk(2, dim=1)
        return self._codec.decode_units(first), self._codec.decode_units(second)


class MergedPair(PairForm):
    name = "merged"
    # One token of 16 is retained. Bytes depend on this and on t: both belong to the name.
    retained: ClassVar[int] = 16

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedRows(f"merged pairs take K and V in bfloat16 or float16, not {dtype}")
        if cut.width % dim or cut.tokens > _MOST_TOKENS:
            raise UnsupportedRows(
                f"merged pairs take units of whole heads and at most {_MOST_TOKENS} tokens, not "
                f"{cut.tokens} tokens of {cut.width} values in heads of {dim}"
            )
        super().__init__(cut, dim, dtype)
        self._dtype = dtype
        heads = cut.width // dim
        self._kept = -(-cut.tokens // self.retained)
        # Elements of 16 bits.
        self._parts = [
            cut.values,
            cut.tokens * heads,
            cut.tokens * heads,
            self._kept * cut.width,
            self._kept,
        ]
        self._unit_bytes = -(-2 * sum(self._parts) // 16) * 16
        self.slot_bytes = 2 * cut.units * self._unit_bytes

    def encode(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pair = torch.stack((first, second)).unflatten(-1, (-1, self.dim))
        values = pair.float()
        length = _root_of_sum(values)
        magnitudes = length.to(self._dtype)
        # Squares that leave float32, and magnitudes that leave the type.
        held = magnitudes.isfinite() & ((magnitudes > 0) | (values == 0).all(-1))
        fits = held.all(0).flatten(1).all(1)
        units = torch.where(length[..., None] > 0, values / length[..., None], 0.0)
        kept = _divergent(units, self._kept)
        between = self._between(*units)
        norm = _root_of_sum(between)[..., None]
        # Directions that are opposite have no middle.
        direction = torch.where(norm > 0, between / norm, units[0]).to(self._dtype).flatten(-2)
        rows = kept[..., None].expand(*kept.shape, self.cut.width)
        exact = [part.flatten(-2).gather(3, rows) for part in pair]
        direction.scatter_(3, rows, exact[0])
        numbers = kept.to(torch.int32).to(torch.uint16).view(self._dtype)
        parts = (direction, *magnitudes, exact[1], numbers)
        flat = torch.cat([part.reshape(*first.shape[:3], -1) for part in parts], dim=3)
        shape = (*first.shape[:3], self._unit_bytes)
        encoded = torch.zeros(shape, dtype=torch.uint8, device=first.device)
        encoded[..., : 2 * sum(self._parts)] = flat.view(torch.uint8)
        return encoded.flatten(1), fits

    def decode(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cut = self.cut
        units = encoded.view(len(encoded), 2, cut.units, -1)[..., : 2 * sum(self._parts)]
        parts = units.contiguous().view(self._dtype).split(self._parts, dim=3)
        values = parts[0].unflatten(3, (cut.tokens, cut.width))
        numbers = parts[4].contiguous().view(torch.uint16).to(torch.int64)
        rows = numbers.clamp(max=cut.tokens - 1)[..., None].expand(*numbers.shape, cut.width)
        exact = values.gather(3, rows), parts[3].unflatten(3, (self._kept, cut.width))
        heads = values.float().unflatten(4, (-1, self.dim))
        first, second = (
            (heads * magnitudes.float().unflatten(3, (cut.tokens, -1))[..., None])
            .to(self._dtype)
            .flatten(-2)
            .scatter_(3, rows, kept)
            for magnitudes, kept in zip(parts[1:3], exact, strict=True)
        )
        return first, second

    def _between(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Vectors in the direction of both layers, of any length, from those of length 1."""
        return first + second


PAIR_FORMS: dict[str, type[PairForm]] = {form.name: form for form in (MergedPair, Fp8Pair)}


class PairSlot:
    """A slot that holds a page of two layers in any form, as two equal parts: each has half of the
    form's bytes, and zeros. ``slot_bytes`` are those of both parts."""

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        self._forms = {name: form(cut, dim, dtype) for name, form in PAIR_FORMS.items()}
        self.slot_bytes = max(form.slot_bytes for form in self._forms.values())

    def encode(
        self, name: str, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`PairForm.encode` by a form; uint8 ``[p, slot_bytes]``."""
        encoded, fits = self._forms[name].encode(first, second)
        parts = encoded.view(len(encoded), 2, -1)
        return functional.pad(parts, (0, self.slot_bytes // 2 - parts.shape[2])).flatten(1), fits

    def decode(self, name: str, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`PairForm.decode` of the bytes of :meth:`encode`."""
        form = self._forms[name]
        parts = encoded.view(len(encoded), 2, -1)[..., : form.slot_bytes // 2]
        return form.decode(parts.flatten(1))


def changes_of_merges(form: MergedPair, layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Change of K and V by a merge of each two layers: float32 ``[layers, layers]``, symmetric.

    It is the root mean square over tokens in the worst head of K or V, each token relative to its
    own size; infinity on the diagonal, and if a page does not fit.
    """
    found = torch.full((len(layers), len(layers)), torch.inf, device=layers[0].device)
    for pair in combinations(range(len(layers)), 2):
        exact = layers[pair[0]], layers[pair[1]]
        rows, fits = form.encode(*exact)
        errors = [_change(*both, form.dim) for both in zip(form.decode(rows), exact, strict=True)]
        change = torch.where(fits.all(), torch.stack(errors).max(), torch.inf)
        found[pair] = found[pair[::-1]] = change
    return found


def _change(back: torch.Tensor, exact: torch.Tensor, dim: int) -> torch.Tensor:
    # All tokens count alike: one that stands out would hide what the others lose.
    got, want = (part.float().unflatten(-1, (-1, dim)) for part in (back, exact))
    size = want.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    errors = ((got - want) / size).square()  # [p, 2, units, tokens, heads, dim]
    return errors.mean((0, 3, 5)).sqrt().max()


def _divergent(units: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens of each unit whose directions in two layers differ most, ascending; of equal ones the
    first. ``units`` are vectors of length 1, ``[2, p, 2, units, tokens, heads, dim]``."""
    cosines = _sum(_sum(units[0] * units[1]))  # over values, then over heads
    return cosines.sort(dim=3, stable=True).indices[..., :count].sort(dim=3).values


def _root_of_sum(values: torch.Tensor) -> torch.Tensor:
    """Length of vectors along the last dimension."""
    return _sum(values * values).sqrt()


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sum along the last dimension, halves onto each other: one order on every processor."""
    while (length := values.shape[-1]) > 1:
        half = length // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((folded, values[..., 2 * half :]), dim=-1)
    return values[..., 0]
