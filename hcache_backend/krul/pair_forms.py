"""Two layers in about the bytes of one: reference encoders and decoders of a slot.

``merged``: after MiniCache, K (and V) of both layers have one direction and a magnitude each. An
encoded unit of ``n`` tokens is, in the type of K and V,

- the values of every token: a direction of length 1 in each head, halfway between the directions of
  both layers (spherical interpolation with t = 1/2: both lose the same; MiniCache prefers 0.6);
- the magnitudes in the first layer, token by token and there head by head; those in the second;
- the values in the second layer of the *retained* tokens, whose directions differ most between the
  layers. They are not merged: their values above are those of the first layer;
- the numbers of the retained tokens in the unit, ascending, uint16;
- zeros up to a multiple of 16 bytes.

Bytes follow from float32 sums, products, quotients and square roots in a fixed order.

``int8``: all planes through codec ``int8``, those of the first layer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import torch
from torch.nn import functional

from hcache_kernels.codecs import KV, Codec, Cut, Int8, UnsupportedRows

_MOST_TOKENS = 1 << 16
_PAIR = 2 * KV  # planes of an item: K and V of the first layer, then those of the second one


class MergedPair(Codec):
    """See above; without a kernel, and on any device."""

    name = code = "merged"
    lossless = False
    retained: ClassVar[int] = 16  # one token of so many; it and t belong to the name

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = _PAIR) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedRows(f"merged pairs take K and V in bfloat16 or float16, not {dtype}")
        if cut.width % dim or cut.tokens > _MOST_TOKENS:
            raise UnsupportedRows(
                f"merged pairs take units of whole heads and at most {_MOST_TOKENS} tokens: {cut}"
            )
        super().__init__(cut, dim, dtype, planes)
        self._kept = -(-cut.tokens // self.retained)  # retained tokens of a unit
        magnitudes = cut.values // dim  # of a unit in one layer: one for each token and head
        # 16-bit elements of an encoded unit, by part, in the order of the module's description
        self._parts = [cut.values, magnitudes, magnitudes, self._kept * cut.width, self._kept]
        unit_bytes = -(-2 * sum(self._parts) // 16) * 16
        self.unit_bytes = (unit_bytes, unit_bytes)  # for K of both layers, for V of both

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge two layers: K and V of the first, then of the second, ``[p, 4, units, tokens,
        width]``. Returns pages, uint8 ``[p, bytes]``, and which of them the form can hold."""
        pair = units.unflatten(1, (2, 2)).transpose(0, 1).unflatten(-1, (-1, self.dim))
        values = pair.float()  # [layer, p, K/V, units, tokens, heads, dim]
        length = _sum(values * values).sqrt()
        magnitudes = length.to(self.dtype)
        # Not if a square leaves float32, or a magnitude its type (it is infinite, or wrongly 0).
        representable = magnitudes.isfinite() & ((magnitudes > 0) | (values == 0).all(-1))
        fits = representable.all(0).flatten(1).all(1)  # [p]
        directions = torch.where(length[..., None] > 0, values / length[..., None], 0.0)
        kept = _divergent(directions, self._kept)  # retained tokens, [p, K/V, units, kept]
        sums = directions[0] + directions[1]
        norm = _sum(sums * sums).sqrt()[..., None]
        # Directions that are opposite have no middle.
        direction = torch.where(norm > 0, sums / norm, directions[0]).to(self.dtype).flatten(-2)
        rows = kept[..., None].expand(*kept.shape, self.cut.width)
        exact = [layer.flatten(-2).gather(3, rows) for layer in pair]  # their values, not merged
        direction.scatter_(3, rows, exact[0])
        numbers = kept.to(torch.int32).to(torch.uint16).view(self.dtype)
        parts = (direction, *magnitudes, exact[1], numbers)
        shape = (len(units), 2, self.cut.units)
        flat = torch.cat([part.reshape(*shape, -1) for part in parts], dim=3)
        encoded = torch.zeros((*shape, self.unit_bytes[0]), dtype=torch.uint8, device=units.device)
        encoded[..., : 2 * sum(self._parts)] = flat.view(torch.uint8)
        return encoded.flatten(1), fits

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`encode_units`: ``[p, 4, units, tokens, width]``, from any bytes."""
        cut = self.cut  # encoded units are [p, K/V, units, bytes]
        units = encoded.view(len(encoded), 2, cut.units, -1)[..., : 2 * sum(self._parts)]
        parts = units.contiguous().view(self.dtype).split(self._parts, dim=3)
        values = parts[0].unflatten(3, (cut.tokens, cut.width))
        numbers = parts[4].contiguous().view(torch.uint16).to(torch.int64)
        rows = numbers.clamp(max=cut.tokens - 1)[..., None].expand(*numbers.shape, cut.width)
        exact = values.gather(3, rows), parts[3].unflatten(3, (self._kept, cut.width))
        heads = values.float().unflatten(4, (-1, self.dim))
        layers = [
            (heads * magnitudes.float().unflatten(3, (cut.tokens, -1))[..., None])
            .to(self.dtype)
            .flatten(-2)
            .scatter_(3, rows, kept)
            for magnitudes, kept in zip(parts[1:3], exact, strict=True)
        ]
        return torch.cat(layers, dim=1)


PAIR_FORMS: dict[str, type[Codec]] = {form.name: form for form in (MergedPair, Int8)}


class PairSlot:
    """A slot: room in a page for two layers, encoded by any of the forms in :data:`PAIR_FORMS`. It
    has two parts of equal length: the halves of the encoded bytes, each padded with zeros."""

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        self.forms = {name: form(cut, dim, dtype, _PAIR) for name, form in PAIR_FORMS.items()}
        self.slot_bytes = max(form.segment_bytes for form in self.forms.values())  # both parts

    def encode(self, name: str, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`Codec.encode_units` by a form; uint8 ``[p, slot_bytes]``."""
        encoded, fits = self.forms[name].encode_units(units)
        return _resized(encoded, self.slot_bytes), fits

    def decode(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """:meth:`Codec.decode_units` of what :meth:`encode` returns."""
        form = self.forms[name]
        return form.decode_units(_resized(slots, form.segment_bytes))

    def stands_for(self, name: str, slots: torch.Tensor, units: torch.Tensor) -> bool:
        """True if ``slots`` are ``units`` encoded by form ``name``, as exactly as it promises."""
        form = self.forms[name]
        encoded = _resized(slots, form.segment_bytes)
        padded = _resized(encoded, self.slot_bytes)
        return torch.equal(padded, slots) and form.stands_for(encoded, units)


def _resized(slots: torch.Tensor, size: int) -> torch.Tensor:
    """Slots, uint8 ``[p, bytes]``: each of the two halves cut, or zero-padded, to ``size // 2``."""
    parts = slots.view(len(slots), 2, -1)
    return functional.pad(parts, (0, size // 2 - parts.shape[2])).flatten(1)


def changes_of_merges(form: MergedPair, layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Change of K and V by a merge of each two layers: float32 ``[layers, layers]``, symmetric.
    ``layers``: K and V of each, ``[p, 2, units, tokens, width]``. The change is the root mean
    square over tokens, each relative to its own size, in the worst head of K or V; infinity on the
    diagonal and if a page does not fit."""
    changes = torch.full((len(layers), len(layers)), torch.inf, device=layers[0].device)
    for pair in combinations(range(len(layers)), 2):
        exact = torch.cat([layers[layer] for layer in pair], dim=1)
        encoded, fits = form.encode_units(exact)
        both = form.decode_units(encoded), exact
        got, want = (units.float().unflatten(-1, (-1, form.dim)) for units in both)
        # All tokens count alike: an outlier would hide the losses of the others.
        size = want.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        errors = ((got - want) / size).square()  # [p, 4, units, tokens, heads, dim]
        change = errors.mean((0, 3, 5)).sqrt().max()
        changes[pair] = changes[pair[::-1]] = torch.where(fits.all(), change, torch.inf)
    return changes


def _divergent(units: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` tokens of each unit whose directions in two layers differ most, in ascending
    order, ``[p, K/V, units, count]``. ``units``: unit vectors, as in :class:`MergedPair`."""
    cosines = _sum(_sum(units[0] * units[1]))  # over values, then over heads
    return cosines.sort(dim=3, stable=True).indices[..., :count].sort(dim=3).values


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sum along the last dimension by adding halves: the order is the same on all processors."""
    while (length := values.shape[-1]) > 1:
        half = length // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((folded, values[..., 2 * half :]), dim=-1)
    return values[..., 0]
