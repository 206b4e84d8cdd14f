"""Hooks on SGLang beside the bootstrap hook; registered only when we are configured."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from hcache_backend import metrics
from hcache_backend.projection.generic import ProjectionBatch, ProjectionReached
from hcache_backend.ranks import OutOfStep
from hcache_backend.restore.recompute import RecomputePass
from hcache_backend.sglang import hits
from hcache_backend.sglang.prefill_server import before_sending_prefix
from hcache_backend.sglang.runtime import current
from hcache_backend.sglang.sent_weights import after_metadata, before_commit
from hcache_backend.turn import Turn

logger = logging.getLogger("hcache")

ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention.forward"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
EVENTS = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events"
DRAIN = (
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._drain_storage_control_queues_impl"
)
PREFETCH = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.prefetch_from_storage"
WRITTEN = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage"
BACKED_UP = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._execute_kv_backup"
STOPPING = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.release_host_resources"
RECEIVED = "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache"
LOAD_BACK = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_load_back"
BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
COMPUTED = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
SEND_PREFIX = (
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
    "maybe_send_cached_prefix_chunk"
)
METADATA = "sglang.srt.disaggregation.utils.MetadataBuffers.set_buf"
RECEIVED_PROMPT = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
STOP = "sglang.srt.managers.cache_controller.HiCacheController._stop_storage_threads"
LOOK_UP = _CONTROLLER + "_storage_hit_query"
READ = _CONTROLLER + "_page_transfer"
READ_BATCH = "sglang.srt.managers.cache_controller.HiCacheController._page_transfer_kv_batch"
LATE_WEIGHTS = "sglang.srt.model_executor.model_runner.ModelRunner.finalize_startup_weight_load"
RESET = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.reset"
_WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
_WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
    "end_weight_update",
)
REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"
ADAPTER_KEY = "hcache:adapter:"  # prefix of the keys of requests with an adapter, and of no others


# inputs of a request (SGLang's ``Req``) besides its token ids
NOT_IN_TOKEN_IDS = ("input_embeds", "positional_embed_overrides", "multimodal_inputs", "lora_id")


class OnError(enum.Enum):
    """SGLang's way on if a hook raises; SGLang's own errors and OutOfStep are always raised."""

    GO_ON = "SGLang goes on as if there were no hook"
    END_L3 = (
        "SGLang goes on; L3 is off until a restart, because it could hold or serve wrong K and V"
    )
    RAISE = "the error is raised, to a caller of ours or while the server starts"


class Hook(NamedTuple):
    """One AROUND hook: ``function(original, *args, **kwargs)``."""

    target: str
    function: Callable[..., Any]
    on_error: OnError = OnError.GO_ON


READS = Hook(READ, hits.around_read)


def hidden_mode_hooks() -> list[Hook]:
    return [Hook(ATTENTION, _stop_projection, OnError.RAISE), Hook(FORWARD, _capture_forward)]


def recompute_hooks() -> list[Hook]:
    """Hooks of recomputation: attention, the slots of a prefix, other uses of the GPU."""
    return [
        Hook(ATTENTION, _stop_projection, OnError.RAISE),
        Hook(LOAD_BACK, _around_load_back),
        Hook(RECEIVED, _before_received),
    ]


def own_pages_hooks() -> list[Hook]:
    """Hooks of own pages: HiCache's turn in every turn of the scheduler, and its reports."""
    return [
        TURN,
        Hook(DRAIN, _before_drain, OnError.END_L3),
    ]


def use_hooks() -> list[Hook]:
    """Hooks by which L3 hears of used pages in L1 and L2, gets them, or hears that it will not."""
    return [
        Hook(BACKED_UP, _after_backup),
        TURN,
        Hook(STOPPING, _before_stop),
        Hook(PREFETCH, _around_prefetch),
        Hook(RECEIVED, _after_received),
        Hook(WRITTEN, _after_written),
    ]


def prefill_server_hooks() -> list[Hook]:
    """Hooks that hold back early sends, and send the digest of the weights."""
    return [Hook(SEND_PREFIX, before_sending_prefix), Hook(METADATA, after_metadata)]


def decode_server_hooks() -> list[Hook]:
    """Hooks that keep K and V of other servers' weights out of L3."""
    return [Hook(RECEIVED_PROMPT, before_commit, OnError.END_L3)]


