"""What own pages refuse, hidden mode on CUDA only, and recomputation, asked without a GPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs

from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import Staging
from hcache_backend.config import HCacheConfig
from hcache_backend.plan.costs import Partition
from hcache_backend.plan.restore import Restore
from hcache_backend.start import recompute_check, refusals, self_check
from hcache_backend.start.agreement import Refused
from hcache_backend.start.strategy import OwnPagesStrategy


def server(monkeypatch: pytest.MonkeyPatch, prefill: str) -> tuple[Any, Any]:
    """A runtime and a KV pool as refusals look at them, on a GPU with prefill graphs of a kind."""
    graphs = SimpleNamespace(
        decode=SimpleNamespace(backend="full"), prefill=SimpleNamespace(backend=prefill)
    )
    arguments = SimpleNamespace(
        enable_lora=False,
        lora_paths=None,
        speculative_algorithm=None,
        enable_dp_attention=False,
        hicache_host_memory_mode="default",
        disaggregation_mode="null",
        enable_pd_role_switch=False,
        enable_two_batch_overlap=False,
        enable_torch_compile=False,
    )
    runner = SimpleNamespace(
        server_args=arguments, model_config=SimpleNamespace(model_is_mrope=False)
    )
    pool = SimpleNamespace(
        device="cuda",
        dtype=torch.bfloat16,
        k_buffer=[torch.empty(1, 1, 1)],
        k_scale_buffer=None,
        quant_method=SimpleNamespace(),
    )
    monkeypatch.setattr(refusals, "resolved", lambda args: args)
    monkeypatch.setattr(refusals, "graphs_are_off", lambda: False)
    monkeypatch.setattr(refusals, "_graphs", lambda: graphs)
    return SimpleNamespace(runner=runner), pool


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [("breakable", None), ("full", "full prefill graphs"), ("tc_piecewise", "compiled")],
)
def test_prefill_graphs_that_would_not_wait_for_a_restore(
    monkeypatch: pytest.MonkeyPatch, prefill: str, reason: str | None
) -> None:
    said = refusals.refusal(*server(monkeypatch, prefill))
    assert said is None if reason is None else reason in str(said)


def test_a_pool_that_grows_after_graphs_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    with envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.override(True):
        said = refusals.own_pages_refusal(*server(monkeypatch, "full"))
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in str(said)


@pytest.mark.parametrize(
    ("arguments", "pool", "reason"),
    [
        ({}, {}, None),
        ({"enable_lora": True, "enable_two_batch_overlap": True}, {}, None),
        ({"enable_torch_compile": True}, {}, None),
        ({"speculative_algorithm": "EAGLE"}, {}, None),
        ({"speculative_algorithm": "DFLASH"}, {}, "speculative decoding by DFLASH, not by EAGLE"),
        ({"enable_dp_attention": True}, {}, None),
        ({"attn_cp_size": 2}, {}, "context-parallel"),
        ({"hicache_host_memory_mode": "buffer_only"}, {}, None),
        ({"disaggregation_mode": "prefill"}, {}, None),
        ({"disaggregation_mode": "decode"}, {}, "decodes for prefill servers"),
        ({"enable_pd_role_switch": True}, {}, "may after a role switch"),
        ({}, {"dtype": torch.int8}, "KV quantised as torch.int8"),
        ({}, {"k_scale_buffer": [torch.empty(1)]}, "scales in buffers of their own"),
        ({}, {"quant_method": SimpleNamespace(k_scales_gpu=1)}, "scales in buffers of their own"),
        # [pages, heads, page_size, head_dim]: slots are no rows.
        ({}, {"k_buffer": [torch.empty(1, 1, 1, 1)]}, "not [slots, heads, head_dim]"),
    ],
)
def test_servers_that_keep_plain_pages(
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    pool: dict[str, Any],
    reason: str | None,
) -> None:
    runtime, kvcache = server(monkeypatch, "full")  # which no copy of K and V minds
    vars(runtime.runner.server_args).update(arguments)
    vars(kvcache).update(pool)
    said = refusals.own_pages_refusal(runtime, kvcache)
    assert said is None if reason is None else reason in str(said)


def test_layers_of_a_draft_that_are_packed_behind_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, kvcache = server(monkeypatch, "full")
    runtime.runner.mtp_draft_device_pools = (object(),)
    said = refusals.own_pages_refusal(runtime, kvcache)
    assert "nobody would save the draft's layers" in str(said)


@pytest.mark.parametrize(
    ("arguments", "trees"),
    [
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, False),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, True),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, False),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10}, True),
    ],
)
def test_rows_of_trees_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], trees: bool
) -> None:
    """An accepted token may have the place and the position of another one that was captured."""
    runtime, kvcache = server(monkeypatch, "breakable")
    vars(runtime.runner.server_args).update(arguments)
    said = refusals.refusal(runtime, kvcache)
    assert ("by trees" in str(said)) if trees else said is None


def test_models_of_several_kinds_of_inputs_are_stored_and_not_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token ids of an image say nothing of its embeddings."""
    monkeypatch.setattr(recompute_check, "attention_ranks", lambda: SimpleNamespace(cpu_group=None))
    runner = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=True))
    runtime: Any = SimpleNamespace(runner=runner, recomputation=None, config=HCacheConfig())
    probe: Any = SimpleNamespace()
    kvcache = SimpleNamespace(dtype=torch.bfloat16, start_layer=0, layer_num=2)
    methods = Restore(None, None, Partition(1, 1, 0), chunk_tokens=1024)
    find = partial(recompute_check.find_recomputer, runtime, probe, kvcache, methods, whole=False)
    assert find() is None
    why = "the model's embeddings are not those of token ids alone"
    assert runtime.recomputation == f"none: {why}"
    runtime.config = HCacheConfig(recompute="never")
    assert find() is None
    assert runtime.recomputation == "none: option 'recompute'"


