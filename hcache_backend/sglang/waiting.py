"""Requests that wait to be admitted: L3 is read for them in order, as far as host memory has room,
and host memory keeps what it has of their prompts. SGLang does not ask L3 once prefetches may fill
half of host memory. Here every request asks, and an answer stays in HiCache's queue until there is
room. All ranks, and pipeline stages, do the same."""

from __future__ import annotations

import sys
from collections.abc import Container, Hashable, Sequence
from functools import partial
from itertools import chain, compress, count, filterfalse, islice, starmap
from operator import is_not
from typing import Any

from hcache_backend import metrics
from hcache_backend.prefetch.prefetches import HeldPrompt, Prefetches
from hcache_backend.sglang.compat import set_timeout

_JUDGED = 16  # answers that a turn looks at again while they wait for room
_SHARE = 2  # at most half of host memory is held or being read: backups need the other half


def may_hold_prompts(cache: Any) -> bool:
    """True if this module may act: without host pages of its own HiCache waits for room itself."""
    return getattr(cache, "buffer_pipeline", None) is None


def admit_answers(cache: Any, prefetches: Prefetches, answered: int | None) -> int | None:
    """Number of answers of look-ups that HiCache may take, of the ``answered`` first ones, whose
    front they are moved to; it reads L3 for each. Others wait for room in host memory, or for a
    prefetch that brings their first page. None: HiCache goes on by itself."""
    controller = cache.cache_controller
    if answered is None or not may_hold_prompts(cache):
        return answered
    controller.prefetch_capacity_limit = sys.maxsize  # room is judged here, by what L3 has
    prefetches.short_of_room = False
    if not answered:
        return 0
    filled, coming = prefetches.releasable + prefetches.reading_tokens, set[str]()
    answers, taken = controller.prefetch_hit_queue, dict[Any, None]()
    with answers.not_empty:  # the first pipeline stage has them, and later ones get them
        answers.not_empty.wait_for(lambda: len(answers.queue) >= answered)
    queued, known = list(islice(answers.queue, answered)), len(prefetches.answers)
    if queued[:known] != prefetches.answers:  # a flush has emptied the queue
        known = 0
    rechecked = queued[: min(known, _JUDGED)]  # of those that have waited before
    short, allotted, hits, has_timeout = False, 0, 0, cache.prefetch_stop_policy == "timeout"
    for place, operation in enumerate([*rechecked, *queued[known:]]):
        short |= place == len(rechecked) < known
        needed = _tokens_to_read(cache, prefetches, operation, coming)
        if needed and not short:
            short = bool(filled) and filled + needed > _room(cache)
            room = not short and _make_room(cache, allotted + needed)
            if not short and not (room and _make_room_beside(prefetches, operation.handle, hits)):
                short = bool(filled) or (needed <= _room(cache) and not _is_idle(prefetches))
                if not short and operation.pool_transfers:
                    # HiCache would read a part, at the end of which other pools have nothing.
                    cache.revoke_pending_prefetch(operation.handle)
                    needed = 0
        waits = needed is None or bool(needed and short)  # those behind it do not overtake it
        if has_timeout and waits == (place >= len(rechecked)):
            set_timeout(cache, operation, runs=not waits)  # it is not read yet, or it was not
        if waits:
            continue
        taken[operation] = None
        if needed:
            filled, allotted, hits = filled + needed, allotted + needed, hits + 1
            coming.update(operation.hash_value)
    prefetches.answers = [*filterfalse(taken.__contains__, queued)] if taken else queued
    if taken and prefetches.answers:
        with answers.mutex:
            all_answers = answers.queue
            others = [*all_answers][answered:]
            all_answers.clear()
            all_answers.extend([*taken, *prefetches.answers, *others])
    prefetches.short_of_room = short
    return len(taken)


def _room(cache: Any) -> int:
    """Most tokens in host memory that are held, or being read."""
    return int(cache.cache_controller.mem_pool_host.size) // _SHARE


