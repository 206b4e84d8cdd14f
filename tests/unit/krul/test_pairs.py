"""Which layers are alike, and which are paired: by hand, planted, and by whole attention maps."""

import math
import random

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.utils.flop_counter import FlopCounterMode

from bench.accuracy.engine import LayerProbe
from hcache_backend.krul.pairs import (
    OBSERVED_TOKENS,
    PairChoice,
    PairSums,
    attention_sums,
    attention_weights,
    closest_pairs,
    initial_recent_layers,
)

LAYERS, TOKENS, QUERIES, HEADS, KV_HEADS, DIM = 3, 23, 5, 4, 2, 8
LONG = 40

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
        ([0, 1, 2, 3, 4, 5], 1.0, [(2, 4), (0, 1), (3, 5)]),
        ([0, 1, 2, 3, 4, 5], 0.6, [(2, 4), (0, 1)]),
        # Two of six layers are less than half of them; four are not.
        ([0, 1, 2, 3, 4, 5], 0.5, [(2, 4), (0, 1)]),
        ([0, 1, 2, 3, 4, 5], 1 / 3, [(2, 4)]),
        ([0, 1, 2, 3, 4, 5], 0.0, []),
        # Without layer 2, which is no I-R layer, layer 4 is free for layer 1.
        ([0, 1, 3, 4, 5], 1.0, [(1, 4), (3, 5)]),
        ([3], 1.0, []),
    ],
)
def test_pairs_are_the_closest_first_and_each_layer_is_in_one(
    layers: list[int], ratio: float, pairs: list[tuple[int, int]]
) -> None:
    assert closest_pairs(BY_HAND, layers, ratio) == pairs


def test_layers_are_initial_recent_from_the_threshold_on() -> None:
    assert initial_recent_layers(torch.tensor([0.2, 0.5, 0.9, 0.49]), 0.5) == [1, 2]


def weights(source: random.Random, *, ends: bool) -> torch.Tensor:
    """Attention of all queries and heads, ``[queries, heads, tokens]``: 0.8 of it on the first and
    last tokens, or 0.8 on the middle, spread at random."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    spread = torch.rand(2, 2, LONG, generator=generator) ** 4 + 1e-4
    tenth = LONG // 10
    # Tokens that are among the last tenth of what one query sees, and not of what all see, get
    # next to nothing.
    first, middle = slice(0, tenth), slice(tenth, LONG - tenth - 2)
    last = slice(LONG - tenth, LONG - 2 + 1)
    wanted = torch.full_like(spread, 1e-6)
    outer, inner = (0.4, 0.2) if ends else (0.1, 0.8)
    for part, shard in ((first, outer), (last, outer), (middle, inner)):
        wanted[..., part] = shard * spread[..., part] / spread[..., part].sum(-1, keepdim=True)
    return wanted


def probe(wanted: torch.Tensor, source: random.Random) -> LayerProbe:
    """A layer that attends as ``wanted``, and a little otherwise; the last tokens are masked."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    scores = wanted.log() + 0.01 * torch.randn(wanted.shape, generator=generator)
    keys = torch.eye(LONG)[:, None]  # so that a query's values are its scores
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


EVERY = {(low, high) for high in range(6) for low in range(high)}


def attention(distances: dict[tuple[int, int], float], masses: list[float]) -> PairSums:
    squared = torch.full((6, 6), 9.0, dtype=torch.float64)
    for (low, high), distance in distances.items():
        squared[low, high] = squared[high, low] = distance**2
    mass = torch.tensor(masses, dtype=torch.float64)
    return PairSums(torch.vstack((torch.ones_like(mass), mass, squared)))


CLOSE = {(0, 3): 0.1, (3, 4): 0.2, (1, 5): 0.3, (2, 4): 0.4}
I_R = [0.9, 0.7, 0.6, 0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("mergeable", "gamma", "ratio", "pairs"),
    [
        (EVERY, 0.5, 1.0, [(0, 3, "merged"), (1, 5, "merged")]),
        (EVERY - {(0, 3)}, 0.5, 1.0, [(1, 5, "merged"), (3, 4, "merged")]),
        (EVERY, 0.75, 1.0, [(0, 3, "merged"), (4, 5, "int8")]),  # 0, 3 and 4 are I-R layers
        (EVERY, 0.5, 0.3, [(0, 3, "merged"), (4, 5, "int8")]),  # of six layers two are merged
        (set(), 0.5, 1.0, [(2, 3, "int8"), (4, 5, "int8")]),
    ],
    ids=["all", "one may not", "I-R layers", "ratio", "none may"],
)
def test_layers_that_attend_alike_are_merged_if_they_may_be(
    mergeable: set[tuple[int, int]], gamma: float, ratio: float, pairs: list[tuple[int, int, str]]
) -> None:
    choice = PairChoice(6, 2, mergeable, ratio, gamma)
    assert choice.by_distance(attention(CLOSE, I_R)) == tuple(pairs)


