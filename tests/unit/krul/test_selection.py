"""Which layers Krul pairs: Algorithm 1 by hand, and planted layers and pairs that are all found."""

from __future__ import annotations

import random

import pytest
import torch

from bench.accuracy.engine import LayerProbe
from hcache_backend.krul.selection import Strategy, closest_pairs, initial_recent_layers
from hcache_backend.krul.statistics import attention_sums

TOKENS, QUERIES, HEADS = 40, 2, 2

# Distances of six layers. All pairs in ascending order: (2, 4) 1, (1, 4) 2, (0, 1) 3, (3, 5) 4,
# (0, 3) 5, (1, 5) 6, then the others.
BY_HAND = torch.tensor(
    [
        [0.0, 3.0, 9.0, 5.0, 8.0, 7.0],
        [3.0, 0.0, 9.0, 9.0, 2.0, 6.0],
        [9.0, 9.0, 0.0, 8.0, 1.0, 9.0],
        [5.0, 9.0, 8.0, 0.0, 9.0, 4.0],
        [8.0, 2.0, 1.0, 9.0, 0.0, 9.0],
        [7.0, 6.0, 9.0, 4.0, 9.0, 0.0],
    ]
)


@pytest.mark.parametrize(
    ("layers", "ratio", "pairs"),
    [
        # (1, 4) is nearer than (0, 1), but layer 4 is taken.
        ([0, 1, 2, 3, 4, 5], 1.0, ((2, 4), (0, 1), (3, 5))),
        ([0, 1, 2, 3, 4, 5], 0.6, ((2, 4), (0, 1))),
        # Two of six layers are less than half of them; four are not.
        ([0, 1, 2, 3, 4, 5], 0.5, ((2, 4), (0, 1))),
        ([0, 1, 2, 3, 4, 5], 1 / 3, ((2, 4),)),
        ([0, 1, 2, 3, 4, 5], 0.0, ()),
        # Without layer 2, which is no I-R layer, layer 4 is free for layer 1.
        ([0, 1, 3, 4, 5], 1.0, ((1, 4), (3, 5))),
        ([3], 1.0, ()),
    ],
)
def test_pairs_are_the_closest_first_and_each_layer_is_in_one(
    layers: list[int], ratio: float, pairs: tuple[tuple[int, int], ...]
) -> None:
    assert closest_pairs(BY_HAND, layers, ratio) == pairs


def test_layers_are_initial_recent_from_the_threshold_on() -> None:
    assert initial_recent_layers(torch.tensor([0.2, 0.5, 0.9, 0.49]), 0.5) == [1, 2]


def weights(source: random.Random, *, ends: bool) -> torch.Tensor:
    """Attention of all queries and heads, ``[queries, heads, tokens]``: 0.8 of it on the first and
    last tokens, or 0.8 on the middle, spread at random."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    spread = torch.rand(QUERIES, HEADS, TOKENS, generator=generator) ** 4 + 1e-4
    tenth = TOKENS // 10
    # Tokens that are among the last tenth of what one query sees, and not of what all see, get
    # next to nothing.
    first, middle = slice(0, tenth), slice(tenth, TOKENS - tenth - QUERIES)
    last = slice(TOKENS - tenth, TOKENS - QUERIES + 1)
    wanted = torch.full_like(spread, 1e-6)
    outer, inner = (0.4, 0.2) if ends else (0.1, 0.8)
    for part, share in ((first, outer), (last, outer), (middle, inner)):
        wanted[..., part] = share * spread[..., part] / spread[..., part].sum(-1, keepdim=True)
    return wanted


def probe(wanted: torch.Tensor, source: random.Random) -> LayerProbe:
    """A layer that attends as ``wanted``, and a little otherwise; the last tokens are masked."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    scores = wanted.log() + 0.01 * torch.randn(wanted.shape, generator=generator)
    keys = torch.eye(TOKENS)[:, None]  # so that a query's values are its scores
    return LayerProbe(scores, (keys, keys), 1.0)


def test_planted_layers_and_pairs_are_all_found() -> None:
    for case in range(1000):
        source = random.Random(case)
        layers = list(range(source.randint(4, 10)))
        shuffled = source.sample(layers, len(layers))
        alike = source.randint(1, (len(layers) - 2) // 2)
        planted = sorted(tuple(sorted(shuffled[2 * n : 2 * n + 2])) for n in range(alike))
        alone = shuffled[2 * alike : source.randint(2 * alike, len(layers) - 2)]
        others = [layer for layer in layers if layer not in {*sum(planted, ()), *alone}]
        wanted = {pair: weights(source, ends=True) for pair in planted}
        by_layer = {layer: wanted[pair] for pair in planted for layer in pair}
        by_layer |= {layer: weights(source, ends=True) for layer in alone}
        # The other layers attend alike too, but to what they look for.
        middle = weights(source, ends=False)
        by_layer |= dict.fromkeys(others, middle)
        sums = attention_sums([probe(by_layer[layer], source) for layer in layers])
        found = initial_recent_layers(sums.initial_recent, 0.5)
        assert found == sorted(sum(planted, ()) + tuple(alone)), case
        pairs = closest_pairs(sums.distances, found, 2 * alike / len(found))
        assert sorted(pairs) == planted, case


def test_slots_are_in_the_order_of_their_first_layers() -> None:
    strategy = Strategy(6, ((2, 4), (0, 5)))
    assert strategy.slots == ((0, 5), (1,), (2, 4), (3,))
    assert strategy.page_bytes(plain=100, pair=110) == 2 * 100 + 2 * 110


@pytest.mark.parametrize("pairs", [((1, 1),), ((2, 1),), ((0, 6),), ((0, 1), (1, 2))])
def test_a_layer_is_in_one_pair_of_layers_that_there_are(pairs: tuple[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="each in one pair"):
        Strategy(6, pairs)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_share_of_layers_is_from_0_to_1(ratio: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        closest_pairs(BY_HAND, [0, 1], ratio)