def _make_room(cache: Any, tokens: int) -> bool:
    """True if host memory has room for tokens that are going to be loaded. HiCache evicts nothing
    from it that is on the device, too: that is evicted from the device as the load would."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # plugins are imported before it

    host, device = cache.cache_controller.mem_pool_host, cache.token_to_kv_pool_allocator
    device = getattr(device, "full_attn_allocator", device)  # windows have pages of their own
    cache.evict_host(max(0, tokens - host.available_size()))
    short = tokens - device.available_size()
    if host.available_size() < tokens and short > 0 and not cache.is_write_back:
        cache.evict_for_alloc(EvictParams(num_tokens=short))
        cache.evict_host(tokens - host.available_size())
    return bool(host.available_size() >= tokens)


def _make_room_beside(prefetches: Prefetches, handle: Hashable, hits: int) -> bool:
    """True if other host pools have room for the window, or the state, at the end of the hit
    ``handle``, behind ``hits`` of this turn. Each hit that is held, or being read, has one."""
    cache = prefetches.scheduler.tree_cache
    host, hit = cache.cache_controller.mem_pool_host, cache.ongoing_prefetch[handle]
    pages = hit.operation.storage_hit_count // cache.page_size
    others = prefetches.releasable_nodes + len(prefetches.reading) + hits
    for component, sides in hit.comp_xfers.items():
        for side in sides:
            pool = host.entry_map[side.name].host_pool
            rows = 0 if side.indices_from_pool else min(len(side.keys), pages) * pool.page_size
            if others and (others + 1) * rows > pool.size // _SHARE:
                return False
            cache.evict_host(max(0, (hits + 1) * rows - pool.available_size()), component)
            if pool.available_size() < (hits + 1) * rows:
                return False
    return True


def _is_idle(prefetches: Prefetches) -> bool:
    """True if no batch will give room: then HiCache reads as many tokens as there is room for."""
    scheduler = prefetches.scheduler
    others = getattr(scheduler, "running_mbs", ()), getattr(scheduler, "mbs", ())  # of stages
    batches = scheduler.running_batch, scheduler.last_batch, *chain(*others)
    return all(batch is None or batch.is_empty() for batch in batches)


def _tokens_to_read(
    cache: Any, prefetches: Prefetches, operation: Any, coming: Container[str]
) -> int | None:
    """Tokens that HiCache would read for an answer. None: another prefetch reads the first page,
    now or from this turn on, as those do whose keys are ``coming``."""
    info, tokens = cache.ongoing_prefetch.get(operation.handle), int(operation.storage_hit_count)
    wanted = info is not None and info.operation is operation and not operation.is_terminated()
    if not wanted or tokens < cache.prefetch_threshold:
        return 0
    first = operation.hash_value[0]
    other = prefetches.brought.get(first)
    if first in coming or (other is not None and other.info is not None):
        return None
    if other is not None and other.ended_after_ask >= prefetches.prefetch_of(operation).ask_number:
        cache.revoke_pending_prefetch(operation.handle)
        cache.storage_prefetch_retries.refetch(operation.handle.rid)
        return 0
    return tokens


def hold_new(scheduler: Any, prefetches: Prefetches, request: Any) -> None:
    """SGLang has looked a request up, new or waiting: let host memory keep its prompt."""
    cache, rid = scheduler.tree_cache, request.rid
    known = rid in prefetches.held
    early = rid in prefetches.early if known else _bootstrapping(scheduler) is not None
    _forget_prompt(prefetches, rid)
    if not getattr(cache, "enable_storage", False):
        return
    info = cache.ongoing_prefetch.get(request.cache_request_handle)
    prompt = prefetches.held[rid] = HeldPrompt(request, None if info is None else info.operation)
    if not known:  # SGLang appends it to one of its queues
        prefetches.line.insert(len(prefetches.line) - (not early), request)
    if early:
        prefetches.early[rid] = prompt
    elif info is not None:
        prefetches.fetching[rid] = prompt
    tokens, short = request.host_hit_length, prefetches.short_of_room
    if tokens and not short and prefetches.held_tokens + tokens <= _room(cache):
        _lock_prompt(cache, prefetches, prompt)


def _bootstrapping(scheduler: Any) -> Any:
    """Queue of a prefill server's requests that wait for their decode servers; None: no such."""
    return getattr(scheduler, "disagg_prefill_bootstrap_queue", None)


