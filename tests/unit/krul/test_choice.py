"""The pairs of a page, and what it takes to find them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.statistics import PROBE_TOKENS, AttentionSums, LayerProbe, attention_sums

LAYERS = 6
EVERY = {(low, high) for high in range(LAYERS) for low in range(high)}


def attention(distances: dict[tuple[int, int], float], masses: list[float]) -> AttentionSums:
    squared = torch.full((LAYERS, LAYERS), 9.0, dtype=torch.float64)
    for (low, high), distance in distances.items():
        squared[low, high] = squared[high, low] = distance**2
    return AttentionSums(1, torch.tensor(masses, dtype=torch.float64), squared)


CLOSE = {(0, 3): 0.1, (3, 4): 0.2, (1, 5): 0.3, (2, 4): 0.4}
I_R = [0.9, 0.7, 0.6, 0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("mergeable", "gamma", "ratio", "pairs"),
    [
        (EVERY, 0.5, 1.0, [(0, 3, "merged"), (1, 5, "merged")]),
        (EVERY - {(0, 3)}, 0.5, 1.0, [(1, 5, "merged"), (3, 4, "merged")]),
        (EVERY, 0.75, 1.0, [(0, 3, "merged"), (4, 5, "fp8")]),  # 0, 3 and 4 are I-R layers
        (EVERY, 0.5, 0.3, [(0, 3, "merged"), (4, 5, "fp8")]),  # of six layers two are merged
        (set(), 0.5, 1.0, [(2, 3, "fp8"), (4, 5, "fp8")]),
    ],
    ids=["all", "one may not", "I-R layers", "ratio", "none may"],
)
def test_layers_that_attend_alike_are_merged_if_they_may_be(
    mergeable: set[tuple[int, int]],
    gamma: float,
    ratio: float,
    pairs: list[tuple[int, int, str]],
) -> None:
    choice = PairChoice(LAYERS, 2, mergeable, ratio, gamma)
    assert choice.by_attention(attention(CLOSE, I_R)) == tuple(pairs)


@pytest.mark.parametrize("tokens", [512, 4096, 32768])
def test_a_probe_takes_at_most_one_and_a_half_decode_steps(tokens: int) -> None:
    """Of Llama-3-8B, and of as many sequences as a probe has tokens: the forward pass is one such
    step, but for the last layer, which ends before its attention."""
    layers, heads, kv_heads, dim, hidden, wide, words = 32, 32, 8, 128, 4096, 14336, 128256
    per_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * wide
    dense = 2 * PROBE_TOKENS * (layers * per_layer + hidden * words)
    attended = 4 * PROBE_TOKENS * layers * heads * dim * tokens
    kv = torch.empty((tokens, kv_heads, dim), device="meta")
    q = torch.empty((PROBE_TOKENS, heads, dim), device="meta")

    def compared(first: torch.Size, second: torch.Size, *_: object, **__: object) -> int:
        return 3 * math.prod(first) * second[-2]  # subtracted, squared and added

    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._cdist_forward: compared}
    )
    with counter:
        attention_sums([LayerProbe(q, (kv, kv), 1.0)] * layers)
    assert counter.get_flop_counts()["Global"][torch.ops.aten._cdist_forward] > 0
    assert counter.get_total_flops() <= 0.5 * (dense + attended)
