"""What hidden mode refuses on CUDA only, asked without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.engine.startup import refusals
from hcache_backend.engine.startup.agreement import Refused


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
        enable_two_batch_overlap=False,
        enable_torch_compile=False,
    )
    runner = SimpleNamespace(
        server_args=arguments, model_config=SimpleNamespace(model_is_mrope=False)
    )
    pool = SimpleNamespace(device="cuda", dtype=torch.bfloat16, k_buffer=[torch.empty(1, 1, 1)])
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


def test_modules_whose_kernels_share_a_workspace() -> None:
    plain, marlin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    marlin.workspace = torch.zeros(4)
    refusals.refuse_shared_workspaces([torch.nn.Sequential(plain)], "projecting")
    with pytest.raises(Refused, match="projecting beside forward passes: the kernel of 1 "):
        refusals.refuse_shared_workspaces([torch.nn.Sequential(plain, marlin)], "projecting")