def decode_step(tokens: int) -> int:
    """Operations of one of Llama-3-8B, with as many sequences of ``tokens`` as a probe has queries.

    The forward pass of a probe is such a step, but for the last layer, which ends before attention.
    """
    per_layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
    dense = 2 * OBSERVED_TOKENS * (32 * per_layer + 4096 * 128256)
    return dense + 4 * OBSERVED_TOKENS * 32 * 32 * 128 * tokens


def probed(tokens: int) -> list[LayerProbe]:
    kv = torch.empty((tokens, 8, 128), device="meta")
    return [LayerProbe(torch.empty((OBSERVED_TOKENS, 32, 128), device="meta"), (kv, kv), 1.0)] * 32


def compared(first: torch.Size, second: torch.Size, *_: object, **__: object) -> int:
    return 3 * math.prod(first) * second[-2]  # subtracted, squared and added


@pytest.mark.parametrize("tokens", [512, pytest.param(32768, marks=pytest.mark.long)])
def test_a_probe_takes_at_most_one_and_a_half_decode_steps(tokens: int) -> None:
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._cdist_forward: compared}
    )
    with counter:
        attention_sums(probed(tokens))
    assert counter.get_flop_counts()["Global"][torch.ops.aten._cdist_forward] > 0
    assert counter.get_total_flops() <= 0.5 * decode_step(tokens)


def probes() -> list[LayerProbe]:
    source = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    return [
        LayerProbe(
            values(QUERIES, HEADS, DIM),
            (values(TOKENS, KV_HEADS, DIM), values(TOKENS, KV_HEADS, DIM)),
            DIM**-0.5,
        )
        for _ in range(LAYERS)
    ]


def part(layer: LayerProbe, queries: slice, seen: int, kv_heads: slice) -> LayerProbe:
    """Some queries of a layer, which see ``seen`` tokens, in the heads of some KV heads."""
    group = HEADS // KV_HEADS
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    k, v = (values[:seen, kv_heads] for values in layer.kv)
    return LayerProbe(layer.q[queries, heads], (k, v), layer.scale)


def test_weights_are_those_of_the_models_attention() -> None:
    for layer in probes():
        k, v = layer.kv
        found = attention_weights(layer.q, k, layer.scale)
        wanted = functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (layer.q, k, v)),
            attn_mask=causal_lower_right(QUERIES, TOKENS),
            scale=layer.scale,
            enable_gqa=True,
        )
        output = found @ v.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, dim=0)
        torch.testing.assert_close(output, wanted[0])


def test_sums_are_those_of_whole_attention_matrices() -> None:
    layers = probes()
    maps = torch.stack([attention_weights(layer.q, layer.kv[0], layer.scale) for layer in layers])
    sums = attention_sums(layers)
    assert (sums.table[0] == QUERIES * HEADS).all()
    flat = maps.double().flatten(1)
    wanted = (flat[:, None] - flat[None]).norm(dim=2) / (QUERIES * HEADS) ** 0.5
    torch.testing.assert_close(sums.distances, wanted)
    # Queries see 19 to 23 tokens: the first 2, of 21 and more the first 3, and as many last ones.
    mass = torch.zeros(LAYERS, dtype=torch.float64)
    for row, (seen, tenth) in enumerate([(19, 2), (20, 2), (21, 3), (22, 3), (23, 3)]):
        for ends in (slice(0, tenth), slice(seen - tenth, seen)):
            mass += maps[:, :, row, ends].sum((1, 2))
    torch.testing.assert_close(sums.initial_recent, mass / (QUERIES * HEADS))


def test_sums_of_prompt_and_generated_tokens_and_of_ranks_are_added() -> None:
    layers, heads, queries = probes(), slice(0, KV_HEADS), slice(0, QUERIES)
    tokens = (slice(0, 3), TOKENS - 2, heads), (slice(3, 5), TOKENS, heads)
    ranks = (queries, TOKENS, slice(0, 1)), (queries, TOKENS, slice(1, 2))
    for cuts in (tokens, ranks):
        added = sum(attention_sums([part(one, *cut) for one in layers]).table for cut in cuts)
        # Distances are computed in float32.
        torch.testing.assert_close(added, attention_sums(layers).table, rtol=1e-6, atol=0)


def test_two_tokens_are_all_ends() -> None:
    layer = probes()[0]
    short = LayerProbe(layer.q[:2], (layer.kv[0][:2], layer.kv[1][:2]), 1.0)
    assert attention_sums([short]).initial_recent.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("queries", "tokens", "others"),
    [(4, TOKENS, 1), (QUERIES, TOKENS - 1, 1), (QUERIES, 4, LAYERS)],
    ids=["queries", "tokens", "more queries than tokens"],
)
def test_layers_that_cannot_be_compared_are_refused(queries: int, tokens: int, others: int) -> None:
    layers = probes()
    for n, (q, (k, v), scale) in enumerate(layers[:others]):
        layers[n] = LayerProbe(q[:queries], (k[:tokens], v[:tokens]), scale)
    with pytest.raises(ValueError, match="cannot be compared"):
        attention_sums(layers)
