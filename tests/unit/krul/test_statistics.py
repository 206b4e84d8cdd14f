"""How alike layers attend: against whole attention matrices, and in parts that are added."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from bench.accuracy.engine import LayerProbe
from hcache_backend.krul.statistics import PairSums, attention_sums, attention_weights

LAYERS, TOKENS, QUERIES, HEADS, KV_HEADS, DIM = 3, 23, 5, 4, 2, 8


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


def assert_same(found: PairSums, wanted: PairSums) -> None:
    assert found.rows == wanted.rows
    # Distances are computed in float32.
    torch.testing.assert_close(found.mass, wanted.mass, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.squared, wanted.squared, rtol=1e-6, atol=0)


def test_weights_are_those_of_the_models_attention() -> None:
    for layer in probes():
        k, v = layer.kv
        found = attention_weights(layer.q, k, layer.scale)
        queries, keys, values = (part.transpose(0, 1)[None] for part in (layer.q, k, v))
        wanted = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
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
    assert sums.rows == QUERIES * HEADS
    flat = maps.double().flatten(1)
    wanted = (flat[:, None] - flat[None]).norm(dim=2) / (QUERIES * HEADS) ** 0.5
    torch.testing.assert_close(sums.distances, wanted)
    # Queries see 19 to 23 tokens: the first 2, of 21 and more the first 3, and as many last ones.
    mass = torch.zeros(LAYERS, dtype=torch.float64)
    for row, (seen, tenth) in enumerate([(19, 2), (20, 2), (21, 3), (22, 3), (23, 3)]):
        mass += maps[:, :, row, :tenth].sum((1, 2)) + maps[:, :, row, seen - tenth : seen].sum(
            (1, 2)
        )
    torch.testing.assert_close(sums.initial_recent, mass / (QUERIES * HEADS))


def test_sums_of_a_prompt_and_of_generated_tokens_are_added() -> None:
    layers, every = probes(), slice(0, KV_HEADS)
    prompt = attention_sums([part(layer, slice(0, 3), TOKENS - 2, every) for layer in layers])
    decoded = attention_sums([part(layer, slice(3, 5), TOKENS, every) for layer in layers])
    assert_same(prompt + decoded, attention_sums(layers))


def test_two_parts_by_hand() -> None:
    """One head, three tokens. The second token attends evenly to two in layer 0 and to itself in
    layer 1; the third one, generated, evenly to all and to itself."""
    far = 1e4
    k = torch.tensor([[[far, 0.0, 0.0]], [[0.0, far, 0.0]], [[0.0, 0.0, far]]])
    even, itself = torch.zeros(2, 1, 3), torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    layers = [LayerProbe(q, (k, k), 1.0) for q in (even, itself)]
    prompt = attention_sums([LayerProbe(q[:1], (k[:2], k[:2]), 1.0) for q, *_ in layers])
    decoded = attention_sums([LayerProbe(q[1:], (k, k), 1.0) for q, *_ in layers])
    assert prompt.squared[0, 1].item() == pytest.approx(1 / 2)
    assert decoded.squared[0, 1].item() == pytest.approx(2 / 3)
    assert decoded.mass.tolist() == pytest.approx([2 / 3, 1.0])  # of three the first and the last
    both = prompt + decoded
    assert both.rows == 2
    assert both.squared[0, 1].item() == pytest.approx(7 / 6)
    assert both.distances[0, 1].item() == pytest.approx((7 / 12) ** 0.5)
    assert both.initial_recent.tolist() == pytest.approx([5 / 6, 1.0])
    assert_same(attention_sums(layers), both)


def test_sums_of_tensor_parallel_ranks_are_added() -> None:
    layers, queries = probes(), slice(0, QUERIES)
    ranks = [slice(0, 1), slice(1, 2)]
    parts = [[part(layer, queries, TOKENS, heads) for layer in layers] for heads in ranks]
    assert_same(attention_sums(parts[0]) + attention_sums(parts[1]), attention_sums(layers))


def test_two_tokens_are_all_ends() -> None:
    layer = probes()[0]
    short = LayerProbe(layer.q[:2], (layer.kv[0][:2], layer.kv[1][:2]), 1.0)
    assert attention_sums([short]).initial_recent.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("queries", "tokens"), [(4, TOKENS), (QUERIES, TOKENS - 1)], ids=["queries", "tokens"]
)
def test_layers_with_other_shapes_are_refused(queries: int, tokens: int) -> None:
    layers = probes()
    k, v = layers[1].kv
    layers[1] = LayerProbe(layers[1].q[:queries], (k[:tokens], v[:tokens]), 1.0)
    with pytest.raises(ValueError, match="all must have the same"):
        attention_sums(layers)


def test_more_queries_than_tokens_are_refused() -> None:
    layer = probes()[0]
    short = LayerProbe(layer.q, (layer.kv[0][:4], layer.kv[1][:4]), 1.0)
    with pytest.raises(ValueError, match="5 queries of 4 tokens: must be 1 to 4"):
        attention_sums([short])
