"""Shares of equal values, distances in units of the last place, and when they are good enough."""

import math

import pytest
import torch

from hcache_backend.projection.exactness import (
    CODEC_TOLERANCE,
    TOLERANCE,
    Bound,
    Exactness,
    combined,
    kv_exactness,
    worst_of,
)
from hcache_kernels.codecs import CODECS, SEGMENT_CODECS

HALVES = (torch.bfloat16, torch.float16)
NONE = Exactness(values=10_000, unequal=0, ulps=0.0, rms=0.0)
SOME = Exactness(values=10_000, unequal=100, ulps=6.0, rms=3e-3)


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
    rms = float((off.double() - k.double()).norm() / k[:, 1].double().norm())
    assert found.k == Exactness(64, 1, float(steps), pytest.approx(rms))
    assert found.v == Exactness(64, 0, 0.0, 0.0)


def test_what_cancelled_counts_in_the_places_of_its_head() -> None:
    k = torch.full((1, 1, 64), 1.0).bfloat16()
    off = k.clone()
    k[0, 0, 0], off[0, 0, 0] = 2.0**-20, 2.0**-19  # twice as much: 128 numbers further
    assert kv_exactness((off, k), (k, k), torch.bfloat16).k.ulps < 0.01


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far(wrong: float) -> None:
    k, off = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
    off[1, 0, 5] = wrong
    found = kv_exactness((off, k), (k, k), torch.float32)
    assert found.k == Exactness(16, 1, math.inf, math.inf)


NOT_FINITE = Exactness(values=10_000, unequal=100, ulps=math.inf, rms=math.inf)
BOUND = Bound(rms=1e-3, ulps=4.0)


@pytest.mark.parametrize(
    ("own", "rms", "ulps", "good"),
    [
        (NONE, 0.0, 0.0, True),
        (NONE, 1e-3, 4.0, True),  # where the model repeats itself bit for bit, too
        (NONE, 1.1e-3, 4.0, False),
        (NONE, 1e-3, 4.1, False),
        (SOME, 6e-3, 12.0, True),  # twice as far off as the model itself
        (SOME, 6.1e-3, 12.0, False),
        (SOME, 6e-3, 12.1, False),
        (SOME, math.inf, 1.0, False),
        (NOT_FINITE, math.inf, math.inf, False),  # it tells nothing of what is right
        (NOT_FINITE, 1e-2, 1.0, False),
    ],
)
def test_what_the_model_itself_or_another_order_of_sums_explains_is_good(
    own: Exactness, rms: float, ulps: float, good: bool
) -> None:
    ours = Exactness(values=10_000, unequal=5_000, ulps=ulps, rms=rms)
    assert ours.as_good_as(own, BOUND) is good


def in_blocks(x: torch.Tensor, weight: torch.Tensor, blocks: int) -> torch.Tensor:
    """A product that sums block by block, in float32, as kernels of other sizes do."""
    parts = zip(x.float().chunk(blocks, 1), weight.float().chunk(blocks, 1), strict=True)
    return sum(a @ b.T for a, b in parts).to(x.dtype)  # type: ignore[union-attr]


@pytest.mark.parametrize("kept", [torch.float32, *HALVES], ids=str)
def test_a_product_may_sum_in_another_order_and_not_round_once_more(kept: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(96, 2048).to(kept), (torch.randn(256, 2048) / 45).to(kept)
    one, other = (in_blocks(x, weight, blocks).view(96, 4, 64) for blocks in (1, 16))
    same = kv_exactness((one, one), (one, one), kept)
    found = kv_exactness((other, one), (one, one), kept)
    assert found.k.unequal  # so the order does make a difference
    assert found.as_good_as(same, Bound.of_product(kept))
    if kept in HALVES:
        rounded = (in_blocks(x, weight * 1.5, 1) / 1.5).view(96, 4, 64)
        once_more = kv_exactness((rounded, one), (one, one), kept)
        assert not once_more.as_good_as(same, Bound.of_product(kept))
        assert once_more.as_good_as(same, Bound.of_pass(kept))  # as layers before may do


@pytest.mark.parametrize("kept", [torch.float32, *HALVES], ids=str)
def test_another_kernel_may_be_twice_as_far_off_but_computes_the_same(kept: torch.dtype) -> None:
    torch.manual_seed(0)
    right = torch.randn(96, 4, 64).to(kept).float()
    same, pair = kv_exactness((right, right), (right, right), kept), Bound.of_kernel(kept)
    for share, fine in ((0.9, True), (1.1, False)):
        off = right * (1 + share * pair.rms)
        off[0, 0, 0] += 20 * torch.finfo(kept).eps * right.std()  # single values say nothing
        found = kv_exactness((off, right), (right, right), kept)
        assert found.as_good_as(same, pair) == fine
        assert not found.as_good_as(same, Bound.of_pass(kept))


@pytest.mark.parametrize("kept", [*TOLERANCE], ids=str)
def test_one_wrong_token_in_a_long_pass_is_too_far_off(kept: torch.dtype) -> None:
    torch.manual_seed(0)
    right = torch.randn(48, 2, 64).to(kept).float()
    wrong = right.clone()
    wrong[17] = torch.randn(2, 64).to(kept).float()
    found = kv_exactness((wrong, right), (right, right), kept)
    same = kv_exactness((right, right), (right, right), kept)
    assert not found.as_good_as(same, Bound.of_pass(kept))


def test_comparisons_add_up_and_the_worst_is_found() -> None:
    k = torch.ones(2, 1, 8)
    one = kv_exactness((k, k), (k, k), torch.float32)
    two = kv_exactness((k + 1, k), (k, k), torch.float32)
    assert combined([one, two]).k.values == 32
    assert combined([one, two]).k.unequal == worst_of([one, two]).k.unequal == 16
    assert worst_of([one, two]).k.values == 16
    assert str(one) == "K 100% equal, 0 ulp, V 100% equal, 0 ulp"
    assert str(SOME) == "99% equal, 6 ulp"


def test_every_codec_has_a_tolerance_and_those_that_lose_nothing_have_none() -> None:
    """A server that asks for that of another one ends its start."""
    codecs = {codec.name: codec.lossless for codec in (*CODECS.values(), *SEGMENT_CODECS.values())}
    assert {name: added == 0 for name, added in CODEC_TOLERANCE.items()} == codecs
