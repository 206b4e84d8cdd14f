"""The capabilities of a server: what rules each one out, and the reason in the log.

Log, metric, the report for ``hcache doctor`` and a part of ``docs/limits.md`` are printed from
:data:`CAPABILITIES`. Checks at the start refuse more. Answers are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hcache_backend import metrics
from hcache_backend.config import HCacheConfig
from hcache_backend.metrics import logger
from hcache_backend.projection.exactness import TOLERANCE
from hcache_backend.projection.paged_pool import full_attention, holds_latents, planes_of
from hcache_backend.ranks import Refused
from hcache_backend.sglang.arguments import (
    NO_REQUEST,
    attention_groups,
    drafts_trees,
    may_be,
    packed_drafts,
    resolved,
    serves_adapters,
)
from hcache_backend.sglang.runtime import JUDGING, Runtime

_DRAFTING = ("EAGLE", "EAGLE3", "NGRAM", "STANDALONE")  # drafts have a pool of their own, if any
_WHOLE_STEPS = ("enable_nvidia_megakernel", "enable_amd_monokernel")  # from 0.5.23 on
# Backends of attention that copy from the GPU and wait. Triton's does for sliding windows.
_WAITING = ("flashinfer", "flashmla", "torch_native", "flex_attention")


@dataclass(frozen=True)
class Server:
    """A server whose capabilities are asked for."""

    runner: Any  # SGLang's ModelRunner
    config: HCacheConfig
    kvcache: Any = None  # SGLang's KV pool, ...
    allocator: Any = None  # ...and the allocator of its pages, if known
    exchanges: bool = False  # restores have collectives between ranks

    @property
    def args(self) -> Any:
        return resolved(self.runner.server_args)

    @property
    def other_device(self) -> str | None:
        """A device that is neither a CPU nor one of CUDA; ROCm calls its own ``cuda``."""
        kind = str(self.kvcache.device).partition(":")[0]
        if kind == "cuda" and torch.version.hip:
            return "ROCm"
        return kind if kind not in ("cpu", "cuda") else None

    @property
    def on_gpu(self) -> bool:
        """True if K and V are on a GPU, CUDA's or another."""
        return str(self.kvcache.device) != "cpu"

    @property
    def hybrid(self) -> bool:
        """True if some layers keep sliding windows or recurrent states in pools of their own."""
        whole = getattr(self.runner, "token_to_kv_pool", None)
        return full_attention(whole) is not whole

    @property
    def attention(self) -> str:
        """The name of the attention backend of prefills."""
        return str(self.runner.attn_backend.prefill_attention_backend_str)

    @property
    def substitute(self) -> str | None:
        """The attention backend that recomputes because the server's own would wait for the GPU;
        None: its own. Triton's rounds queries to the type of K and V, so none recomputes in fp8."""
        waits = self.on_gpu and self.attention in _WAITING
        return "triton" if waits and self.kvcache.dtype.itemsize > 1 else None

    @property
    def waiting(self) -> str | None:
        """The attention backend with which recomputation would wait for the GPU, if it would."""
        used, windows = self.substitute or self.attention, self.runner.sliding_window_size
        return used if used in _WAITING or (used == "triton" and (windows or 0) > 0) else None

    def asks(self, option: str, value: object) -> bool:
        """True if an option of ours has this value."""
        return bool(getattr(self.config, option) == value)


class Need(NamedTuple):
    """``has`` finds that a server has a ``feature`` which rules a capability out; its answer stands
    for ``{}`` in the ``reason``."""

    feature: str
    has: Callable[[Server], object]
    reason: str


OWN_PAGES, HIDDEN, RECOMPUTATION = "own pages", "hidden states", "recomputation"
EAGER = "restores while L3 is read"

# fmt: off
_DECODES = Need(
    "decode servers, `--enable-pd-role-switch`",
    lambda s: may_be("decode", s.runner.server_args),
    "a server that decodes for prefill servers, or may after a role switch, fails a request whose "
    "load is refused")
_BUFFER_ONLY = Need(
    "`--hicache-host-memory-mode buffer_only`",
    lambda s: s.args.hicache_host_memory_mode == "buffer_only",
    "the node before a prefetch may go while it runs (buffer_only)")
_PACKED = Need(
    "draft layers that SGLang packs behind the model's (MTP)",
    lambda s: packed_drafts(s.runner),
    "draft layers behind the model's (MTP) come back as K and V only")
_HYBRID = Need(
    "sliding windows, recurrent states",
    lambda s: s.hybrid,
    "only the full-attention layers of a hybrid model have pages of their own")
