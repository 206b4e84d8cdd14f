"""How exactly K and V are the model's: the share of equal values, and the largest distance.

Distances are counted in units of the last place (ulp) of the larger value. What cancelled to nearly
nothing, in a sum or a rotation, has no places of its own: values below the root mean square of
their head are counted in its units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Exactness:
    """How numbers differ from those that are right.

    Attributes:
        values: How many were compared.
        unequal: How many differ.
        ulps: The largest distance, in units of the last place; infinity for what is not finite.
    """

    values: int
    unequal: int
    ulps: float

    def as_good_as(self, other: Exactness) -> bool:
        """Whether this is no worse than ``other``, as far as chance lets one tell.

        Where ``other`` has no unequal values, none is allowed. Otherwise both are what different
        orders of the same sums leave: such counts may be three standard deviations apart and such
        largest distances a factor of two, and the smallest distance of a rounded sum is one.
        """
        if not other.unequal:
            return not self.unequal
        expected = other.unequal * self.values / other.values
        few = self.unequal <= expected + 3 * math.sqrt(expected)
        return few and self.ulps <= max(1.0, 2 * other.ulps)

    def __str__(self) -> str:
        share = 100 * (1 - self.unequal / self.values)
        return f"{math.floor(1000 * share) / 1000:g}% equal, {self.ulps:.3g} ulp"


class KVExactness(NamedTuple):
    """How exact K and V are, each."""

    k: Exactness
    v: Exactness

    def as_good_as(self, other: KVExactness) -> bool:
        return all(mine.as_good_as(theirs) for mine, theirs in zip(self, other, strict=True))

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
    return KVExactness(
        *(
            Exactness(
                sum(p.values for p in of), sum(p.unequal for p in of), max(p.ulps for p in of)
            )
            for of in zip(*parts, strict=True)
        )
    )


def worst(parts: Iterable[KVExactness]) -> KVExactness:
    """The worst figures of several comparisons of the same values."""
    return KVExactness(
        *(
            Exactness(of[0].values, max(p.unequal for p in of), max(p.ulps for p in of))
            for of in zip(*parts, strict=True)
        )
    )


def _exactness(got: torch.Tensor, want: torch.Tensor, kept: torch.dtype) -> Exactness:
    got, want = got.double(), want.double()
    typical = want.square().mean(-1, keepdim=True).sqrt()
    size = torch.maximum(torch.maximum(got.abs(), want.abs()), typical)
    _, exponent = torch.frexp(size.clamp_min(torch.finfo(kept).tiny))
    unit = torch.ldexp(torch.full_like(size, torch.finfo(kept).eps), exponent - 1)
    distance = ((got - want).abs() / unit).nan_to_num(nan=math.inf, posinf=math.inf)
    return Exactness(want.numel(), int((got != want).sum()), float(distance.max()))
