"""Splitting by tokens, and why layers are better."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper import makespan
from bench.token_wise import TILE, TokenSplit, token_wise_costs, token_wise_makespan
from hcache_backend.partition.costs import LayerCosts, Partition, layer_costs
from hcache_backend.partition.pipeline import search
from hcache_backend.partition.presets import preset_profile
from hcache_backend.partition.profile import Profile, Rate
from tests.unit.partition.pipelines import machine_of, public_model

TOKENS = 8 * TILE
MODEL = public_model("opt-350m")

rates = st.builds(
    lambda seconds, per_second: Rate(seconds=seconds, per_second=per_second),
    st.just(0.0) | st.floats(0, 1e-4),
    st.floats(1e9, 1e15),
)
profiles = st.builds(machine_of, st.none() | rates, *[rates] * 5)


@st.composite
def splits(draw: st.DrawFn) -> TokenSplit:
    """Hidden states with one other method."""
    hidden = draw(st.integers(0, TOKENS))
    if draw(st.booleans()):
        return TokenSplit(0, hidden, TOKENS - hidden)
    return TokenSplit(TOKENS - hidden, hidden, 0)


@given(profiles, st.booleans())
def test_one_method_for_all_tokens_is_one_method_for_all_layers(
    profile: Profile, first: bool
) -> None:
    costs = layer_costs(profile, MODEL, TOKENS)
    for split, partition in (
        (TokenSplit(TOKENS, 0, 0, first), Partition(MODEL.layers, 0, 0)),
        (TokenSplit(0, TOKENS, 0, first), Partition(0, MODEL.layers, 0)),
        (TokenSplit(0, 0, TOKENS, first), Partition(0, 0, MODEL.layers)),
    ):
        seconds = token_wise_makespan(profile, MODEL, split)
        assert seconds == pytest.approx(makespan(costs, partition))


@given(profiles, splits())
@settings(max_examples=200)
def test_no_split_by_tokens_is_faster_than_layers(profile: Profile, split: TokenSplit) -> None:
    """Eight tiles of tokens and 24 layers: as tiles can be split, layers can too.

    Except for filling the pipeline, which takes one layer's transfer or projection where a split by
    tokens has shorter ones.
    """
    costs = layer_costs(profile, MODEL, TOKENS)
    by_layers = costs.least(search(costs, MODEL.layers, LayerCosts.least))
    assert by_layers <= token_wise_makespan(profile, MODEL, split) * (1 + 1e-9)


@given(profiles, splits())
def test_part_of_a_tile_costs_a_tile(profile: Profile, split: TokenSplit) -> None:
    costs = token_wise_costs(profile, MODEL, split)
    hidden, others = (-(-n // TILE) * TILE for n in (split.hidden, split.recompute))
    whole = token_wise_costs(profile, MODEL, TokenSplit(others, hidden, split.kv))
    assert costs.c_h == whole.c_h
    assert costs.io_h <= whole.io_h
    if split.recompute:  # the tokens before it, which it attends to, are not rounded
        assert costs.c_tok <= whole.c_tok
    first, whole_first = (
        token_wise_costs(profile, MODEL, TokenSplit(n, 0, 0, recompute_first=True))
        for n in (split.recompute, others)
    )
    assert first.c_tok == whole_first.c_tok


def test_the_last_tokens_attend_to_all_the_first_ones_to_each_other() -> None:
    profile = preset_profile("a100-40g", ssds=1)
    last, first = (
        token_wise_costs(profile, MODEL, TokenSplit(TILE, TOKENS, 3 * TILE, recompute_first))
        for recompute_first in (False, True)
    )
    assert last.c_tok == layer_costs(profile, MODEL, TILE, prefix=TOKENS + 3 * TILE).c_tok
    assert first.c_tok == layer_costs(profile, MODEL, TILE).c_tok
    assert last[:3] == first[:3]


@given(profiles, splits())
def test_the_first_tokens_are_recomputed_faster_than_the_last(
    profile: Profile, split: TokenSplit
) -> None:
    first = TokenSplit(split.recompute, split.hidden, split.kv, recompute_first=True)
    by_first, by_last = (token_wise_makespan(profile, MODEL, each) for each in (first, split))
    assert by_first <= by_last * (1 + 1e-9)