_MODULES = (  # rules out all that calls or hooks the model's modules
    Need("data-parallel attention (`--attn-dp-size`, `--enable-dp-attention`)",
         lambda s: attention_groups(s.args) > 1,
         "data-parallel attention: ranks without requests would have to take part"),
    Need("`--enable-deterministic-inference`",
         lambda s: s.args.enable_deterministic_inference,
         "--enable-deterministic-inference promises sums in one order, and another kernel has "
         "another order"),
    Need("`--enable-nvidia-megakernel`, `--enable-amd-monokernel`",
         lambda s: any(getattr(s.args, name, False) for name in _WHOLE_STEPS),
         "one kernel computes a whole decode step and calls no module"),
    Need("LoRA", lambda s: serves_adapters(s.args),
         "LoRA adapters change the projection per request"),
    Need("`--enable-two-batch-overlap`", lambda s: s.args.enable_two_batch_overlap,
         "two-batch overlap runs each layer twice a step"),
    Need("M-RoPE", lambda s: s.runner.model_config.model_is_mrope,
         "positions of several dimensions (mrope)"),
    Need("on CUDA `--enable-torch-compile`, `tc_piecewise` graphs",
         lambda s: s.on_gpu and _compiled(s.args),
         "compiled forward passes (torch.compile, tc_piecewise graphs) run without our hooks"),
    Need("on CUDA `--cuda-graph-backend-prefill full`",
         lambda s: s.on_gpu and records_whole_prefills(),
         "full prefill graphs wait for a whole restore and not for its layers "
         "(--cuda-graph-backend-prefill breakable does)"),
)
CAPABILITIES: dict[str, tuple[Need, ...]] = {
    OWN_PAGES: (
        Need("devices other than CPU and CUDA (ROCm, XPU, NPU, MUSA)",
             lambda s: s.other_device,
             "the device is {}, and own pages are for CUDA and CPU"),
        Need("other ways to draft than " + ", ".join(f"`{name}`" for name in _DRAFTING),
             lambda s: (way := s.args.speculative_algorithm) not in (None, *_DRAFTING) and way,
             f"speculative decoding by {{}}, not by {', '.join(_DRAFTING)}"),
        Need("draft layers (MTP) whose KV pool is unlike the model's",
             lambda s: any(
                 (type(pool), pool.page_size, pool.dtype, pool.layer_num)
                 != (type(s.kvcache), s.kvcache.page_size, s.kvcache.dtype, 1)
                 for pool in packed_drafts(s.runner)),
             "the KV pool of a draft layer is unlike the model's"),
        Need("context-parallel attention",
             lambda s: max(getattr(s.args, n, 1) for n in ("attn_cp_size", "dcp_size")) > 1,
             "attention in context-parallel ranks"),
        _DECODES,
        Need("`SGLANG_ENABLE_POST_CAPTURE_KV_SIZING`", lambda s: _pool_grows(),
             "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: the KV pool grows after host memory is "
             "divided"),
        Need("hybrid models with speculative decoding, pipeline stages or P/D disaggregation, and "
             "states with `--page-size 1`",
             lambda s: s.hybrid and _unusual(s),
             "a hybrid model with {}"),
        Need("quantised KV other than fp8",
             lambda s: s.kvcache.dtype not in TOLERANCE and s.kvcache.dtype,
             "KV quantised as {}"),
        Need("quantised KV with scales in buffers of their own",
             lambda s: getattr(s.kvcache, "k_scale_buffer", None) is not None
             or hasattr(getattr(s.kvcache, "quant_method", None), "k_scales_gpu"),
             "quantised KV with scales in buffers of their own"),
        Need("index keys of several tokens (DSA)",
             lambda s: getattr(s.kvcache, "index_kpool", 1) != 1,
             "an indexer's key stands for several tokens"),
        Need("KV pools that are not `[slots, heads, head_dim]`",
             lambda s: planes_of(s.kvcache, 0)[0].dim() != 3,
             "the KV pool is not [slots, heads, head_dim]"),
    ),
    HIDDEN: (
        _PACKED,
        Need("MLA", lambda s: holds_latents(s.kvcache),
             "latents of MLA are smaller than hidden states"),
        _HYBRID,
        Need("drafts in trees (`--speculative-eagle-topk`, "
             "`--speculative-ngram-max-bfs-breadth` above 1)",
             lambda s: drafts_trees(s.args),
             "speculative decoding by trees (--speculative-eagle-topk, "
             "--speculative-ngram-max-bfs-breadth) moves K and V of accepted tokens to other "
             "slots"),
        *_MODULES,
    ),
    RECOMPUTATION: (
        _PACKED,
        Need("`recompute: never`", lambda s: s.asks("recompute", "never"), "option 'recompute'"),
        _HYBRID,
        Need("DSA", lambda s: hasattr(s.kvcache, "index_k_with_scale_buffer"),
             "nothing shows that keys of an indexer are recomputed exactly"),
        *_MODULES,
        Need("multimodal models", lambda s: s.runner.model_config.is_multimodal,
             "the model's embeddings are not those of token ids alone"),
        Need("on CUDA attention by " + ", ".join(f"`{name}`" for name in _WAITING) + " with fp8 K "
             "and V, or by these or `triton` with sliding windows (`--disable-hybrid-swa-memory`)",
             lambda s: s.on_gpu and s.waiting,
             "attention backend '{}' waits for the GPU before every prefill"),
        Need("`--enable-pdmux`", lambda s: s.args.enable_pdmux,
             "--enable-pdmux interrupts prefills, whose plan would be lost"),
        Need(f"row {NO_REQUEST} of SGLang's table given to requests",
             lambda s: NO_REQUEST in s.runner.req_to_token_pool.free_slots,
             f"SGLang gives row {NO_REQUEST} of its table to requests"),
    ),
    EAGER: (
        Need("`restore: layerwise`", lambda s: s.asks("restore", "layerwise"), "option 'restore'"),
        Need("pipeline stages", lambda s: s.args.pp_size > 1, "pipeline stages are not supported"),
        _BUFFER_ONLY,
        Need("hidden states and latents on several tensor-parallel GPUs",
             lambda s: s.exchanges and s.on_gpu,
             "ranks would exchange shards while a batch runs, and forward passes wait for that"),
        Need("other allocators of device pages than SGLang's paged one",
             lambda s: s.allocator is not None and _other_allocator(s.allocator),
             "the device's pages are managed by a {}"),
        Need("an allocator that takes no pages back",
             lambda s: s.allocator is not None and not hasattr(s.allocator, "_release_page_ids"),
             "this version's allocator has no place to give pages back"),
    ),
    JUDGING: (
        _DECODES,
        _BUFFER_ONLY,
    ),
}
# fmt: on


