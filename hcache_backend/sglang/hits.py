"""What the gate sees of SGLang, and does to it; its places are in :mod:`..hooks`.

The verdict of a look-up needs no agreement of its own: SGLang takes the shortest hit of all ranks.
Prefetches end by one reduction in a turn, whose result is the same on every rank.
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
from hcache_backend.prefetch.gate import HitGate, Running
from hcache_backend.prefetch.governor import waits_for_gpu
from hcache_backend.prefetch.meeting import meeting_of
from hcache_backend.sglang.runtime import current
from hcache_backend.turn import Said, Turn

_NO_REQUEST = "__storage_hit_query__"
"""SGLang's name of look-ups on behalf of nobody, on the scheduler's thread: nothing is read."""
_STOP_SECONDS = 60.0
"""How long the threads of a server without requests may take to end a read."""


def gate_of(cache: Any) -> HitGate | None:
    """What decides about the hits of a cache, or of its controller; None: they are all read."""
    return current().hit_gate if getattr(cache, "enable_storage", False) else None


harmless = partial(metrics.harmless, "hit_gate", "a decision about an L3 hit failed; it is read")
"""What is decided within the block: without it SGLang goes on as it would."""


# ---- the scheduler thread ----


def before_asking(
    original: Callable[..., Any], scheduler: Any, req: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``Scheduler._prefetch_kvcache``: when a request comes, and for SGLang's retries."""
    gate = gate_of(scheduler.tree_cache)
    if gate is not None and not req.storage_prefetch_retry_attempts:
        gate.forget(req.rid)  # an earlier request may have had the same one
    _note_waiting(scheduler)
    return original(scheduler, req, *a, **kw)


