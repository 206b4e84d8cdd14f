"""Refusals of own pages and hidden states before any forward pass; the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hcache_backend.projection.check import TOLERANCE
from hcache_backend.sglang.arguments import (
    decodes_for_others,
    drafts_trees,
    resolved,
    serves_adapters,
)
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.agreement import Refused

_DRAFTING = ("EAGLE", "EAGLE3", "NGRAM", "STANDALONE")  # drafts have a pool of their own, if any


def own_pages_refusal(runtime: Runtime, kvcache: Any) -> str | None:
    """Reason to keep SGLang's plain pages, or None as far as the server's arguments tell."""
    args = resolved(runtime.runner.server_args)
    algorithm = args.speculative_algorithm
    checks = (
        (
            algorithm not in (None, *_DRAFTING),
            f"speculative decoding by {algorithm}, not by {', '.join(_DRAFTING)}",
        ),
        (
            getattr(runtime.runner, "mtp_draft_device_pools", ()),
            "speculative decoding with MTP: nobody would save the draft's layers, which SGLang "
            "packs behind the model's in host memory",
        ),
        (getattr(args, "attn_cp_size", 1) > 1, "attention in context-parallel ranks"),
        (
            decodes_for_others(runtime.runner.server_args),
            "a server that decodes for prefill servers, or may after a role switch, fails a "
            "request whose load is refused",
        ),
        (
            envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: the KV pool grows after host memory is divided",
        ),
        (kvcache.dtype not in TOLERANCE, f"KV quantised as {kvcache.dtype}"),
        (
            getattr(kvcache, "k_scale_buffer", None) is not None
            or hasattr(getattr(kvcache, "quant_method", None), "k_scales_gpu"),
            "quantised KV with scales in buffers of their own",
        ),
        (kvcache.k_buffer[0].dim() != 3, "the KV pool is not [slots, heads, head_dim]"),
    )
    return next((reason for refused, reason in checks if refused), None)


def refusal(runtime: Runtime, kvcache: Any) -> str | None:
    """Reason against hidden states in own pages, or None as far as the server's arguments tell."""
    if drafts_trees(resolved(runtime.runner.server_args)):
        return (
            "speculative decoding by trees (--speculative-eagle-topk, "
            "--speculative-ngram-max-bfs-breadth) moves K and V of accepted tokens to other slots"
        )
    return module_refusal(runtime, kvcache)


def module_refusal(runtime: Runtime, kvcache: Any) -> str | None:
    """Reason not to call or hook the model's modules, for hidden states or recomputation, or None
    as far as the server's arguments tell."""
    runner, args = runtime.runner, resolved(runtime.runner.server_args)
    checks = (
        (
            args.enable_dp_attention,
            "data-parallel attention: ranks without requests would have to take part",
        ),
        (serves_adapters(args), "LoRA adapters change the projection per request"),
        (args.enable_two_batch_overlap, "two-batch overlap runs each layer twice a step"),
        (runner.model_config.model_is_mrope, "positions of several dimensions (mrope)"),
        (
            kvcache.device != "cpu" and _compiled(args),
            "compiled forward passes (torch.compile, tc_piecewise graphs) run without our hooks",
        ),
        (
            kvcache.device != "cpu" and _graphs().prefill.backend == "full",
            "full prefill graphs read K and V without waiting for the layers of a restore "
            "(--cuda-graph-backend-prefill breakable waits)",
        ),
    )
    return next((reason for refused, reason in checks if refused), None)


def refuse_shared_workspaces(modules: Iterable[torch.nn.Module], what: str) -> None:
    """Raise Refused if a kernel of ``modules`` locks memory of its own. Marlin's kernels of
    quantised layers do: in one module on two streams they wait for ever, or mix sums."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(getattr(part, "workspace", None), torch.Tensor):
                raise Refused(
                    f"{what} beside forward passes: the kernel of {name or type(part).__name__} "
                    "has one workspace for all streams"
                )


def graphs_are_off() -> bool:
    """True if no phase of the forward pass is recorded."""
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    return bool(cuda_graph_fully_disabled())


def _compiled(args: Any) -> bool:
    if getattr(args, "enable_torch_compile", False):
        return True
    return "tc_piecewise" in (_graphs().decode.backend, _graphs().prefill.backend)


def _graphs() -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config


def eager_refusal(server_args: Any, device: torch.device | str, *, hidden: bool) -> str | None:
    """Reason against eager restores, or None as far as arguments tell. ``hidden``: pages hold
    hidden states, of which ranks exchange shares, or are to be recomputed."""
    if server_args.pp_size > 1:
        return "pipeline stages are not supported"
    if server_args.hicache_host_memory_mode == "buffer_only":
        return "the node before a prefetch may go while it runs (buffer_only)"
    if hidden and server_args.tp_size > 1 and torch.device(device).type == "cuda":
        return "ranks would exchange shares while a batch runs, and forward passes wait for that"
    return None


def allocator_refusal(allocator: Any) -> str | None:
    """Reason against reserving pages in SGLang's allocator of device pages, or None."""
    if type(allocator) is not PagedTokenToKVPoolAllocator:
        return f"the device's pages are managed by a {type(allocator).__name__}"
    if not hasattr(allocator, "_release_page_ids"):
        return "this version's allocator has no place to give pages back"
    return None
