"""Costs from shapes and rates, and what they make the search choose."""

from __future__ import annotations

import pytest

from hcache_backend.plan.costs import Partition
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.pipeline import search, simulate
from hcache_backend.plan.presets import (
    BUS_SHARE,
    COMPUTE_SHARE,
    PRESETS,
    preset_profile,
)
from hcache_backend.plan.profile import CopyWay, Rate
from tests.unit.partition.pipelines import layer_costs, makespan, public_model


def opt(**changes: int) -> ModelShape:
    """A layer as in the paper's analysis: MHA, and an MLP of two matrices of 4 D."""
    return public_model("opt-30b").model_copy(update=changes)


# ---- one layer (paper section 3.2) ----


def test_only_recomputation_beside_copies_is_slower_than_alone() -> None:
    profile = preset_profile("h100")
    ways = (
        CopyWay(programs=16, alone=5e10, beside=4e10, products=0.8),
        CopyWay(programs=None, alone=5e10, beside=3e10, products=1.0),
    )
    costs = layer_costs(profile.model_copy(update={"copies": ways}), public_model("gpt2"), 1024)
    alone = layer_costs(profile, public_model("gpt2"), 1024)
    assert costs._replace(slowdown=1.0) == alone  # the profile's rates are beside products already
    whole, mixed = Partition(12, 0, 0), Partition(11, 0, 1)
    assert costs.compute(whole) == alone.compute(whole)
    assert costs.compute(mixed) == pytest.approx(alone.compute(mixed) / 0.8)
    assert simulate(costs, mixed) == pytest.approx(makespan(costs, mixed))


@pytest.mark.parametrize("tokens", [64, 1024, 16384])
def test_a_layer_costs_what_the_paper_counts(tokens: int) -> None:
    model, profile = opt(), preset_profile("a100-40g")
    costs = layer_costs(profile, model, tokens)
    flops, bus, width = 312e12 * COMPUTE_SHARE, 32e9 * BUS_SHARE, model.hidden
    assert costs.io_h == pytest.approx(tokens * width * 2 / bus)
    assert costs.io_kv == pytest.approx(2 * costs.io_h)
    assert costs.c_h == pytest.approx(4 * tokens * width**2 / flops)
    # The paper counts N^2 D for attention; scores and values of the causal half are 2 N^2 D.
    assert costs.c_tok == pytest.approx((24 * tokens * width**2 + 2 * tokens**2 * width) / flops)
    assert costs.c_tok / costs.c_h == pytest.approx(6 + tokens / (2 * width))


def test_recomputation_attends_to_the_prefix() -> None:
    model, profile = opt(), preset_profile("a100-40g")
    alone, after = (layer_costs(profile, model, 1024, prefix=n) for n in (0, 4096))
    pairs = 1024 * 4096
    extra = pairs * 4 * model.hidden / (312e12 * COMPUTE_SHARE)
    assert after.c_tok - alone.c_tok == pytest.approx(extra)
    assert after[:3] == alone[:3]


@pytest.mark.parametrize(
    ("name", "tp", "of_projection"),
    [
        ("llama-2-7b", 1, 3 / 2),  # (heads + 2 KV heads) / (2 KV heads)
        ("llama-2-7b", 4, 3 / 2),
        ("llama-3-8b", 1, (32 + 2 * 8) / (2 * 8)),
        ("llama-3-8b", 16, (2 + 2 * 1) / (2 * 1)),  # a rank has one of 8 KV heads, and 2 queries
    ],
)
def test_the_last_recomputed_layer_can_end_with_its_k_and_v(
    name: str, tp: int, of_projection: float
) -> None:
    model, profile = public_model(name), preset_profile("a100-40g")
    whole = layer_costs(profile, model, 1024, tp=tp)
    early = layer_costs(profile, model, 1024, tp=tp, early_stop=True)
    assert whole.c_tok_last is None
    assert early.c_tok_last == pytest.approx(of_projection * early.c_h)
    assert early._replace(c_tok_last=None) == whole
    assert [whole.recomputation(n) for n in (0, 1, 9)] == [0, whole.c_tok, 9 * whole.c_tok]
    assert early.recomputation(0) == 0
    assert early.recomputation(1) == early.c_tok_last
    assert early.recomputation(9) == pytest.approx(8 * early.c_tok + early.c_tok_last)
    # Attention to what is on the device already is what the last layer leaves out.
    after = layer_costs(profile, model, 1024, tp=tp, prefix=65536, early_stop=True)
    assert after.c_tok_last == early.c_tok_last


