"""Exactness of K and V: the share of values equal to the model's, and the distance of the others.

Distances are in units of the last place (ulp) of the larger value. A sum that nearly cancels has no
places of its own: values below the root mean square of their head count in its units.

The order of a sum differs between kernels and batch sizes. K and V are right if they are within
twice the distance of the model's own at other batch sizes, or of another order of the same sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hcache_backend.projection.attention import KV

TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 8e-2,
    torch.float8_e5m2: 1.6e-1,
}
"""Largest relative difference (root mean square over one head) that rounding explains, five times
or more. A wrong projection (another RoPE, a missing norm) is off by a tenth or more."""

CODEC_TOLERANCE = {"none": 0.0, "exp3": 0.0, "exp4": 0.0, "int8": 2e-2}
"""Added by a codec, of hidden states or of K and V: twice the largest difference seen in random
models of nine architectures (int8 0.8%; ``bench/codecs.py``). int8 loses more with large outliers,
and is refused to such models."""

_LARGEST = 32  # largest difference, over the root mean square of all


def tolerance(dtype: torch.dtype, codec: str = "none") -> float:
    """The bound for K and V kept as ``dtype``, from hidden states kept by ``codec``. Raises
    KeyError if the type or the codec was not measured."""
    return TOLERANCE[dtype] + CODEC_TOLERANCE[codec]


class Bound(NamedTuple):
    """Differences that another order of the same sums explains."""

    rms: float  # of the differences in a head, relative to that of its values
    ulps: float  # largest difference, in units of the last place

    @classmethod
    def of_product(cls, dtype: torch.dtype) -> Bound:
        """For K and V of the same hidden states, kept as ``dtype``. Sums in float32 differ by up to
        2e-6. That moves a few values of a shorter type by one place: an eighth of its epsilon is
        every thirtieth value. One rounding more or less moves every third."""
        epsilon = torch.finfo(dtype).eps
        rms = max(epsilon / 8, 2.0**-19)
        return cls(rms, _LARGEST * rms / epsilon)

    @classmethod
    def of_pass(cls, dtype: torch.dtype) -> Bound:
        """For K and V behind recomputed layers: eight times as much, at most 0.08. A wrong prefix
        or position shows as a tenth of the values or more."""
        rms = min(8 * cls.of_product(dtype).rms, 0.08)
        return cls(rms, _LARGEST * rms / torch.finfo(dtype).eps)

    @classmethod
    def of_kernel(cls, dtype: torch.dtype) -> Bound:
        """For K and V of two kernels of attention: each is as far off as a pass, and rounds the
        weights of attention in its own way, so that single values are no evidence."""
        return cls(2 * cls.of_pass(dtype).rms, math.inf)


@dataclass(frozen=True)
class Exactness:
    """The difference of numbers from those that are right."""

    values: int  # that were compared
    unequal: int
    ulps: float  # largest distance in units of the last place; infinity if not finite
    rms: float  # as in Bound, of the worst head; infinity likewise

    def as_good_as(self, other: Exactness, bound: Bound) -> bool:
        """True if this is finite, and at most twice as far off as ``other`` or within ``bound``."""
        finite = math.isfinite(self.rms + other.rms)
        near = self.rms <= max(2 * other.rms, bound.rms)
        return finite and near and self.ulps <= max(2 * other.ulps, bound.ulps)

    def __str__(self) -> str:
        share = 100 * (1 - self.unequal / self.values)
        return f"{math.floor(1000 * share) / 1000:g}% equal, {self.ulps:.3g} ulp"


class KVExactness(NamedTuple):
    """Exactness of K and of V."""

    k: Exactness
    v: Exactness

    def as_good_as(self, other: KVExactness, bound: Bound) -> bool:
        """True if both K and V are, as in :meth:`Exactness.as_good_as`."""
        return all(mine.as_good_as(theirs, bound) for mine, theirs in zip(self, other, strict=True))

    def __str__(self) -> str:
        return f"K {self.k}, V {self.v}"


def kv_exactness(got: KV, wanted: KV, dtype: torch.dtype) -> KVExactness:
    """Compare K and V, in places of the type ``dtype``."""
    return KVExactness(*(_exactness(*pair, dtype) for pair in zip(got, wanted, strict=True)))


def combined(parts: Iterable[KVExactness]) -> KVExactness:
    """Several comparisons, each of other values, as one."""
    return _combine(parts, sum)


def worst_of(parts: Iterable[KVExactness]) -> KVExactness:
    """The worst figures of several comparisons of the same values."""
    return _combine(parts, max)


def _combine(parts: Iterable[KVExactness], count: Callable[[Iterable[int]], int]) -> KVExactness:
    """The worst distances of several comparisons; ``count`` makes one number of their numbers."""

    def combine(each: Sequence[Exactness]) -> Exactness:
        values, unequal = count(one.values for one in each), count(one.unequal for one in each)
        return Exactness(
            values, unequal, max(one.ulps for one in each), max(one.rms for one in each)
        )

    return KVExactness(*map(combine, zip(*parts, strict=True)))


def relative_difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """:func:`difference_on_device`, waited for; infinity if something is not finite."""
    worst = float(difference_on_device(got, wanted))
    return worst if math.isfinite(worst) else math.inf


def difference_on_device(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """``max over heads of rms(got - want) / rms(want)`` of values ``[n, heads, dim]``: float64
    ``[]``. Values that are not finite stay so."""
    if got.shape != wanted.shape:
        return torch.full((), torch.inf, dtype=torch.float64, device=wanted.device)
    difference = (got.double() - wanted.double()).square().mean(dim=(0, 2)).sqrt()
    scale = wanted.double().square().mean(dim=(0, 2)).sqrt()
    return (difference / scale.clamp_min(1e-12)).max()


def _exactness(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> Exactness:
    """Compare K or V, ``[n, heads, dim]``; units of the last place are those of ``dtype``."""
    rms = relative_difference(got, wanted)
    got, wanted = got.double(), wanted.double()
    typical = wanted.square().mean(-1, keepdim=True).sqrt()  # smaller values count in its units
    size = torch.maximum(torch.maximum(got.abs(), wanted.abs()), typical)
    _, exponent = torch.frexp(size.clamp_min(torch.finfo(dtype).tiny))
    unit = torch.ldexp(torch.full_like(size, torch.finfo(dtype).eps), exponent - 1)
    distance = ((got - wanted).abs() / unit).nan_to_num(nan=math.inf, posinf=math.inf)
    return Exactness(wanted.numel(), int((got != wanted).sum()), float(distance.max()), rms)
