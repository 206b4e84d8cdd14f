"""`hcache plan` without options is what a server with default options stores, takes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hcache_backend.config import HCacheConfig
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.model_shape import ModelShape, PlannedCodec, encoded
from hcache_backend.plan.plan import PartitionPlan, RestorePath
from hcache_backend.plan.profile import Rate, preset_profile
from hcache_backend.plan.restore import CHUNK_TOKENS, Restore
from hcache_backend.prefetch.hit import Recomputing
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.start.capabilities import EAGER, Server, refusal
from hcache_backend.start.machine import model_shape
from hcache_backend.start.page_plan import encoded_share, wanted_codec
from tests.engine.in_process.start.servers import server
from tests.unit.hits.gates import Gate, takes
from tests.unit.partition.pipelines import CONFIGS, public_model

CONFIG = HCacheConfig()
PAGE = 64
MODELS = ["llama-2-7b", "llama-2-13b", "llama-3-8b", "qwen3-8b", "deepseek-v3"]
L3_RATES = [12.5e6, 125e6, 690e6, 6.9e9, 12.5e9, 55e9]
"""Bytes per second: networks of 0.1, 1, 5.5 and 100 Gbit/s, an SSD, eight of them."""


def stored_shape(name: str, tp: int, codec: PlannedCodec = "auto") -> ModelShape:
    dtype = read_model(CONFIGS / f"{name}.json").dtype
    return encoded(public_model(name), codec, dtype, tp=tp, page_size=PAGE)


def planned(name: str, tp: int, rate: float, tokens: int, restore: RestorePath) -> PartitionPlan:
    profile = preset_profile("h100").model_copy(update={"l3": Rate(per_second=rate)})
    return PartitionPlan(profile, stored_shape(name, tp), tokens, tp, restore)


def slices(plan: PartitionPlan) -> Recomputing:
    """How long an idle server takes for the front of a hit once it has measured a slice."""
    most = CHUNK_TOKENS
    methods = Restore(plan.profile, plan.model, plan.stored, chunk_tokens=most, ranks=plan.tp)
    budget = SliceBudget(CONFIG.recompute_ms / 1e3, most, methods.recompute, in_seconds=True)
    return lambda tokens, prefix: budget.seconds(tokens, PAGE, prefix)


def gate_takes(plan: PartitionPlan) -> bool:
    asked, config = server(tp_size=plan.tp), HCacheConfig(restore=plan.restore)
    if plan.model.latent:
        asked.kvcache.kv_lora_rank = plan.model.latent.rank
    exchanges = plan.tp > 1 and bool(plan.stored.hidden or plan.model.latent)
    refused = refusal(EAGER, replace(asked, config=config, exchanges=exchanges))
    machine = Restore(plan.profile, plan.model, plan.stored, plan.tp)
    gate = Gate(machine, CONFIG.min_gain)
    gate._trials[0].last_read = 100.0  # none is due
    return takes(gate, "a", plan.tokens, recomputing=slices(plan) if refused is None else None)


@pytest.mark.parametrize("restore", ["auto", "layerwise"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_server_refuses_what_the_plan_refuses(name: str, tp: int, restore: RestorePath) -> None:
    plans = [
        planned(name, tp, rate, tokens, restore)
        for rate in L3_RATES
        for tokens in (1024, 4096, 16384)
    ]
    expected = [not plan.refused for plan in plans]
    assert [gate_takes(plan) for plan in plans] == expected
    assert any(expected) and not all(expected)


@pytest.mark.parametrize("codec", ["auto", "none", "exp3", "exp4", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_the_bytes_of_a_server(name: str, tp: int, codec: PlannedCodec) -> None:
    shape, path = public_model(name), CONFIGS / f"{name}.json"
    dtype: torch.dtype = getattr(torch, read_model(path).dtype)
    kvcache = SimpleNamespace(layer_num=shape.layers, page_size=PAGE, dtype=dtype)
    if shape.latent:
        kvcache.kv_lora_rank = shape.latent.rank
        kvcache.kv_buffer = [torch.empty((1, 1, shape.kv_width), dtype=dtype)] * shape.layers
    else:
        heads = torch.empty((1, shape.kv_heads // tp, shape.head_dim), dtype=dtype)
        kvcache.k_buffer = kvcache.v_buffer = [heads] * shape.layers
    table = json.loads(path.read_text())
    config = SimpleNamespace(to_dict=lambda: table)
    runner = SimpleNamespace(
        dtype=dtype,
        model_config=SimpleNamespace(
            hf_config=config,
            hidden_size=shape.hidden,
            get_num_kv_heads=lambda ranks: shape.kv_heads // ranks,
        ),
    )
    options = HCacheConfig(codec=codec)
    row_bytes = wanted_codec(options, runner).row_bytes
    kv_share = encoded_share(Server(runner, options, kvcache), 1)
    server = model_shape(runner, kvcache, row_bytes, kv_share)
    assert server is not None
    plan = stored_shape(name, tp, codec)
    assert plan.kv_bytes == server.kv_bytes
    assert shape.latent or plan.hidden_bytes == server.hidden_bytes
    if codec in ("auto", "exp3", "exp4") and dtype == torch.bfloat16:
        width = shape.kv_heads // tp * shape.head_dim  # units have 65,536 values at most
        three = codec != "exp4" and not shape.latent and width <= 2048
        share = (0.717 if width <= 1024 else 0.725) if three else 0.766
        assert plan.kv_bytes == pytest.approx(share * shape.kv_bytes, rel=0.002)


def test_a_server_has_as_many_kv_heads_as_sglang_says() -> None:
    """A field of a new family may be unknown here."""
    table = json.loads((CONFIGS / "qwen3-8b.json").read_text())
    table["groups_of_heads"] = table.pop("num_key_value_heads")
    kvcache = SimpleNamespace(layer_num=36, dtype=torch.bfloat16)
    config = SimpleNamespace(to_dict=lambda: table)
    asked = SimpleNamespace(hf_config=config, get_num_kv_heads=lambda ranks: 8 // ranks)
    shape = model_shape(SimpleNamespace(dtype=torch.bfloat16, model_config=asked), kvcache)
    assert shape is not None and (shape.heads, shape.kv_heads) == (32, 8)