def refusal(capability: str, server: Server) -> str | None:
    """The reason why ``server`` cannot have a capability; None as far as its arguments tell."""
    for need in CAPABILITIES[capability]:
        if answer := need.has(server):
            return need.reason.format(answer)
    return None


def refuse(capability: str, server: Server, reason: str | None = None) -> None:
    """Raise Refused with the :func:`refusal`, or an earlier ``reason``, if there is one."""
    reason = reason or refusal(capability, server)
    if reason is not None:
        raise Refused(reason)


def log_unused(runtime: Runtime) -> None:
    """Log the capabilities that the server goes without, after the line about its host pool."""
    if unused := runtime.options.unused:
        listed = "; ".join(f"{what} ({reason})" for what, reason in unused.items())
        logger.info("hcache: not used: %s", listed)
    set_metrics(runtime)


def set_metrics(runtime: Runtime) -> None:
    """Set the metric of each capability."""
    pages = runtime.pages
    has = {
        OWN_PAGES: pages.own,
        HIDDEN: pages.kind == "hidden",
        RECOMPUTATION: pages.recomputation is not None,
        EAGER: pages.own and EAGER not in runtime.options.unused,
        JUDGING: runtime.hit_gate is not None,
    }
    for capability, value in has.items():
        metrics.CAPABILITY.set(capability, value=int(value))


def graphs_are_off() -> bool:
    """True if no phase of the forward pass is recorded."""
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    return bool(cuda_graph_fully_disabled())


def records_whole_prefills() -> bool:
    """True if a prefill is one CUDA graph."""
    return bool(_graphs().prefill.backend == "full")


def _compiled(args: Any) -> bool:
    """True if forward passes are compiled, so that hooks on modules do not run."""
    backends = _graphs().decode.backend, _graphs().prefill.backend
    return getattr(args, "enable_torch_compile", False) or "tc_piecewise" in backends


def _graphs() -> Any:
    """SGLang's configuration of CUDA graphs."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config


def _unusual(server: Server) -> str | None:
    """What a hybrid model cannot be combined with, if the server has it."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    if server.args.speculative_algorithm is not None:
        return "speculative decoding"
    if server.args.pp_size > 1:
        return "pipeline stages"
    if server.args.disaggregation_mode != "null":
        return "P/D disaggregation"
    states = isinstance(server.runner.token_to_kv_pool, HybridLinearKVPool)
    return "states and pages of one token" if states and server.kvcache.page_size == 1 else None


def _pool_grows() -> bool:
    """True if SGLang sizes its KV pool once more after CUDA graphs are recorded."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get())


def _other_allocator(allocator: Any) -> str | None:
    """The name of the allocator's class if it is not SGLang's paged one."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    return None if type(allocator) is PagedTokenToKVPoolAllocator else type(allocator).__name__
