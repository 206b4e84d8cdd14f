"""Calls of the gate from SGLang; :mod:`..hooks` has their places.

- The verdict of a look-up needs no agreement: SGLang takes the shortest hit of all ranks.
- Prefetches end by one reduction in a turn, whose result is the same on every rank.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from hcache_backend import metrics
from hcache_backend.prefetch.eager_loads import is_on_device
from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.governor import waits_for_gpu
from hcache_backend.prefetch.prefetch import Prefetch
from hcache_backend.sglang.runtime import current
from hcache_backend.turn import Said, Turn

# SGLang's name of look-ups without a request, on the scheduler's thread; they read nothing
_NO_REQUEST = "__storage_hit_query__"
_STOP_SECONDS = 60.0  # longest wait for the threads of an idle server to end a read


def gate_of(cache: Any) -> HitGate | None:
    """The gate for hits of a cache or its controller; None if all hits are read."""
    return current().hit_gate if getattr(cache, "enable_storage", False) else None


# if the block fails, SGLang goes on as without a decision
harmless = partial(metrics.harmless, "hit_gate", "a decision about an L3 hit failed; it is read")


# ---- the scheduler thread ----


def before_asking(
    original: Callable[..., Any], scheduler: Any, req: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``Scheduler._prefetch_kvcache``: when a request comes, and for SGLang's retries."""
    gate = gate_of(scheduler.tree_cache)
    if gate is not None and not req.storage_prefetch_retry_attempts:
        gate.prefetches.forget(req.rid)  # an earlier request may have had the same one
    _note_waiting(scheduler)
    return original(scheduler, req, *a, **kw)


def around_prefetch(
    original: Callable[..., Any], cache: Any, request: Any, *a: Any, **kw: Any
) -> Any:
    gate = gate_of(cache)
    asks = True
    if gate is not None and request not in cache.ongoing_prefetch:
        given = inspect.signature(original).bind(cache, request, *a, **kw).arguments
        before = len(given.get("matched_prefix_tokens") or ())
        recomputing = getattr(cache.cache_controller, "recomputing", None)
        if recomputing is not None and not _has_front(cache, given):
            recomputing = None
        asks = gate.may_ask(request.rid, before, recomputing)
    if asks:
        return original(cache, request, *a, **kw)
    cache.storage_prefetch_retries.cancel(request.rid)
    return None


def _has_front(cache: Any, asked: Mapping[str, Any]) -> bool:
    """True if the front of a prefetch (arguments of its call) may be recomputed: it comes in
    several pieces, and the device has K and V of the tokens before it."""
    pages = len(asked["new_input_tokens"]) // cache.page_size
    if pages <= _pages_per_report(cache.cache_controller, pages):
        return False
    return is_on_device(cache.tree_core, asked["last_host_node_id"])


class Ending(NamedTuple):
    """``said``: for each prefetch, True if it goes on on this rank; last, True if L3 is in time."""

    gate: HitGate
    operations: list[Any]
    said: Said


def ask_to_end(cache: Any, turn: Turn) -> Ending | None:
    """Ask which prefetches end. Every rank calls it in the same turns, with the same prefetches."""
    gate = gate_of(cache)
    if gate is None:
        return None
    operations = [info.operation for info in cache.ongoing_prefetch.values()]
    verdicts = [False] * (len(operations) + 1)
    with harmless():
        verdicts = gate.to_end([_as_it_is(cache, operation) for operation in operations])
    if cache.pp_size > 1:
        return None  # pipeline stages are not at one point
    gate.prefetches.unfinished.update(operations)
    if not operations and not gate.agreed_stalled:
        return None  # the same on all ranks: no rank acts on its own verdict alone
    return Ending(gate, operations, turn.say(*(not ends for ends in verdicts)))


def end_prefetches(asked: Ending | None) -> None:
    """End the prefetches on which the ranks have agreed."""
    if asked is None:
        return
    *going_on, in_time = asked.said.least
    ended = [one for one, goes_on in zip(asked.operations, going_on, strict=True) if not goes_on]
    for operation in ended:
        operation.mark_terminate()
    with harmless():
        asked.gate.agreed([asked.gate.prefetches.of(one) for one in ended], not in_time)