def hit_hooks() -> list[Hook]:
    return [
        Hook(RECEIVED, hits.before_asking),
        Hook(PREFETCH, hits.around_prefetch),
        TURN,
        Hook(DRAIN, hits.around_drain),
        Hook(STOP, hits.around_stop),
        Hook(BATCH, hits.around_batch),
        Hook(COMPUTED, hits.after_batch),
        Hook(LOOK_UP, hits.around_look_up),
        READS,
        Hook(READ_BATCH, hits.around_read_batch),
    ]


def weight_hooks() -> list[Hook]:
    """Hooks that keep pages of other weights away; needed in both modes."""
    end = OnError.END_L3
    updates = (Hook(_WEIGHTS + name, _around_weight_update, end) for name in _WEIGHT_UPDATES)
    return [*updates, Hook(RESET, _after_reset, end)]


def adapter_hooks() -> list[Hook]:
    """Hooks that keep pages of adapters from requests that only name them."""
    return [Hook(REQUEST, _after_request, OnError.END_L3)]


def late_weight_hooks() -> list[Hook]:
    """Hooks of a server whose weights arrive after ``load_model`` has returned."""
    return [Hook(LATE_WEIGHTS, _after_late_weights, OnError.RAISE)]


def notice_uses() -> None:
    """Let L3 hear of used pages; log a warning if it cannot."""
    unnoticed = install(use_hooks())
    if unnoticed is not None:
        logger.warning(
            "hcache: eviction from L3 does not see uses on the GPU or in host memory: %s", unnoticed
        )


def install(hooks: list[Hook]) -> str | None:
    """Register and apply ``hooks``; returns a message about missing ones, or None. SGLang only logs
    a hook that cannot be applied, so each one is looked up afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if not _is_applied(hook):
            HookRegistry.register(hook.target, guarded(hook), HookType.AROUND)
    HookRegistry.apply_hooks()
    for hook in hooks:
        if not _is_applied(hook) and hook.target in HookRegistry._patched:
            # The registry patches a target once: an earlier hook, ours or another plugin's, has it.
            HookRegistry._apply_target(hook.target, [(HookType.AROUND, guarded(hook), None)])
    missing = [hook.target for hook in hooks if not _is_applied(hook)]
    return f"SGLang has no place for the hooks on {', '.join(missing)}" if missing else None


class _Original:
    """SGLang's function as a hook calls it; remembers its result or error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function  # hooks ask for its signature
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


@functools.cache
def guarded(hook: Hook) -> Callable[..., Any]:
    """The function of ``hook``; if it raises, SGLang goes on by ``hook.on_error``."""
    function, reasons = hook.function, set[type[Exception]]()
    if hook.on_error is OnError.RAISE:
        return function

    @functools.wraps(function)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _Original(original)
        try:
            return function(call, *args, **kwargs)
        except OutOfStep:
            raise
        except Exception as error:
            if call.error is not None:
                raise call.error from None
            metrics.PROBLEMS.count("hook")
            if type(error) not in reasons:
                reasons.add(type(error))
                logger.exception(
                    "hcache: the hook on %s raised an error (logged once): %s",
                    hook.target,
                    hook.on_error.value,
                )
            if hook.on_error is OnError.END_L3:
                current().cannot_restore(f"the hook on {hook.target} failed: {error!r}")
        return call.result if call.returned else original(*args, **kwargs)

    return around


def _owner(target: str) -> Any:
    module_path, owner_name, _ = target.rsplit(".", 2)
    try:
        return getattr(importlib.import_module(module_path), owner_name, None)
    except ImportError:
        return None


def _resolve(target: str) -> Any:
    return getattr(_owner(target), target.rpartition(".")[2], None)


