"""Capabilities of servers: what rules each one out, asked without a GPU, and by tries."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

from hcache_backend import metrics
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import Staging
from hcache_backend.checks import self_check
from hcache_backend.config import HCacheConfig
from hcache_backend.ranks import Refused
from hcache_backend.start import build, capabilities
from hcache_backend.start.capabilities import (
    CAPABILITIES,
    EAGER,
    HIDDEN,
    JUDGING,
    OWN_PAGES,
    RECOMPUTATION,
    refusal,
)
from tests.engine.in_process.start.servers import server


class OtherAllocator(PagedTokenToKVPoolAllocator):
    pass


MODULES = HIDDEN, RECOMPUTATION
WINDOWS, STATES = SimpleNamespace(full_kv_pool=None), object.__new__(HybridLinearKVPool)
STATES.full_kv_pool = None
DRAFT = SimpleNamespace(page_size=16, dtype=torch.bfloat16, layer_num=1)
MTP = {"runner.mtp_draft_device_pools": (DRAFT,), "pool.page_size": 16}
FP8, WINDOW = {"pool.dtype": torch.float8_e4m3fn}, {"runner.sliding_window_size": 512}
LATENTS = {"pool.kv_lora_rank": 1, "pool.kv_buffer": [torch.empty(1, 1, 1)]}
MATRIX: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    # what is other than in a server with every capability, what it cannot have, and the reason
    ({}, (), ""),
    ({"pool.device": "cpu", "backend": "torch_native", "graphs": "full"}, (), ""),
    ({"speculative_algorithm": "DFLASH"}, (OWN_PAGES,), "decoding by DFLASH, not by EAGLE"),
    ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, (), ""),
    ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, (HIDDEN,), "by trees"),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, (), ""),
    # an accepted token may have the place and the position of another one that was captured
    (
        {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10},
        (HIDDEN,),
        "moves K and V of accepted tokens",
    ),
    (MTP, MODULES, "come back as K and V only"),
    (MTP | {"pool.page_size": 64}, (OWN_PAGES, *MODULES), "draft layer"),
    ({"runner.token_to_kv_pool": WINDOWS}, (HIDDEN, RECOMPUTATION), "of a hybrid model"),
    (
        {"runner.token_to_kv_pool": WINDOWS, "speculative_algorithm": "EAGLE"},
        (OWN_PAGES, HIDDEN, RECOMPUTATION),
        "a hybrid model",
    ),
    (
        {"runner.token_to_kv_pool": WINDOWS, "pp_size": 2},
        (OWN_PAGES, HIDDEN, RECOMPUTATION, EAGER),
        "",  # eager restores are refused for the stages
    ),
    (
        {"runner.token_to_kv_pool": WINDOWS, "disaggregation_mode": "prefill"},
        (OWN_PAGES, HIDDEN, RECOMPUTATION),
        "a hybrid model",
    ),
    (
        {"runner.token_to_kv_pool": STATES, "pool.page_size": 1},
        (OWN_PAGES, HIDDEN, RECOMPUTATION),
        "a hybrid model",
    ),
    (
        {"runner.token_to_kv_pool": STATES, "pool.page_size": 16},
        (HIDDEN, RECOMPUTATION),
        "of a hybrid model",
    ),
    (
        {"runner.token_to_kv_pool": WINDOWS, "pool.page_size": 1},
        (HIDDEN, RECOMPUTATION),
        "of a hybrid model",
    ),
    ({"attn_cp_size": 2}, (OWN_PAGES,), "context-parallel"),
    ({"dcp_size": 2}, (OWN_PAGES,), "context-parallel"),
    ({"disaggregation_mode": "prefill"}, (), ""),
    ({"disaggregation_mode": "decode"}, (OWN_PAGES, JUDGING), "decodes for prefill servers"),
    ({"enable_pd_role_switch": True}, (OWN_PAGES, JUDGING), "may after a role switch"),
    ({"grows": True}, (OWN_PAGES,), "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: the KV pool grows"),
    ({"pool.dtype": torch.int8}, (OWN_PAGES,), "KV quantised as torch.int8"),
    (FP8, (), ""),
    ({"pool.k_scale_buffer": [0]}, (OWN_PAGES,), "scales in buffers of their own"),
    (
        {"pool.quant_method": SimpleNamespace(k_scales_gpu=1)},
        (OWN_PAGES,),
        "scales in buffers of their own",
    ),
    # [pages, heads, page_size, head_dim]: slots are no rows
    ({"pool.k_buffer": [torch.empty(1, 1, 1, 1)]}, (OWN_PAGES,), "[slots, heads, head_dim]"),
    (LATENTS, (HIDDEN,), "latents of MLA are smaller than hidden states"),
    ({"pool.index_k_with_scale_buffer": []}, (RECOMPUTATION,), "keys of an indexer"),
    ({"pool.index_kpool": 2}, (OWN_PAGES,), "an indexer's key stands for several tokens"),
    ({"enable_dp_attention": True, "dp_size": 2}, MODULES, "data-parallel attention"),
    ({"attn_dp_size": 2}, MODULES, "data-parallel attention"),
    ({"dp_size": 2}, (), ""),  # replicas
    ({"enable_deterministic_inference": True}, MODULES, "sums in one order"),
    ({"enable_nvidia_megakernel": True}, MODULES, "a whole decode step"),
    ({"enable_amd_monokernel": True}, MODULES, "a whole decode step"),
    ({"hip": "6.4"}, (OWN_PAGES,), "the device is ROCm"),
    ({"pool.device": "xpu"}, (OWN_PAGES,), "the device is xpu"),
    ({"pool.device": "npu", "graphs": "full"}, (OWN_PAGES, *MODULES), ""),
    ({"enable_lora": True}, MODULES, "LoRA adapters"),
    ({"enable_two_batch_overlap": True}, MODULES, "two-batch overlap"),
    ({"model.model_is_mrope": True}, MODULES, "positions of several dimensions"),
    ({"enable_torch_compile": True}, MODULES, "compiled forward passes"),
    ({"graphs": "tc_piecewise"}, MODULES, "compiled forward passes"),
    ({"graphs": "full"}, MODULES, "full prefill graphs"),
    ({"recompute": "never"}, (RECOMPUTATION,), "option 'recompute'"),
    # the token ids of an image say nothing of its embeddings
    ({"model.is_multimodal": True}, (RECOMPUTATION,), "not those of token ids alone"),
    ({"backend": "flashinfer"}, (), ""),  # Triton's recomputes
    (FP8 | {"backend": "flashinfer"}, (RECOMPUTATION,), "'flashinfer' waits for the GPU"),
    (WINDOW | {"backend": "flashinfer"}, (RECOMPUTATION,), "'triton' waits for the GPU"),
    (WINDOW | {"backend": "triton"}, (RECOMPUTATION,), "'triton' waits for the GPU"),
    (WINDOW | {"backend": "triton", "pool.device": "cpu"}, (), ""),
    (WINDOW, (), ""),
    (FP8 | {"backend": "triton"}, (), ""),
    ({"enable_pdmux": True}, (RECOMPUTATION,), "--enable-pdmux interrupts prefills"),
    ({"rows": [0, 1]}, (RECOMPUTATION,), "SGLang gives row 0 of its table to requests"),
    ({"restore": "layerwise"}, (EAGER,), "option 'restore'"),
    ({"pp_size": 2}, (EAGER,), "not supported"),
    ({"hicache_host_memory_mode": "buffer_only"}, (EAGER, JUDGING), "may go while it runs"),
    ({"exchanges": True}, (EAGER,), "ranks would exchange shards"),
    ({"exchanges": True, "pool.device": "cpu"}, (), ""),
    ({"tp_size": 8}, (), ""),
    ({"allocator": PagedTokenToKVPoolAllocator}, (), ""),
    ({"allocator": OtherAllocator}, (EAGER,), "managed by a OtherAllocator"),
    (
        {"allocator": PagedTokenToKVPoolAllocator, "version": "of an earlier kind"},
        (EAGER,),
        "no place to give pages back",
    ),
]


def refusals(changes: dict[str, Any], patch: MonkeyPatch) -> dict[str, str]:
    """The reasons against what a server with these changes cannot have."""
    asked = server()
    phases = SimpleNamespace(
        decode=SimpleNamespace(backend="full"), prefill=SimpleNamespace(backend="breakable")
    )
    runner, pool = asked.runner, asked.kvcache
    for name, value in changes.items():
        where, _, field = name.rpartition(".")
        if name in HCacheConfig.model_fields:
            asked = replace(asked, config=HCacheConfig(**{name: value}))
        elif name == "allocator":
            asked = replace(asked, allocator=object.__new__(value))
        elif name == "version":
            patch.delattr(PagedTokenToKVPoolAllocator, "_release_page_ids")
        elif name == "exchanges":
            asked = replace(asked, exchanges=value)
        elif name == "hip":
            patch.setattr(torch.version, "hip", value)
        elif name == "graphs":
            phases.prefill.backend = value
        elif name == "backend":
            runner.attn_backend.prefill_attention_backend_str = value
        elif name == "rows":
            runner.req_to_token_pool.free_slots = value
        elif name != "grows":
            places = {"": runner.server_args, "model": runner.model_config}
            setattr((places | {"runner": runner, "pool": pool})[where], field, value)
    patch.setattr(capabilities, "_graphs", lambda: phases)
    with envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.override("grows" in changes):
        found = {name: refusal(name, asked) for name in CAPABILITIES}
    return {name: reason for name, reason in found.items() if reason is not None}


@pytest.mark.parametrize(("changes", "refused", "reason"), MATRIX)
def test_what_rules_a_capability_out(
    changes: dict[str, Any], refused: tuple[str, ...], reason: str, monkeypatch: MonkeyPatch
) -> None:
    found = refusals(changes, monkeypatch)
    assert {*found} == {*refused}
    assert all(reason in said for said in found.values())


@pytest.mark.parametrize(
    ("own", "used"),
    [
        *((name, "triton") for name in ("flashinfer", "flashmla", "torch_native")),
        *((name, None) for name in ("fa3", "fa4", "triton", "trtllm_mha", "trtllm_mla")),
    ],
)
def test_another_backend_recomputes_if_the_servers_own_would_wait(
    own: str, used: str | None
) -> None:
    asked = server()
    asked.runner.attn_backend.prefill_attention_backend_str = own
    assert asked.substitute == used
    asked.kvcache.dtype = torch.float8_e4m3fn  # Triton's kernel would round queries, too
    assert asked.substitute is None
    asked.kvcache.device, asked.kvcache.dtype = "cpu", torch.bfloat16
    assert asked.substitute is None


def test_every_need_is_in_the_matrix() -> None:
    said: list[str] = []
    for changes, *_ in MATRIX:
        with MonkeyPatch.context() as patch:
            said += refusals(changes, patch).values()
    for need in (need for needs in CAPABILITIES.values() for need in needs):
        assert any(reason.startswith(need.reason.split("{")[0]) for reason in said), need.feature


def test_the_log_the_metric_and_the_report_say_what_a_server_goes_without(
    runtime: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.pages.use_own_pages("no room")
    runtime.options.unused = {RECOMPUTATION: "it is multimodal", EAGER: "option 'restore'"}
    with caplog.at_level("INFO", "hcache"):
        capabilities.log_unused(runtime)
    without = dict(runtime.options.unused)
    said = "; ".join(f"{name} ({reason})" for name, reason in without.items())
    assert f"hcache: not used: {said}" in caplog.text
    assert runtime.report().unused == without
    runtime.judge(None, "hcache", 1.0)
    gauge = metrics.CAPABILITY.family
    has = {name for name in CAPABILITIES if gauge.labels(name)._value.get() == 1}
    assert has == {OWN_PAGES, JUDGING}
    runtime.stop_judging()
    assert gauge.labels(JUDGING)._value.get() == 0


BUFFER = torch.empty(8, 4)


@pytest.mark.parametrize(
    ("forward", "depends"),
    [
        (lambda x: (x / x.abs().amax(-1, keepdim=True), None), False),
        (lambda x: (x / x.abs().amax(), None), True),
        (lambda x: (x * torch.nan, None), True),
        # Both outputs are there at once, and what the model passed stays as it is.
        (lambda x: torch.div(x, x.abs().amax(), out=BUFFER), True),
        (lambda x: torch.div(x, x.abs().amax(), out=x), True),
    ],
    ids=["by token", "by batch", "not a number", "in one buffer", "in place"],
)
@pytest.mark.parametrize("named", [False, True])
def test_it_is_found_whether_a_token_depends_on_others(
    forward: Any, depends: bool, named: bool
) -> None:
    rows = torch.randn(8, 4)
    before = rows.clone()
    given = ((), {"x": rows}) if named else ((rows,), {})
    assert self_check._depends_on_batch(SimpleNamespace(forward=forward), *given) == depends
    assert torch.equal(rows, before)


@pytest.mark.parametrize("depends", [(), ("layers.0.mlp",)])
def test_a_module_that_depends_on_the_batch_is_refused(depends: tuple[str, ...]) -> None:
    rows = torch.zeros(1)
    observed = self_check.ObservedPass((), (), rows, rows, rows, depends)
    observed.refuse_dependence(["layers.0.attention."])
    with pytest.raises(Refused, match=r"output of layers\.0\.mlp") if depends else nullcontext():
        observed.refuse_dependence()


def test_modules_that_receive_quantised_rows_count_as_dependent() -> None:
    """The rows before they were quantised are unknown."""
    rows = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
    assert self_check._depends_on_batch(SimpleNamespace(), (rows,), {})


def test_modules_whose_kernels_share_a_workspace() -> None:
    plain, marlin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    marlin.workspace = torch.zeros(4)
    self_check.refuse_shared_workspaces([torch.nn.Sequential(plain)])
    with pytest.raises(Refused, match="modules beside forward passes: the kernel of 1 has one"):
        self_check.refuse_shared_workspaces([torch.nn.Sequential(plain, marlin)])


def test_recorded_graphs_keep_what_they_read_after_a_refusal_and_no_more(runtime: Any) -> None:
    """A replay reads the targets of its step. Freed memory would name rows to write to."""
    hooks = HiddenCapture([])
    hooks.staging = Staging(2, 16, torch.float32, 8, "cpu")
    now = hooks.staging._now
    read = [weakref.ref(tensor) for tensor in (now.targets, now.number)]
    written = [weakref.ref(hooks.staging.staged.rows), weakref.ref(hooks.staging.staged.marks)]
    runtime.forwards.capture = hooks
    for _ in ("hidden mode is refused", "own pages are refused"):
        build.capture_nothing(runtime)
    del hooks, now
    gc.collect()
    assert runtime.forwards.capture.staging is None
    assert all(tensor() is not None for tensor in read)
    assert all(tensor() is None for tensor in written)