def around_drain(
    original: Callable[..., Any],
    cache: Any,
    n_storage_hit: int | None,
    n_ack_prefetch: int | None,
    *a: Any,
    **kw: Any,
) -> Any:
    """Around ``UnifiedRadixCache._drain_storage_control_queues_impl``, which takes the answers and
    reports that every rank has. Of pipeline stages only the first one knows that they are there."""
    gate = gate_of(cache)
    if gate is None or cache.pp_size > 1:
        return original(cache, n_storage_hit, n_ack_prefetch, *a, **kw)
    controller = cache.cache_controller
    asked, reports = controller.prefetch_hit_queue.queue, controller.ack_prefetch_queue.queue
    answered = list(itertools.islice(asked, n_storage_hit or 0))
    taken = list(itertools.islice(reports, n_ack_prefetch or 0))
    result = original(cache, n_storage_hit, n_ack_prefetch, *a, **kw)
    unread = [operation for operation in answered if operation.host_indices is None]
    read = [report.operation for report in taken if report.completed_req]
    gate.prefetches.unfinished.difference_update(unread, read)
    return result


def around_stop(original: Callable[..., Any], controller: Any, *a: Any, **kw: Any) -> Any:
    """Around ``HiCacheController._stop_storage_threads``, for a flush or a detach; no request is
    served. If a thread of this rank stopped before a prefetch whose request is gone, the other
    ranks would stay in a reduction, and SGLang would give the server up."""
    gate = current().hit_gate
    if gate is not None:
        _let_threads_finish(gate, controller)
        gate.prefetches.unfinished.clear()
    return original(controller, *a, **kw)