def _is_applied(hook: Hook) -> bool:
    function = _resolve(hook.target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is guarded(hook) for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _stop_projection(
    original: Callable[..., Any],
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    asked = getattr(forward_batch, "asked", None)
    if isinstance(asked, RecomputePass):
        return _attend_again(original, asked, kernel, q, k, v, forward_batch, *args, **kwargs)
    if not isinstance(forward_batch, ProjectionBatch):
        return original(kernel, q, k, v, forward_batch, *args, **kwargs)
    if k is not None and v is not None:
        k = k.reshape(-1, kernel.tp_k_head_num, kernel.qk_head_dim)
        v = v.reshape(-1, kernel.tp_v_head_num, kernel.v_head_dim)
    raise ProjectionReached(k, v)


def _attend_again(
    original: Callable[..., Any],
    asked: RecomputePass,
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def engine(store: bool) -> Any:
        return original(kernel, q, k, v, forward_batch, store, *args, **kwargs)

    return asked.attend(kernel, q, k, v, save_kv_cache, engine)


def _around_load_back(original: Callable[..., Any], cache: Any, params: Any, *a: Any) -> Any:
    controller = getattr(cache, "cache_controller", None)
    behind = getattr(controller, "loading_behind", None)
    if behind is None:
        return original(cache, params, *a)
    tree = cache.tree_core

    def prefix() -> Any:
        root = tree.empty_match_result.last_device_node
        return tree.collect_full_device_indices(params.req.last_node, root)

    def token_ids() -> Any:
        req = params.req
        ids = getattr(req, "full_untruncated_fill_ids", None) if _is_plain(req) else None
        before = prefix()
        if ids is None or before is None:
            return None
        return ids[: len(before) + params.host_hit_length]

    with behind(prefix, token_ids):
        return original(cache, params, *a)


def _is_plain(req: Any) -> bool:
    """True if the token ids of a request are all of its input."""
    # An attribute that SGLang has renamed counts as set.
    return all(getattr(req, name, name) is None for name in NOT_IN_TOKEN_IDS)


def _before_received(
    original: Callable[..., Any], scheduler: Any, req: Any, *a: Any, **kw: Any
) -> Any:
    """Give the governor its scheduler. Prefetches begin here, so no slice comes earlier."""
    controller: Any = getattr(getattr(scheduler, "tree_cache", None), "cache_controller", None)
    governor = getattr(controller, "governor", None)
    if governor is not None:
        governor.scheduler = scheduler
        controller.plain_prompt = _is_plain(req)
    return original(scheduler, req, *a, **kw)


def _before_drain(
    original: Callable[..., Any],
    cache: Any,
    n_storage_hit: int | None,
    n_ack_prefetch: int | None,
    *a: Any,
    **kw: Any,
) -> Any:
    """Around the same target as :func:`.hits.around_drain`."""
    controller = cache.cache_controller
    if getattr(controller, "eager", None) is not None:
        # Plugins are imported before SGLang can be.
        from hcache_backend.sglang.read_batches import hear

        reports = list(itertools.islice(controller.ack_prefetch_queue.queue, n_ack_prefetch))
        running = [info.operation for info in cache.ongoing_prefetch.values() if reports]
        hear(reports, running, current().prefetches, controller.page_size)
    return original(cache, n_storage_hit, n_ack_prefetch, *a, **kw)


def _around_turn(original: Callable[..., Any], cache: Any, *a: Any, **kw: Any) -> Any:
    """Around ``check_hicache_events``, in each turn of the scheduler: HiCache's part, then ours."""
    controller, l3, turn = getattr(cache, "cache_controller", None), _our_l3(cache), Turn()
    ours = controller if hasattr(controller, "begin_turn") else None
    if ours is not None:
        cache.hicache_storage_pass_prefix_keys = True  # they give a node's place in its sequence
    result = original(cache, *a, **kw)
    asked = hits.ask_to_end(cache, turn)
    if ours is not None:
        ours.begin_turn(cache, turn)
    turn.agree(cache._all_reduce_attn_groups)
    hits.end_prefetches(asked)
    if ours is not None:
        ours.end_turn(cache)
    if l3 is not None:
        l3.backups.put_heads(cache)
    return result


_look_up_failures: set[type[Exception]] = set()  # errors of SGLang's look-ups that were logged


def _around_prefetch(original: Callable[..., Any], cache: Any, *a: Any, **kw: Any) -> Any:
    l3 = _our_l3(cache)
    if l3 is None:
        return original(cache, *a, **kw)
    cache.hicache_storage_pass_prefix_keys = True  # for nodes that are written, too
    given = inspect.signature(original).bind(cache, *a, **kw)
    # All that L1 and L2 have of the prompt; SGLang leaves out the keys of the last node.
    node = given.arguments["last_host_node_id"]
    given.arguments["prefix_keys"] = prefix = _keys_to(cache, node)
    l3.use(prefix)
    return original(*given.args, **given.kwargs)


def _after_received(
    original: Callable[..., Any], scheduler: Any, req: Any, *a: Any, **kw: Any
) -> Any:
    """SGLang uses a node that is not backed up, but does not prefetch behind it. A prefix that
    SGLang cannot look up, such as that of a streaming session, would end the scheduler. Here its
    request goes on without L3."""
    try:
        result = original(scheduler, req, *a, **kw)
    except Exception as error:
        metrics.PROBLEMS.count("look_up")
        if type(error) not in _look_up_failures:
            _look_up_failures.add(type(error))
            logger.warning(
                "hcache: SGLang cannot look up request %s in L3 (logged once): %r", req.rid, error
            )
        return None
    cache, node = scheduler.tree_cache, req.last_host_node
    l3 = _our_l3(cache)
    if l3 is not None and node is not None and not cache.is_backuped(node):
        l3.use(_keys_to(cache, node))
    return result


def _after_written(
    original: Callable[..., Any], cache: Any, node_id: int, *a: Any, **kw: Any
) -> Any:
    result = original(cache, node_id, *a, **kw)
    l3 = _our_l3(cache)
    if l3 is not None:
        l3.backups.wrote(cache, node_id)
    return result


def _after_backup(
    original: Callable[..., Any], cache: Any, node_id: int, device_indices: Any, *a: Any, **kw: Any
) -> Any:
    """Count tokens for which the host pool is full: SGLang does not ask the controller then."""
    result, tokens = original(cache, node_id, device_indices, *a, **kw), len(device_indices)
    if result is None and cache.cache_controller.mem_pool_host.available_size() < tokens:
        metrics.TOKENS.count("not_backed_up_host_pool_full", tokens)
    return result


def _before_stop(original: Callable[..., Any], cache: Any, *a: Any, **kw: Any) -> Any:
    """On SIGTERM, after the last answer. SGLang kills its processes after 15 s."""
    l3 = _our_l3(cache)
    if l3 is not None:
        l3.stop(cache)
    return original(cache, *a, **kw)


def _our_l3(cache: Any) -> Any:
    """The :class:`HCacheStorage` of ``cache``; None if its L3 is another one, or none."""
    controller = getattr(cache, "cache_controller", None)
    backend = getattr(controller, "storage_backend", None)
    return backend if hasattr(backend, "backups") else None


def _keys_to(cache: Any, node: int) -> list[str]:
    tree = cache.tree_core
    return [*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)]


def _capture_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *a: Any, **kw: Any
) -> Any:
    capture = getattr(runner, "hcache_capture", None)
    if capture is None:
        return original(runner, forward_batch, *a, **kw)
    return capture.forward(forward_batch, lambda: original(runner, forward_batch, *a, **kw))


def _around_weight_update(original: Callable[..., Any], updater: Any, *a: Any, **kw: Any) -> Any:
    runtime = current()
    runtime.begin_weight_update()
    try:
        return original(updater, *a, **kw)
    finally:
        runtime.end_weight_update()


def _after_late_weights(original: Callable[..., Any], runner: Any, *a: Any, **kw: Any) -> Any:
    result = original(runner, *a, **kw)
    runtime = current()
    if runtime.runner is runner:
        runtime.read_weights()
    elif runtime.draft is runner:
        runtime.read_draft(runner)
    return result


def _after_request(original: Callable[..., Any], req: Any, *a: Any, **kw: Any) -> None:
    """SGLang appends an adapter's id to ``extra_key``: a request that writes the id there finds the
    adapter's K and V. Put the id first, with its length, where no other request can have it."""
    original(req, *a, **kw)
    own, adapter = req.extra_key or "", req.lora_id or ""
    if adapter or own.startswith(ADAPTER_KEY):
        req.extra_key = f"{ADAPTER_KEY}{len(adapter)}:{adapter}{own[: len(own) - len(adapter)]}"


def _after_reset(original: Callable[..., Any], controller: Any, *a: Any, **kw: Any) -> Any:
    result = original(controller, *a, **kw)
    current().caches_were_flushed()
    return result


TURN = Hook(EVENTS, _around_turn, OnError.END_L3)
