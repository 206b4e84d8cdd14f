"""Shares of equal values, distances in units of the last place, and when they are good enough."""

from __future__ import annotations

import math

import pytest
import torch

from hcache_backend.projection.exactness import Exactness, kv_exactness, together, worst

HALVES = (torch.bfloat16, torch.float16)
NONE = Exactness(values=10_000, unequal=0, ulps=0.0)
SOME = Exactness(values=10_000, unequal=100, ulps=2.0)


def next_up(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The half-type numbers ``steps`` places above positive ones."""
    return (x.view(torch.int16) + steps).view(x.dtype)


@pytest.mark.parametrize("kept", HALVES, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_distance_counts_the_numbers_between(kept: torch.dtype, steps: int) -> None:
    k = torch.linspace(1.1, 1.3, 64).view(4, 2, 8).to(kept)  # a head's values are alike
    off = k.clone()
    off[2, 1, 3] = next_up(k[2, 1, 3], steps)
    found = kv_exactness((off, k), (k, k), kept)
    assert found.k == Exactness(64, 1, float(steps))
    assert found.v == Exactness(64, 0, 0.0)


def test_what_cancelled_counts_in_the_places_of_its_head() -> None:
    k = torch.full((1, 1, 64), 1.0).bfloat16()
    k[0, 0, 0] = 2.0**-20
    off = k.clone()
    off[0, 0, 0] = 2.0**-19  # twice as much: 128 numbers further
    assert kv_exactness((off, k), (k, k), torch.bfloat16).k.ulps < 0.01


def test_what_is_not_finite_is_infinitely_far() -> None:
    k = torch.ones(2, 1, 8)
    for wrong in (math.nan, math.inf):
        off = k.clone()
        off[1, 0, 5] = wrong
        assert kv_exactness((off, k), (k, k), torch.float32).k == Exactness(16, 1, math.inf)


def test_where_the_model_repeats_itself_bit_for_bit_nothing_may_differ() -> None:
    assert NONE.as_good_as(NONE)
    assert not Exactness(10_000, 1, 0.1).as_good_as(NONE)


@pytest.mark.parametrize(
    ("ours", "good"),
    [
        (NONE, True),
        (SOME, True),
        (Exactness(10_000, 130, 2.0), True),  # three standard deviations
        (Exactness(10_000, 131, 2.0), False),
        (Exactness(1_000_000, 10_300, 2.0), True),  # of a larger count
        (Exactness(1_000_000, 10_301, 2.0), False),
        (Exactness(10_000, 100, 4.0), True),
        (Exactness(10_000, 1, 4.1), False),
    ],
)
def test_where_it_does_not_chance_is_allowed_for(ours: Exactness, good: bool) -> None:
    assert ours.as_good_as(SOME) is good


def test_comparisons_add_up_and_the_worst_is_found() -> None:
    k = torch.ones(2, 1, 8)
    one = kv_exactness((k, k), (k, k), torch.float32)
    two = kv_exactness((k + 1, k), (k, k), torch.float32)
    assert together([one, two]).k.values == 32
    assert together([one, two]).k.unequal == worst([one, two]).k.unequal == 16
    assert worst([one, two]).k.values == 16
    assert str(one) == "K 100% equal, 0 ulp, V 100% equal, 0 ulp"
    assert str(SOME) == "99% equal, 2 ulp"
