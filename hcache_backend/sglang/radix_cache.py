"""SGLang's radix cache: a turn of the scheduler, prefetches, and the use of pages."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hcache_backend import metrics
from hcache_backend.prefetch.gate import catching
from hcache_backend.ranks import Turn
from hcache_backend.sglang import waiting
from hcache_backend.sglang.hook_registry import Hook, OnError, Original
from hcache_backend.sglang.runtime import current
from hcache_backend.sglang.storage_threads import gate_of, keys_to, our_l3, pages_per_report
from hcache_backend.sglang.tree import is_on_device, slots_to

if TYPE_CHECKING:  # it needs SGLang, before which plugins are imported
    from hcache_backend.sglang.controller import OwnPagesController

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."


def around_turn(original: Original, cache: Any, *a: Any, **kw: Any) -> Any:
    """Around ``check_hicache_events``, in each turn of the scheduler: HiCache's part. Then ours:
    propose numbers, agree by one reduction on the smallest of all ranks, and act on them."""
    gate, l3, turn, prefetches = gate_of(cache), our_l3(cache), Turn(cache), current().prefetches
    controller = getattr(cache, "cache_controller", None)
    own_pages = controller if hasattr(controller, "node_backups") else None
    if own_pages is not None or l3 is not None:
        cache.hicache_storage_pass_prefix_keys = True  # of the pages before a node that is written
    with catching():
        cache.ongoing_prefetch = prefetches.watch(cache.ongoing_prefetch)
        waiting.release_departed(prefetches)
    result = original(cache, *a, **kw)
    with catching():
        waiting.hold_fetched(cache, prefetches)
    if gate is not None:
        gate.propose_ends(turn)
    prefetches.changed = {}  # both above have read it; SGLang's next calls fill it again
    if own_pages is not None:
        propose_turn(own_pages, turn)
    if l3 is not None:
        l3.backups.propose_missing_pages(turn)
    turn.agree(cache._all_reduce_attn_groups)
    if gate is not None:
        gate.apply_ends()
    if own_pages is not None:
        apply_turn(own_pages, turn)
    if l3 is not None:
        l3.backups.apply_missing_pages(cache)
    return result


def propose_turn(controller: OwnPagesController, turn: Turn) -> None:
    """Restore what has arrived; then our parts add to ``turn`` numbers that ranks agree on."""
    eager = controller.eager
    if eager is not None:
        eager.fronts.propose_slices(turn, eager.restore_arrived(turn.cache))
    controller.node_backups.propose_layouts(turn)
    for checks in controller.checks:
        checks.propose_checks(turn)


def apply_turn(controller: OwnPagesController, turn: Turn) -> None:
    """The controller's parts act on the numbers that the ranks have agreed on."""
    if controller.eager is not None:
        controller.eager.fronts.apply_slices()
    controller.node_backups.apply_layouts()
    for checks in controller.checks:
        checks.apply_checks()
    controller.stages.exchange_messages()
    controller.evict_unloadable(turn.cache)


def around_drain(
    original: Original,
    cache: Any,
    n_storage_hit: int | None,
    n_ack_prefetch: int | None,
    n_backup: int | None,
    *a: Any,
    **kw: Any,
) -> Any:
    """HiCache takes as many answers of look-ups, reports of reads, and backups as every rank has
    (None: as this rank has): answers only if L2 has room. We apply reports of prefetches that are
    read from the back before that, and note which prefetches are over after it."""
    gate, controller, prefetches = gate_of(cache), cache.cache_controller, current().prefetches
    cache.ongoing_prefetch = prefetches.watch(cache.ongoing_prefetch)
    with catching():
        n_storage_hit = waiting.admit_answers(cache, prefetches, n_storage_hit)
    reports = list(itertools.islice(controller.ack_prefetch_queue.queue, n_ack_prefetch or 0))
    running = {report.operation: prefetches.prefetch_of(report.operation) for report in reports}
    running = {op: prefetch for op, prefetch in running.items() if prefetch.info is not None}
    if getattr(controller, "eager", None) is not None:
        from hcache_backend.sglang.reads import apply_reports  # plugins come before SGLang

        apply_reports(reports, running, prefetches, controller.page_size)
    answers, l3 = controller.prefetch_hit_queue.queue, our_l3(cache)
    admitted = list(itertools.islice(answers, n_storage_hit or 0))
    if l3 is not None and n_backup is not None:  # None: this rank alone, before a detach
        backups = itertools.islice(controller.ack_backup_queue.queue, n_backup)
        l3.backups.note_answers(cache, list(backups))
    result = original(cache, n_storage_hit, n_ack_prefetch, n_backup, *a, **kw)
    prefetches.changed.update(running)
    with catching():
        completed = [report.operation for report in reports if report.completed_req]
        for operation in completed:
            if operation in running and _fell_short(operation, cache):
                cache.storage_prefetch_retries.refetch(operation.handle.rid)
    if gate is not None and cache.pp_size == 1:
        unread = [operation for operation in admitted if operation.host_indices is None]
        gate.prefetches.unfinished.difference_update(unread, completed)
    return result


