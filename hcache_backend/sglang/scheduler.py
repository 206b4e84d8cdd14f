"""SGLang's scheduler and its requests: requests come, batches run, and how long they take."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any

from hcache_backend import metrics
from hcache_backend.metrics import logger
from hcache_backend.prefetch.gate import catching
from hcache_backend.sglang import waiting
from hcache_backend.sglang.arguments import is_plain
from hcache_backend.sglang.hook_registry import Hook, OnError, Original
from hcache_backend.sglang.runtime import current
from hcache_backend.sglang.storage_threads import gate_of, keys_to, our_l3

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
ADAPTER_KEY = "hcache:adapter:"  # prefix of the keys of requests with an adapter, and of no others

_look_up_failures: set[type[Exception]] = set()  # errors of SGLang's look-ups that were logged
# The last prefills: SGLang's result, launch time, the gate's number, _prefill_work, alone or not.
_prefills: deque[tuple[weakref.ref[Any], float, int, Any, bool]] = deque(maxlen=64)


def around_received(original: Original, scheduler: Any, req: Any, *a: Any, **kw: Any) -> Any:
    """A request comes, or SGLang tries again to prefetch for it. Note what our parts need to know
    of it, and hold what host memory has of its prompt. Behind a node that is not backed up SGLang
    does not ask L3, so L3 learns here of the use of its pages. A prefix that SGLang cannot look up,
    such as that of a streaming session, would end the scheduler: the request goes on without L3."""
    prefetches = current().prefetches
    with catching():
        gate = gate_of(scheduler.tree_cache)
        prefetches.scheduler = scheduler
        prefetches.plain = is_plain(req)
        if gate is not None and not req.storage_prefetch_retry_attempts:
            prefetches.forget_request(req.rid)  # an earlier request may have had the same one
        _note_waiting(scheduler)
    try:
        result = original(scheduler, req, *a, **kw)
    except Exception as error:
        metrics.PROBLEMS.count("look_up")
        if type(error) not in _look_up_failures:
            _look_up_failures.add(type(error))
            text = "hcache: SGLang cannot look up request %s in L3, and goes on without it (logged "
            text += "once): %r. All but the first turn of a streaming session are such requests"
            logger.warning(text, req.rid, error)
        return None
    with catching():
        waiting.hold_new(scheduler, prefetches, req)
    cache, node = scheduler.tree_cache, req.last_host_node
    l3 = our_l3(cache)
    if l3 is not None and node is not None and not cache.is_backuped(node):
        l3.use(keys_to(cache, node))
    return result


def around_batch(original: Original, scheduler: Any, batch: Any, *a: Any, **kw: Any) -> Any:
    """Around ``Scheduler.run_batch``: note when a prefill is launched, its work, and whether
    nothing was recomputed in front of it: see :func:`after_batch`."""
    _note_waiting(scheduler)
    if batch.forward_mode.is_extend():
        with catching():
            waiting.count_used(batch.reqs, current().prefetches)
    gate, prefill = gate_of(scheduler.tree_cache), None
    if gate is not None and (tokens := _prefill_work(batch)) is not None:
        prefill = time.monotonic(), gate.batch_launched(*tokens), tokens
    result = original(scheduler, batch, *a, **kw)
    if gate is not None:
        eager = getattr(scheduler.tree_cache.cache_controller, "eager", None)
        alone = eager is None or not eager.fronts.take_recomputed()
        if prefill is not None:
            _prefills.append((weakref.ref(result), *prefill, alone))
    return result


def after_batch(
    original: Original, scheduler: Any, batch: Any, result: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``Scheduler.process_batch_result``: the gate learns how long a prefill took, from its
    launch, or from the end of the batch before."""
    done, gate = original(scheduler, batch, result, *a, **kw), gate_of(scheduler.tree_cache)
    if gate is not None:
        now = time.monotonic()
        last_end, gate.gpu.last_end = gate.gpu.last_end, now
        for result_ref, launched, number, (tokens, prefix, loaded), alone in _prefills:
            if result_ref() is result:
                gate.gpu.end_work(number)
                if alone:
                    gate.batch_ended(tokens, prefix, loaded, now - max(launched, last_end))
    return done


def before_release(original: Original, weight_manager: Any, *a: Any, **kw: Any) -> Any:
    """Around ``release_memory_occupation``, which ends a server whose backups still run."""
    l3 = our_l3(getattr(weight_manager.scheduler, "tree_cache", None))
    if l3 is not None:
        l3.backups.finish()
    return original(weight_manager, *a, **kw)


def _prefill_work(batch: Any) -> tuple[int, float, int] | None:
    """Tokens of a prefill: computed ones, those before each on average, loaded ones from L3. None
    if its time teaches nothing: with decode steps, or a load of L2."""
    if not batch.forward_mode.is_extend() or batch.forward_mode.is_mixed():
        return None
    tokens, loaded = sum(batch.extend_lens), 0
    if batch.hicache_consumer_index >= 0:  # it waits for a load
        loaded = sum(req.cached_tokens_storage for req in batch.reqs)
        if not loaded or any(req.cached_tokens_host for req in batch.reqs):
            return None
    lengths = zip(batch.extend_lens, batch.prefix_lens, strict=True)
    pairs = sum(extend * prefix + extend * extend / 2 for extend, prefix in lengths)
    return (tokens, max(0.0, pairs / tokens - tokens / 2), loaded) if tokens else None


def _note_waiting(scheduler: Any) -> None:
    gate = gate_of(scheduler.tree_cache)
    if gate is not None:
        gate.prefetches.scheduler = scheduler
        gate.gpu.wanted = gate.prefetches.waits_for_gpu()


def _after_request(original: Original, req: Any, *a: Any, **kw: Any) -> None:
    """SGLang appends an adapter's id to ``extra_key``: a request that writes the id there finds the
    adapter's K and V. Put the id first, with its length, where no other request can have it."""
    original(req, *a, **kw)
    key, adapter = req.extra_key or "", req.lora_id or ""
    if adapter or key.startswith(ADAPTER_KEY):
        req.extra_key = f"{ADAPTER_KEY}{len(adapter)}:{adapter}{key[: len(key) - len(adapter)]}"


RECEIVED = Hook(_SCHEDULER + "_prefetch_kvcache", around_received)
BATCH = Hook(_SCHEDULER + "run_batch", around_batch)
COMPUTED = Hook(_SCHEDULER + "process_batch_result", after_batch)
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
RELEASE = Hook(_MANAGER + "release_memory_occupation", before_release)
REQUEST = Hook("sglang.srt.managers.schedule_batch.Req.__init__", _after_request, OnError.END_L3)
