"""What hidden mode refuses before any forward pass; the same answer on every rank."""

from __future__ import annotations

from typing import Any

import torch

from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.runtime import Runtime

_KV_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def refusal(runtime: Runtime, kvcache: Any) -> str | None:
    """Why this server cannot use hidden mode, or None as far as its arguments tell."""
    runner, args = runtime.runner, resolved(runtime.runner.server_args)
    checks = (
        (args.enable_lora or args.lora_paths, "LoRA adapters change the projection per request"),
        (args.speculative_algorithm, "speculative decoding keeps tokens that are taken back"),
        (args.enable_dp_attention, "data-parallel attention"),
        (
            args.hicache_host_memory_mode == "buffer_only",
            "--hicache-host-memory-mode buffer_only keeps no host copies",
        ),
        (
            getattr(args, "disaggregation_decode_retraction_backup", None) == "host_pool",
            "retraction uses the host pool for plain KV",
        ),
        (args.disaggregation_mode not in (None, "null"), "prefill/decode disaggregation moves KV"),
        (args.enable_two_batch_overlap, "two-batch overlap runs each layer twice a step"),
        (runner.model_config.model_is_mrope, "positions of several dimensions (mrope)"),
        (kvcache.dtype not in _KV_DTYPES, f"KV quantised as {kvcache.dtype}"),
        (kvcache.k_buffer[0].dim() != 3, "the KV pool is not [slots, heads, head_dim]"),
        (
            kvcache.device != "cpu" and _compiled(args),
            "compiled forward passes (torch.compile, tc_piecewise graphs) run without our hooks",
        ),
    )
    return next((reason for refused, reason in checks if refused), None)


def graphs_are_off() -> bool:
    """Whether no phase of the forward pass is recorded."""
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    return bool(cuda_graph_fully_disabled())


def _compiled(args: Any) -> bool:
    if getattr(args, "enable_torch_compile", False):
        return True
    if graphs_are_off():
        return False
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    return "tc_piecewise" in (config.decode.backend, config.prefill.backend)
