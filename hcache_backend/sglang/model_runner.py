"""SGLang's model runner: attention of a projection, captured passes, and other weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from hcache_backend.projection.attention import ProjectionBatch, ProjectionReached
from hcache_backend.restore.recompute import RecomputePass
from hcache_backend.sglang.hook_registry import Hook, OnError, Original
from hcache_backend.sglang.runtime import current

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
# An update in one call, or the end of one in many.
_WEIGHT_UPDATES = ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
# SGLang refuses them unless end_weight_update will follow.
_WEIGHT_BUCKETS = ("update_weights_from_tensor", "load_weights_from_distributed")


def _attention(
    original: Original,
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around an attention layer. A recomputation attends by its own rules; a projection only wants
    K and V of the layer, which it gets by an exception; all other passes are SGLang's."""

    def engine(store: bool) -> Any:
        return original(kernel, q, k, v, forward_batch, store, *args, **kwargs)

    recompute_pass = getattr(forward_batch, "recompute_pass", None)
    if isinstance(recompute_pass, RecomputePass):
        return recompute_pass.attend(kernel, q, k, v, save_kv_cache, engine)
    if not isinstance(forward_batch, ProjectionBatch):
        return engine(save_kv_cache)
    if k is not None and v is not None:
        k = k.reshape(-1, kernel.tp_k_head_num, kernel.qk_head_dim)
        v = v.reshape(-1, kernel.tp_v_head_num, kernel.v_head_dim)
    raise ProjectionReached(k, v)


def _capture_forward(
    original: Original, runner: Any, forward_batch: Any, *a: Any, **kw: Any
) -> Any:
    """Around a forward pass: the capture takes hidden states of the model, not of a draft model."""
    runtime, run = current(), partial(original, runner, forward_batch, *a, **kw)
    capture, order = runtime.forwards.capture, runtime.forwards.order
    ours = runner is runtime.runner
    if ours and order is not None:
        order.forward_begins()  # restores order their collectives by it
    return capture.forward(forward_batch, run) if ours else run()


def _before_replay(original: Original, graphs: Any, *a: Any, **kw: Any) -> Any:
    """Around ``PrefillCudaGraphRunner.execute``. A full recorded prefill (not one in pieces) does
    not wait for layers that are being loaded, before 0.5.23: so wait for the last layer first."""
    if graphs._is_full_backend:
        counter = graphs.model_runner.token_to_kv_pool.layer_transfer_counter
        if counter is not None:
            counter.wait_until(counter.num_layers - 1)
    return original(graphs, *a, **kw)


def _around_weight_update(original: Original, updater: Any, *a: Any, **kw: Any) -> Any:
    """Around an update in one call, or the end of one in many: L3 is off meanwhile."""
    weights = current().weights
    weights.begin_update()
    try:
        return original(updater, *a, **kw)
    finally:
        weights.end_update()


def _around_weight_bucket(original: Original, updater: object, *a: Any, **kw: Any) -> Any:
    """Around a part of an update: L3 stays off until :func:`_around_weight_update` ends it."""
    weights = current().weights
    weights.begin_update()
    try:
        return original(updater, *a, **kw)
    finally:
        weights.forget_weights()


def _after_late_weights(original: Original, runner: Any, *a: Any, **kw: Any) -> Any:
    """Weights of a model, or a draft model, have arrived after its start: fingerprint them."""
    result = original(runner, *a, **kw)
    runtime = current()
    if runtime.runner is runner:
        runtime.weights.read_model()
    elif runtime.weights.draft is runner:
        runtime.weights.read_draft(runner)
    return result


def _after_reset(original: Original, controller: Any, *a: Any, **kw: Any) -> Any:
    result = original(controller, *a, **kw)
    current().weights.caches_were_flushed()
    return result


_RADIX_ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention."
ATTENTION = Hook(_RADIX_ATTENTION + "forward", _attention, OnError.RAISE)
FORWARD = Hook(_RUNNER + "forward", _capture_forward)
LATE_WEIGHTS = Hook(_RUNNER + "finalize_startup_weight_load", _after_late_weights, OnError.RAISE)
_GRAPHS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner."
REPLAY = Hook(_GRAPHS + "execute", _before_replay, OnError.END_L3)
WEIGHTS = [
    *(Hook(_WEIGHTS + name, _around_weight_update, OnError.END_L3) for name in _WEIGHT_UPDATES),
    *(Hook(_WEIGHTS + name, _around_weight_bucket, OnError.END_L3) for name in _WEIGHT_BUCKETS),
]
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
RESET = Hook(_CONTROLLER + "reset", _after_reset, OnError.END_L3)