def _let_threads_finish(gate: HitGate, controller: Any) -> None:
    threads = (
        controller.prefetch_thread,
        controller.prefetch_io_aux_thread,
        controller.prefetch_sync_thread,
    )
    deadline = time.monotonic() + _STOP_SECONDS
    while all(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        answered = set(controller.prefetch_hit_queue.queue)
        reports = list(controller.ack_prefetch_queue.queue)
        read = {report.operation for report in reports if report.completed_req}
        if not gate.prefetches.unfinished - answered - read:
            return
        time.sleep(0.001)


def _as_it_is(cache: Any, operation: Any) -> Prefetch:
    """The prefetch of ``operation``, as far as it has come."""
    prefetch, size = current().prefetches.of(operation), cache.page_size
    meeting = prefetch.meeting
    prefetch.lost = 0
    if meeting is not None:
        if meeting.pages == meeting.front:
            prefetch.lost = len(meeting.here) * size
        if meeting.reachable is not None:
            prefetch.reachable = max(0, meeting.reachable - meeting.front) * size
    prefetch.arrived = operation.completed_tokens + prefetch.lost
    pages = _pages_per_report(cache.cache_controller, len(operation.hash_value))
    prefetch.step = pages * size
    prefetch.whole = bool(operation.pool_transfers)
    return prefetch


def _pages_per_report(controller: Any, pages: int) -> int:
    """Number of pages whose arrival is reported together in a prefetch of ``pages``."""
    from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE

    pages_per_report = getattr(controller, "pages_per_report", None)
    return pages_per_report(pages) if pages_per_report else min(pages, STORAGE_BATCH_SIZE)


def around_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``Scheduler.run_batch``: note the launch time of a prefill, and its work."""
    _note_waiting(scheduler)
    gate, prefill = gate_of(scheduler.tree_cache), None
    if gate is not None:
        work = _prefill_work(batch)
        if work is not None:
            prefill = time.monotonic(), gate.launched(*work), work
    result = original(scheduler, batch, *a, **kw)
    if gate is not None:
        alone = not _stands_behind_recomputation(scheduler)
        if prefill is not None:
            result.hcache_prefill = *prefill, alone
    return result


def after_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *a: Any, **kw: Any
) -> Any:
    done = original(scheduler, batch, result, *a, **kw)
    now, before = time.monotonic(), getattr(scheduler, "hcache_last_batch", 0.0)
    scheduler.hcache_last_batch = now
    prefill = getattr(result, "hcache_prefill", None)
    gate = gate_of(scheduler.tree_cache)
    if prefill is not None and gate is not None:
        launched, number, (tokens, prefix, loaded), alone = prefill
        gate.gpu.ended(number)
        if alone:
            gate.prefilled(tokens, prefix, loaded, now - max(launched, before))
    return done


def _prefill_work(batch: Any) -> tuple[int, float, int] | None:
    """Tokens that a batch computes, the average number before them, and those from L3. None if it
    is no prefill, or waits for something else besides."""
    if not batch.forward_mode.is_extend() or batch.forward_mode.is_mixed():
        return None
    tokens = sum(batch.extend_lens)
    loaded = 0
    if batch.hicache_consumer_index >= 0:
        loaded = sum(req.cached_tokens_storage for req in batch.reqs)
        if not loaded or any(req.cached_tokens_host for req in batch.reqs):
            return None
    pairs = sum(
        extend * prefix + extend * extend / 2
        for extend, prefix in zip(batch.extend_lens, batch.prefix_lens, strict=True)
    )
    return (tokens, max(0.0, pairs / tokens - tokens / 2), loaded) if tokens else None


def _stands_behind_recomputation(scheduler: Any) -> bool:
    eager = getattr(scheduler.tree_cache.cache_controller, "eager", None)
    return eager is not None and eager.take_recomputed()


def _note_waiting(scheduler: Any) -> None:
    gate = gate_of(scheduler.tree_cache)
    if gate is not None:
        gate.gpu.wanted = waits_for_gpu(scheduler)


# ---- HiCache's storage threads ----


def around_look_up(
    original: Callable[..., Any], controller: Any, operation: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``HybridCacheController._storage_hit_query``, before its MIN over ranks."""
    gate = gate_of(controller)
    if gate is None or operation.request_id == _NO_REQUEST:
        return original(controller, operation, *a, **kw)
    prefetch = gate.prefetches.of(operation)
    if prefetch.refused:
        return [], 0
    found_shared = getattr(controller.storage_backend, "take_found_behind", lambda: 0)
    found_shared()  # of a look-up that was judged nowhere
    with gate.l3.looking():
        keys, tokens = original(controller, operation, *a, **kw)
    taken, shared = tokens, min(tokens, found_shared() * controller.page_size)
    if tokens:
        parts = not operation.pool_transfers
        taken = gate.takes(prefetch, tokens, len(operation.token_ids), shared, parts=parts)
    return keys[: taken // controller.page_size], taken


def around_read(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around ``HybridCacheController._page_transfer``: a whole prefetch."""
    gate = gate_of(controller)
    if gate is None:
        return original(controller, operation)
    size, prefetch = controller.page_size, gate.prefetches.of(operation)
    pages = len(operation.hash_value)
    with harmless():
        step = _pages_per_report(controller, pages) * size
        gate.read_begins(prefetch, pages * size, step)
    try:
        return original(controller, operation)
    finally:
        with harmless():
            if prefetch.meeting is not None and not operation.is_terminated():
                gate.l3.spared(prefetch.meeting.spared * size)
            gate.read_ends()


def around_read_batch(original: Callable[..., Any], controller: Any, *a: Any, **kw: Any) -> Any:
    pages = original(controller, *a, **kw)
    if not hasattr(controller, "pages_per_report"):  # ours tells each part itself
        note_arrival(controller, pages)
    return pages


def note_waiting(seconds: float) -> None:
    """The present prefetch was not read for ``seconds``."""
    with harmless():
        current().l3.waited(seconds)


def note_arrival(controller: Any, pages: int) -> None:
    """``pages`` more of the present prefetch have arrived."""
    with harmless():
        current().l3.arrived(pages * controller.page_size)