@pytest.mark.parametrize(
    ("backend", "pdmux", "rows", "why"),
    [
        ("torch_native", False, [1, 2], "attention backend 'torch_native' waits for the GPU"),
        ("flex_attention", False, [1, 2], "attention backend 'flex_attention' waits for the GPU"),
        ("fa3", False, [1, 2], None),
        ("flashinfer", False, [1, 2], "attention backend 'flashinfer' waits for the GPU"),
        ("triton", True, [1, 2], "--enable-pdmux interrupts prefills"),
        ("triton", False, [0, 1], "SGLang gives row 0 of its table to requests"),
    ],
)
def test_attention_that_cannot_be_planned_beside_sglangs_own_passes(
    backend: str, pdmux: bool, rows: list[int], why: str | None
) -> None:
    runner = SimpleNamespace(
        device="cuda",
        attn_backend=SimpleNamespace(prefill_attention_backend_str=backend),
        server_args=SimpleNamespace(enable_pdmux=pdmux),
        req_to_token_pool=SimpleNamespace(free_slots=rows),
    )
    if why is None:
        recompute_check.refuse_attention(runner)
    else:
        with pytest.raises(Refused, match=why):
            recompute_check.refuse_attention(runner)


def test_on_a_cpu_no_attention_waits_for_a_gpu() -> None:
    runner = SimpleNamespace(
        device="cpu",
        attn_backend=SimpleNamespace(prefill_attention_backend_str="torch_native"),
        server_args=SimpleNamespace(enable_pdmux=False),
        req_to_token_pool=SimpleNamespace(free_slots=[1, 2]),
    )
    recompute_check.refuse_attention(runner)


def _by_token(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.abs().amax(-1, keepdim=True)


def _by_batch(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.abs().amax()


def _not_a_number(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.nan


@pytest.mark.parametrize(
    ("way", "depends"), [(_by_token, False), (_by_batch, True), (_not_a_number, True)]
)
@pytest.mark.parametrize("named", [False, True])
def test_modules_are_asked_whether_a_token_depends_on_the_others(
    way: Any, depends: bool, named: bool
) -> None:
    module = SimpleNamespace(forward=lambda x: (way(x), None))
    rows, asked = torch.randn(8, 4), dict[str, bool]()
    self_check._ask_beside(asked, "qkv", module, *(((), {"x": rows}) if named else ((rows,), {})))
    assert asked == {"qkv": depends}
    probe = self_check.Probe((), (), rows, rows, rows, ("layers.0.mlp",) if depends else ())
    probe.refuse_dependence(["layers.0.attention."])
    with (
        pytest.raises(Refused, match=r"the output of layers\.0\.mlp") if depends else nullcontext()
    ):
        probe.refuse_dependence()


def test_modules_that_receive_quantised_rows_are_not_asked() -> None:
    """They count as dependent: nobody knows the rows before they were quantised."""
    asked = dict[str, bool]()
    rows = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
    self_check._ask_beside(asked, "qkv", SimpleNamespace(), (rows,), {})
    assert asked == {}


def test_modules_whose_kernels_share_a_workspace() -> None:
    plain, marlin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    marlin.workspace = torch.zeros(4)
    refusals.refuse_shared_workspaces([torch.nn.Sequential(plain)], "projecting")
    with pytest.raises(Refused, match="projecting beside forward passes: the kernel of 1 "):
        refusals.refuse_shared_workspaces([torch.nn.Sequential(plain, marlin)], "projecting")


def test_recorded_graphs_keep_what_they_read_after_a_refusal_and_no_more(runtime: Any) -> None:
    """A replay reads the places of its step. Freed memory would name places to write to."""
    hooks = HiddenCapture([])
    hooks.staging = Staging(2, 16, torch.float32, 8, "cpu")
    now = hooks.staging._now
    read = [weakref.ref(tensor) for tensor in (now.places, now.number)]
    written = [weakref.ref(hooks.staging.staged.rows), weakref.ref(hooks.staging.staged.marks)]
    runtime.runner = SimpleNamespace(hcache_capture=hooks)
    OwnPagesStrategy(runtime, "plain pages, for a test", None)._capture_nothing()
    del hooks, now
    gc.collect()
    assert runtime.runner.hcache_capture is None
    assert all(tensor() is not None for tensor in read)
    assert all(tensor() is None for tensor in written)