def test_ending_early_is_kept_wherever_l3_is() -> None:
    model, profile = opt(), preset_profile("a100-40g", ssds=1)
    none, overlapped, first = (
        layer_costs(profile, model, 1024, l3=l3, early_stop=True)
        for l3 in ("none", "overlapped", "first")
    )
    assert none.c_tok_last == overlapped.c_tok_last == first.c_tok_last is not None


def test_no_layer_takes_longer_for_ending_early() -> None:
    """Rates are measured apart, so that of the projection may be lower than that of a layer."""
    slow = preset_profile("a100-40g").model_copy(update={"projection": Rate(per_second=1e12)})
    costs = layer_costs(slow, opt(), 1024, early_stop=True)
    assert costs.c_tok_last == costs.c_tok


def test_ranks_share_everything_but_l3() -> None:
    model = opt()
    one = layer_costs(preset_profile("a100-40g"), model, 1024)
    four = layer_costs(preset_profile("a100-40g"), model, 1024, tp=4)
    assert [a / b for a, b in zip(one[:4], four[:4], strict=True)] == pytest.approx([4] * 4)
    slow = preset_profile("a100-40g", ssds=4)
    costs = layer_costs(slow, model, 1024, tp=4)
    assert costs.io_h == pytest.approx(1024 * model.hidden_bytes / 27.6e9)


def test_without_nvlink_every_rank_loads_whole_hidden_states() -> None:
    model = opt()
    one, four = (layer_costs(preset_profile("l20"), model, 1024, tp=tp) for tp in (1, 4))
    assert four.io_h == one.io_h
    assert four.io_kv == pytest.approx(one.io_kv / 4)


def test_few_kv_heads_and_latents_are_on_every_rank() -> None:
    profile = preset_profile("h100")
    gqa, mla = public_model("llama-3-8b"), public_model("deepseek-v3")
    one, eight, sixteen = (layer_costs(profile, gqa, 1024, tp=tp) for tp in (1, 8, 16))
    assert eight.io_kv == pytest.approx(one.io_kv / 8)
    assert sixteen.io_kv == eight.io_kv
    assert sixteen.c_h == eight.c_h
    assert sixteen.c_tok == pytest.approx(one.c_tok / 16)
    assert layer_costs(profile, mla, 64, tp=8).io_kv == layer_costs(profile, mla, 64).io_kv


def test_l3_is_the_slower_transfer_or_comes_first() -> None:
    model = opt()
    profile = preset_profile("a100-40g", ssds=1)
    none = layer_costs(profile, model, 1024, l3="none")
    overlapped = layer_costs(profile, model, 1024)
    first = layer_costs(profile, model, 1024, l3="first")
    read = 1024 * model.hidden_bytes / 6.9e9
    assert none.l3_h == overlapped.l3_h == 0
    assert overlapped.io_h == pytest.approx(read)
    assert (first.io_h, first.l3_h) == (none.io_h, pytest.approx(read))
    many = layer_costs(preset_profile("a100-40g", ssds=16), model, 1024)
    assert many.io_h == none.io_h
    assert layer_costs(preset_profile("a100-40g"), model, 1024, l3="first") == none


# ---- what they make the search choose ----


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b"])
@pytest.mark.parametrize("ssds", [0, 1, 4])
def test_gqa_on_an_h200_is_kv_and_recomputation(name: str, ssds: int) -> None:
    model = public_model(name)
    found = search(layer_costs(preset_profile("h200", ssds), model, 1024), model.layers)
    assert found.hidden == 0
    assert found.kv > 0
    assert found.recompute > 0


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b", "opt-30b"])
@pytest.mark.parametrize("preset", PRESETS)
def test_hidden_states_pay_for_mha_on_every_machine(preset: str, name: str) -> None:
    model = public_model(name)
    costs = layer_costs(preset_profile(preset), model, 1024)
    found = search(costs, model.layers)
    assert found.hidden > 0
    kv_only = simulate(costs, Partition(0, 0, model.layers))
    assert kv_only / simulate(costs, found) > 1.15


def test_the_papers_machines_have_the_rates_of_its_table_2() -> None:
    table_2 = {"a100-40g": (312, 32), "a30": (165, 32), "l20": (120, 32), "h800": (990, 64)}
    for name, (teraflops, bus) in table_2.items():
        assert (PRESETS[name].flops, PRESETS[name].bus) == (teraflops * 1e12, bus * 1e9)
    # 330 in the paper, with FP16 accumulation
    assert PRESETS["rtx4090"].flops == pytest.approx(330e12 / 2, rel=0.01)
