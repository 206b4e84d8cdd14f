"""The pairs of a page, and what it takes to find them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.accuracy.engine import LayerProbe
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.statistics import PROBE_TOKENS, PairSums, attention_sums

LAYERS = 6
DEEP, HEADS, KV_HEADS, DIM, HIDDEN = 32, 32, 8, 128, 4096
EVERY = {(low, high) for high in range(LAYERS) for low in range(high)}


def attention(distances: dict[tuple[int, int], float], masses: list[float]) -> PairSums:
    squared = torch.full((LAYERS, LAYERS), 9.0, dtype=torch.float64)
    for (low, high), distance in distances.items():
        squared[low, high] = squared[high, low] = distance**2
    mass = torch.tensor(masses, dtype=torch.float64)
    return PairSums(1, mass, squared)


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
    assert choice.by_distance(attention(CLOSE, I_R)) == tuple(pairs)


def decode_step(tokens: int) -> int:
    """Operations of one of Llama-3-8B, with as many sequences of ``tokens`` as a probe has queries.

    The forward pass of a probe is such a step, but for the last layer, which ends before attention.
    """
    per_layer = HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * 14336
    dense = 2 * PROBE_TOKENS * (DEEP * per_layer + HIDDEN * 128256)
    return dense + 4 * PROBE_TOKENS * DEEP * HEADS * DIM * tokens


def probed(tokens: int) -> list[LayerProbe]:
    kv = torch.empty((tokens, KV_HEADS, DIM), device="meta")
    return [
        LayerProbe(torch.empty((PROBE_TOKENS, HEADS, DIM), device="meta"), (kv, kv), 1.0)
    ] * DEEP


def compared(first: torch.Size, second: torch.Size, *_: object, **__: object) -> int:
    return 3 * math.prod(first) * second[-2]  # subtracted, squared and added


@pytest.mark.parametrize("tokens", [512, 4096, 32768])
def test_a_probe_takes_at_most_one_and_a_half_decode_steps(tokens: int) -> None:
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._cdist_forward: compared}
    )
    with counter:
        attention_sums(probed(tokens))
    assert counter.get_flop_counts()["Global"][torch.ops.aten._cdist_forward] > 0
    assert counter.get_total_flops() <= 0.5 * decode_step(tokens)
