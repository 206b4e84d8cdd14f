"""Costs of the paper and of the presets. The arithmetic of all other costs: test_one_model.py."""

from __future__ import annotations

import pytest

from hcache_backend.plan.costs import Partition
from hcache_backend.plan.pipeline import search, simulate
from hcache_backend.plan.presets import BUS_SHARE, COMPUTE_SHARE, PRESETS, preset_profile
from tests.unit.partition.pipelines import layer_costs, public_model


@pytest.mark.parametrize("tokens", [64, 1024, 16384])
def test_a_layer_costs_what_the_paper_counts(tokens: int) -> None:
    """Section 3.2: MHA, and an MLP of two matrices of 4 D."""
    model, profile = public_model("opt-30b"), preset_profile("a100-40g")
    costs = layer_costs(profile, model, tokens)
    flops, bus, width = 312e12 * COMPUTE_SHARE, 32e9 * BUS_SHARE, model.hidden
    assert costs.io_h == pytest.approx(tokens * width * 2 / bus)
    assert costs.io_kv == pytest.approx(2 * costs.io_h)
    assert costs.c_h == pytest.approx(4 * tokens * width**2 / flops)
    # The paper counts N^2 D for attention; scores and values of the causal half are 2 N^2 D.
    assert costs.c_tok == pytest.approx((24 * tokens * width**2 + 2 * tokens**2 * width) / flops)
    assert costs.c_tok / costs.c_h == pytest.approx(6 + tokens / (2 * width))


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
    assert [preset_profile(name).gathers for name in ("h800", "l20")] == [True, False]  # NVLink
    l3 = preset_profile("a100-40g", ssds=4).l3
    assert l3 is not None and l3.per_second == pytest.approx(27.6e9)
    assert preset_profile("a100-40g").l3 is None