def _fell_short(operation: Any, cache: Any) -> bool:
    """True if a page of a hybrid model's hit was damaged or gone, on any rank: SGLang has thrown
    the hit away, and another, shorter one is worth a try. All ranks have the same numbers."""
    side_pools = [t for t in operation.pool_transfers or () if t.indices_from_pool is None]
    if not side_pools or operation.is_terminated() or cache.pp_size > 1:
        return False
    hit_pages = operation.pool_storage_result.extra_pool_hit_pages
    whole = operation.completed_tokens == len(operation.hash_value) * cache.page_size
    return not whole or any(hit_pages.get(t.name, 0) != len(t.keys or ()) for t in side_pools)


def around_prefetch(original: Original, cache: Any, request: Any, *a: Any, **kw: Any) -> Any:
    """Around ``prefetch_from_storage``, which asks L3 for a request's tokens, unless the gate is
    against it. Our L3 learns which pages before them are used, and their keys."""
    call, may_ask = inspect.signature(original).bind(cache, request, *a, **kw), True
    arguments = call.arguments
    with catching():
        gate = gate_of(cache)
        if gate is not None and request not in cache.ongoing_prefetch:
            before = len(arguments.get("matched_prefix_tokens") or ())
            recomputing = getattr(cache.cache_controller, "recomputing", None)
            fronts = recomputing is not None and _has_front(cache, arguments)
            may_ask = gate.may_ask(request.rid, before, recomputing if fronts else None)
    if not may_ask:
        cache.storage_prefetch_retries.cancel(request.rid)
        return None
    l3 = our_l3(cache)
    if l3 is not None:
        # All that L1 and L2 have of the prompt; SGLang leaves out the keys of the last node.
        arguments["prefix_keys"] = prefix = keys_to(cache, arguments["last_host_node_id"])
        l3.use(prefix)
    result = original(*call.args, **call.kwargs)
    if request not in cache.ongoing_prefetch:
        current().prefetches.waiting.pop(request.rid, None)  # SGLang did not begin it
    return result


def _has_front(cache: Any, arguments: Mapping[str, Any]) -> bool:
    """True if a prefetch comes in several pieces, and the device has the tokens before it."""
    pages = len(arguments["new_input_tokens"]) // cache.page_size
    parts = pages > pages_per_report(cache.cache_controller, pages)
    return parts and is_on_device(cache.tree_core, arguments["last_host_node_id"])


def around_load_back(original: Original, cache: Any, params: Any, *a: Any) -> Any:
    """Around ``init_load_back``. First layers of a load can be recomputed only behind the slots of
    the tokens before it: while SGLang begins the load, ``prefix`` finds them."""
    controller: Any = getattr(cache, "cache_controller", None)
    if not hasattr(controller, "prefix"):
        return original(cache, params, *a)
    no_prefix = controller.prefix
    controller.prefix = lambda: slots_to(cache.tree_core, params.req.last_node)
    try:
        return original(cache, params, *a)
    finally:
        controller.prefix = no_prefix


def after_written(original: Original, cache: Any, node_id: int, *a: Any, **kw: Any) -> Any:
    """HiCache has queued a node for L3: our L3 notes it, to write it again if it must."""
    result = original(cache, node_id, *a, **kw)
    l3 = our_l3(cache)
    if l3 is not None:
        l3.backups.note_given(cache, node_id)
    return result


def after_backup(
    original: Original, cache: Any, node_id: int, device_indices: Any, *a: Any, **kw: Any
) -> Any:
    """Count tokens for which the host pool is full: SGLang does not ask the controller then."""
    result, tokens = original(cache, node_id, device_indices, *a, **kw), len(device_indices)
    if result is None and cache.cache_controller.mem_pool_host.available_size() < tokens:
        metrics.TOKENS.count("not_backed_up_host_pool_full", tokens)
    return result


def around_events(original: Original, cache: Any, *a: Any, **kw: Any) -> Any:
    """Around ``take_events``: SGLang publishes the events of L3 with its own."""
    events, l3 = original(cache, *a, **kw), our_l3(cache)
    return events if l3 is None or l3.events is None else [*events, *l3.events.take_events()]


def before_stop(original: Original, cache: Any, *a: Any, **kw: Any) -> Any:
    """On SIGTERM, after the last answer. SGLang kills its processes after 15 s."""
    l3 = our_l3(cache)
    if l3 is not None:
        l3.stop(cache)
    return original(cache, *a, **kw)


TURN = Hook(_CACHE + "check_hicache_events", around_turn, OnError.END_L3)
DRAIN = Hook(_CACHE + "_drain_storage_control_queues_impl", around_drain, OnError.END_L3)
PREFETCH = Hook(_CACHE + "prefetch_from_storage", around_prefetch)
LOAD_BACK = Hook(_CACHE + "init_load_back", around_load_back)
EVENTS = Hook(_CACHE + "take_events", around_events)
WRITTEN = Hook(_CACHE + "write_backup_storage", after_written)
BACKED_UP = Hook(_CACHE + "_execute_kv_backup", after_backup)
STOPPING = Hook(_CACHE + "release_host_resources", before_stop)