def _lock_prompt(cache: Any, prefetches: Prefetches, prompt: HeldPrompt) -> None:
    """Let L2 keep what it has of a prompt, by its last look-up, until ``prompt.unlock()``."""
    node, tokens = prompt.request.last_host_node, prompt.request.host_hit_length
    _unlock_prompt(prefetches, prompt)
    if tokens and may_hold_prompts(cache) and cache.is_backuped(node):
        params = cache.inc_host_lock_ref(node).to_dec_params()
        prompt.unlock = partial(_unlock, cache, cache.storage_prefetch_retries, node, params)
        prompt.node, prompt.tokens = node, tokens
        prefetches.count_tokens(prompt)


def _unlock_prompt(prefetches: Prefetches, prompt: HeldPrompt) -> None:
    if prompt.unlock is not None:
        prompt.unlock()
        prompt.tokens, prompt.unlock = 0, None
        prefetches.count_tokens(prompt)


def _unlock(cache: Any, tree: Any, node: Any, params: Any) -> None:
    if cache.storage_prefetch_retries is tree:  # a flush makes a new one, and empties the tree
        cache.dec_host_lock_ref(node, params)


def release_departed(prefetches: Prefetches) -> None:
    """Before HiCache's part of a turn: unlock the prompts of requests that left its queues."""
    if not prefetches.held:
        return
    waiting, early = prefetches.scheduler.waiting_queue, _bootstrapping(prefetches.scheduler)
    lines = prefetches.line, [*waiting, None, *(() if early is None else early.queue)]
    old_line, prefetches.line = lines
    if old_line != prefetches.line:
        # Only what is between their common beginning and end: SGLang changes long lists anywhere.
        most = min(map(len, lines))
        pairs = zip(*lines, strict=False), zip(*map(reversed, lines), strict=False)
        start, end = (next(compress(count(), starmap(is_not, each)), most) for each in pairs)
        removed, added = (line[start : len(line) - min(end, most - start)] for line in lines)
        places = {req.rid: place for place, req in enumerate(added, start) if req is not None}
        for rid in prefetches.early.keys() & places.keys():
            if places[rid] < len(waiting):
                prefetches.mark_queued(rid)
        for req in removed:
            if req is not None and req.rid not in places:
                _forget_prompt(prefetches, req.rid)


def hold_fetched(cache: Any, prefetches: Prefetches) -> None:
    """In every turn, behind HiCache's part: keep in L2 what ended prefetches have brought."""
    for operation, prefetch in prefetches.changed.items():
        prompt, meeting = prefetches.held.get(prefetch.request_id), prefetch.meeting
        if prefetch.info is not None or prompt is None or prompt.operation is not operation:
            continue
        prompt.operation = None
        prefetches.count_tokens(prompt)
        prompt.computed = 0 if meeting is None else meeting.front * cache.page_size
        prompt.read += max(0, operation.completed_tokens - prompt.computed)
        if operation.completed_tokens:
            prompt.request.init_next_round_input(cache, cow_mamba=False)  # SGLang's look-up
            _lock_prompt(cache, prefetches, prompt)


def count_used(requests: Sequence[Any], prefetches: Prefetches) -> None:
    """A prefill of these requests is about to run: count the tokens from L3 that it uses."""
    for request in requests:
        prompt = prefetches.held.get(request.rid)
        if prompt is not None and prompt.read:
            hit = min(prompt.read, max(0, request.cached_tokens_storage - prompt.computed))
            metrics.L3_TOKENS.add(hit=hit, unused=prompt.read - hit)
            prompt.read = 0


def _forget_prompt(prefetches: Prefetches, rid: str) -> None:
    """A request waits no more, or is looked up again: host memory may evict its prompt."""
    prompt = prefetches.held.pop(rid, None)
    prefetches.fetching.pop(rid, None)
    prefetches.early.pop(rid, None)
    if prompt is not None:
        metrics.L3_TOKENS.add(unused=prompt.read)
        _unlock_prompt(prefetches, prompt)
