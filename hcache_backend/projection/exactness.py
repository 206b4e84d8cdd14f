"""How exactly K and V are the model's: the share of equal values, and how far the others are off.

Distances are counted in units of the last place (ulp) of the larger value. What cancelled to nearly
nothing, in a sum or a rotation, has no places of its own: values below the root mean square of
their head are counted in its units.

Nothing sums in one order everywhere. K and V are right if they are at most twice as far off as the
model's own at other batch sizes, or as another order of the same sums explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

_LARGEST = 32
"""How many times the root mean square of all differences the largest one may be."""


class Bound(NamedTuple):
    """What another order of the same sums explains.

    Attributes:
        rms: Root mean square of the differences in a head, relative to that of its values.
        ulps: The largest difference, in units of the last place.
    """

    rms: float
    ulps: float

    @classmethod
    def of_product(cls, kept: torch.dtype) -> Bound:
        """For K and V of the same hidden states, kept as ``kept``.

        Sums in float32 differ by up to 2e-6. That moves a few values of a shorter type by one
        place: an eighth of its epsilon is every thirtieth value. One rounding more or less moves
        every third.
        """
        epsilon = torch.finfo(kept).eps
        rms = max(epsilon / 8, 2.0**-19)
        return cls(rms, _LARGEST * rms / epsilon)

    @classmethod
    def of_pass(cls, kept: torch.dtype) -> Bound:
        """For K and V behind layers that were computed again: eight times as much, at most 0.08.

        A wrong prefix or position shows as a tenth of the values or more.
        """
        rms = min(8 * cls.of_product(kept).rms, 0.08)
        return cls(rms, _LARGEST * rms / torch.finfo(kept).eps)


@dataclass(frozen=True)
class Exactness:
    """How numbers differ from those that are right.

    Attributes:
        values: How many were compared.
        unequal: How many differ.
        ulps: The largest distance, in units of the last place; infinity for what is not finite.
        rms: As in :class:`Bound`, of the worst head; infinity likewise.
    """

    values: int
    unequal: int
    ulps: float
    rms: float

    def as_good_as(self, other: Exactness, bound: Bound) -> bool:
        """Whether this is finite, and at most twice as far off as ``other`` or within ``bound``."""
        finite = math.isfinite(self.rms + other.rms)
        near = self.rms <= max(2 * other.rms, bound.rms)
        return finite and near and self.ulps <= max(2 * other.ulps, bound.ulps)

    def __str__(self) -> str:
        share = 100 * (1 - self.unequal / self.values)
        return f"{math.floor(1000 * share) / 1000:g}% equal, {self.ulps:.3g} ulp"


class KVExactness(NamedTuple):
    """How exact K and V are, each."""

    k: Exactness
    v: Exactness

    def as_good_as(self, other: KVExactness, bound: Bound) -> bool:
        """See :meth:`Exactness.as_good_as`; for K and V."""
        return all(mine.as_good_as(theirs, bound) for mine, theirs in zip(self, other, strict=True))

    def __str__(self) -> str:
        return f"K {self.k}, V {self.v}"


def kv_exactness(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    kept: torch.dtype,
) -> KVExactness:
    """Compare K and V.

    Args:
        got: K and V, ``[n, heads, dim]`` each.
        want: Those that are right.
        kept: The type whose places are counted: the model's, or the pool's.
    """
    return KVExactness(*(_exactness(*pair, kept) for pair in zip(got, want, strict=True)))


def together(parts: Iterable[KVExactness]) -> KVExactness:
    """Several comparisons as one."""
    return _combined(parts, sum)


def worst(parts: Iterable[KVExactness]) -> KVExactness:
    """The worst figures of several comparisons of the same values."""
    return _combined(parts, max)


def _combined(parts: Iterable[KVExactness], count: Callable[[Iterable[int]], int]) -> KVExactness:
    return KVExactness(
        *(
            Exactness(
                count(p.values for p in of),
                count(p.unequal for p in of),
                max(p.ulps for p in of),
                max(p.rms for p in of),
            )
            for of in zip(*parts, strict=True)
        )
    )


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """:func:`difference_on_device`, waited for; infinity if something is not finite."""
    worst = float(difference_on_device(got, want))
    return worst if math.isfinite(worst) else math.inf


def difference_on_device(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The largest relative difference of a head, float64 ``[]``; what is not finite stays so.

    Args:
        got: ``[n, heads, dim]``.
        want: What is right, of the same shape.

    Returns:
        ``max over heads of rms(got - want) / rms(want)``.
    """
    if got.shape != want.shape:
        return torch.full((), torch.inf, dtype=torch.float64, device=want.device)
    difference = (got.double() - want.double()).square().mean(dim=(0, 2)).sqrt()
    scale = want.double().square().mean(dim=(0, 2)).sqrt()
    return (difference / scale.clamp_min(1e-12)).max()


def _exactness(got: torch.Tensor, want: torch.Tensor, kept: torch.dtype) -> Exactness:
    rms = relative_difference(got, want)
    got, want = got.double(), want.double()
    typical = want.square().mean(-1, keepdim=True).sqrt()
    size = torch.maximum(torch.maximum(got.abs(), want.abs()), typical)
    _, exponent = torch.frexp(size.clamp_min(torch.finfo(kept).tiny))
    unit = torch.ldexp(torch.full_like(size, torch.finfo(kept).eps), exponent - 1)
    distance = ((got - want).abs() / unit).nan_to_num(nan=math.inf, posinf=math.inf)
    return Exactness(want.numel(), int((got != want).sum()), float(distance.max()), rms)