def around_prefetch(
    original: Callable[..., Any], cache: Any, request: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``UnifiedRadixCache.prefetch_from_storage``."""
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
    """Whether a prefetch, given the arguments of its call, may have a front that is recomputed.

    Not what comes in one piece, nor what follows tokens whose K and V the device does not have.
    """
    pages = len(asked["new_input_tokens"]) // cache.page_size
    if pages <= _pages_per_report(cache.cache_controller, pages):
        return False
    return is_on_device(cache.tree_core, asked["last_host_node_id"])


class Ending(NamedTuple):
    """What this rank said in a turn: of each prefetch whether it goes on, and last, of L3."""

    gate: HitGate
    operations: list[Any]
    said: Said


def ask_to_end(cache: Any, turn: Turn) -> Ending | None:
    """Every rank calls it in the same turns, with the same prefetches under way."""
    gate = gate_of(cache)
    if gate is None:
        return None
    operations = [info.operation for info in cache.ongoing_prefetch.values()]
    verdicts = [False] * (len(operations) + 1)
    with harmless():
        verdicts = gate.to_end([_running(cache, operation) for operation in operations])
    if cache.pp_size > 1:
        return None  # pipeline stages are not at one point
    gate.unfinished.update(operations)
    if not operations and not gate.agreed_overdue:
        return None  # on no rank: what this one sees alone is not acted on
    return Ending(gate, operations, turn.say(*(not ends for ends in verdicts)))


def end_prefetches(asked: Ending | None) -> None:
    """The ranks have agreed."""
    if asked is None:
        return
    *going_on, in_time = asked.said.least
    ended = [one for one, goes_on in zip(asked.operations, going_on, strict=True) if not goes_on]
    for operation in ended:
        operation.mark_terminate()
    with harmless():
        asked.gate.agreed([operation.request_id for operation in ended], not in_time)


def around_drain(
    original: Callable[..., Any],
    cache: Any,
    n_storage_hit: int | None,
    n_ack_prefetch: int | None,
    *a: Any,
    **kw: Any,
) -> Any:
    """Around ``UnifiedRadixCache._drain_storage_control_queues_impl``.

    It takes as many answers of L3 and reports of reads as there are on every rank. Of pipeline
    stages only the first one knows that they are there.
    """
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
    gate.unfinished.difference_update(unread, read)
    return result


def around_stop(original: Callable[..., Any], controller: Any, *a: Any, **kw: Any) -> Any:
    """Around ``HiCacheController._stop_storage_threads``, for a flush or a detach.

    A thread of this rank that stops before a prefetch whose request is gone would leave those of
    other ranks in a reduction, and SGLang gives the server up. No request is being served now.
    """
    gate = current().hit_gate
    if gate is not None:
        _let_threads_finish(gate, controller)
        gate.unfinished.clear()
    return original(controller, *a, **kw)


def _let_threads_finish(gate: HitGate, controller: Any) -> None:
    """Wait until HiCache's threads have done, on this rank, all that was asked of them."""
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
        if not gate.unfinished - answered - read:
            return
        time.sleep(0.001)


def _running(cache: Any, operation: Any) -> Running:
    meeting, lost, reachable = meeting_of(operation), 0, None
    if meeting is not None:
        if meeting.pages == meeting.front:
            lost = len(meeting.here) * cache.page_size
        if meeting.reachable is not None:
            reachable = max(0, meeting.reachable - meeting.front) * cache.page_size
    return Running(
        operation.request_id,
        operation.completed_tokens + lost,
        _pages_per_report(cache.cache_controller, len(operation.hash_value)) * cache.page_size,
        whole=bool(operation.pool_transfers),
        lost=lost,
        reachable=reachable,
    )


def _pages_per_report(controller: Any, pages: int) -> int:
    """Of how many pages of a prefetch of ``pages`` arrivals are reported together."""
    from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE

    pages_per_report = getattr(controller, "pages_per_report", None)
    return pages_per_report(pages) if pages_per_report else min(pages, STORAGE_BATCH_SIZE)


def around_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``Scheduler.run_batch``: note when a prefill was launched, and what it computes."""
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
    """Around ``Scheduler.process_batch_result``: the batch has been computed."""
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
    """Tokens that a batch computes, those before them on average, and those that L3 brought.

    None: not a prefill, or one that waits for something else besides.
    """
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
    """Whether eager restores recomputed layers just before a batch, on its stream."""
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
    if gate.was_refused(operation.request_id):
        return [], 0
    found_behind = getattr(controller.storage_backend, "take_found_behind", lambda: 0)
    found_behind()  # of a look-up that was judged nowhere
    with gate.l3.looking():
        keys, tokens = original(controller, operation, *a, **kw)
    taken, behind = tokens, min(tokens, found_behind() * controller.page_size)
    if tokens:
        wanted = len(operation.token_ids)
        page = 0 if operation.pool_transfers else controller.page_size
        taken = gate.takes(operation.request_id, tokens, wanted, behind, page)
    return keys[: taken // controller.page_size], taken


def around_read(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around ``HybridCacheController._page_transfer``: a whole prefetch."""
    gate = gate_of(controller)
    if gate is None:
        return original(controller, operation)
    size = controller.page_size
    pages = len(operation.hash_value)
    with harmless():
        step = _pages_per_report(controller, pages) * size
        gate.read_begins(operation.request_id, pages * size, step)
    try:
        return original(controller, operation)
    finally:
        with harmless():
            meeting = meeting_of(operation)
            if meeting is not None and not operation.is_terminated():
                gate.l3.spared(meeting.spared * size)
            gate.read_ends()


def around_read_batch(original: Callable[..., Any], controller: Any, *a: Any, **kw: Any) -> Any:
    """Around ``HiCacheController._page_transfer_kv_batch``: pages have arrived."""
    pages = original(controller, *a, **kw)
    if not hasattr(controller, "pages_per_report"):  # ours tells each part itself
        note_arrival(controller, pages)
    return pages


def note_waiting(controller: Any, seconds: float) -> None:
    """The prefetch that is being read was not read for so long."""
    with harmless():
        gate = gate_of(controller)
        if gate is not None:
            gate.l3.waited(seconds)


def note_arrival(controller: Any, pages: int) -> None:
    """So many more pages of the prefetch that is being read are there."""
    with harmless():
        gate = gate_of(controller)
        if gate is not None:
            gate.l3.arrived(pages * controller.page_size)
