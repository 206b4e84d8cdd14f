"""Hints of clients (``POST /hcache/hint``): a prompt comes back soon, or not for a long time.

Host memory keeps what it has of its prompt for a limited time, as for a request that waits
(:mod:`.waiting`). For ``prefetch`` L3 is read for the rest, a few pages at a time, while no request
waits. A hint gives way to requests that need its room. All ranks get it in the same turn.
"""

from __future__ import annotations

import base64
import json
import time
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from hcache_backend import metrics
from hcache_backend.prefetch.prefetch import Hint
from hcache_backend.ranks import Said, Turn
from hcache_backend.sglang import waiting
from hcache_backend.sglang.hint_route import NAME, RefusedHint
from hcache_backend.sglang.hook_registry import Hook, Original
from hcache_backend.sglang.runtime import current
from hcache_backend.sglang.storage_threads import keys_to, our_l3

_MOST = 256  # hints at a time
_TOKENS = 2048  # that are read at a time: a request waits for no more than these
_TURNS = 64  # of the scheduler, between two looks at the time of a hint


def around_attach(original: Original, scheduler: Any, recv_req: Any, *a: Any, **kw: Any) -> Any:
    """A hint comes as a request to attach a backend that nobody has, which goes to all ranks."""
    if recv_req.hicache_storage_backend != NAME:
        return original(scheduler, recv_req, *a, **kw)
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    told = json.loads(recv_req.hicache_storage_backend_extra_config_json)
    try:
        message = json.dumps(_take(scheduler, told))
    except RefusedHint as refused:
        metrics.HINTS.count("refused")
        return AttachHiCacheStorageReqOutput(success=False, message=str(refused))
    return AttachHiCacheStorageReqOutput(success=True, message=message)


def _take(scheduler: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Follow a hint; returns what is known about its prompt. Raises RefusedHint."""
    cache, prefetches = scheduler.tree_cache, current().prefetches
    l3 = our_l3(cache)
    if l3 is None or not waiting.follows(cache):
        raise RefusedHint("this server takes no hints: its L3 is another one, or it has no L2")
    prefetches.scheduler = scheduler
    request = _request(told["name"], *_prompt(scheduler, told))
    prompt, action, seconds = request.origin_input_ids[:-1], told["action"], told["seconds"]
    lasts: dict[str, Any] = {"since": time.monotonic(), "seconds": seconds}
    reads, tree = action == "prefetch", cache.storage_prefetch_retries
    hint = Hint(request=request, prompt=prompt, prefetch=reads, tree=tree, **lasts)
    ended = 0
    for name, other in prefetches.hints.items():
        if action == "demote":
            ends = hint.begins(other.request, other.prompt, len(prompt))
        else:
            ends = other.begins(request, prompt, len(other.prompt)) and other.seconds <= seconds
        if ends:
            ended += 1
            waiting.end_hint(name, "replaced")
    if action == "demote":  # a look-up would make the prompt the one that was used last
        return {"tokens": len(prompt), "ended": ended}
    if len(prefetches.hints) >= _MOST:
        raise RefusedHint(f"{_MOST} hints are there already; one has to end first")
    _look_up(cache, hint)
    prefetches.held[request.rid] = hint
    l3.use(keys_to(cache, request.last_host_node))
    return {"tokens": len(prompt), "in_memory": waiting.there(hint), "kept": hint.tokens}


def _look_up(cache: Any, hint: Hint) -> None:
    """Hold what host memory has of a prompt now; for a prefetch L3 is read for the rest."""
    hint.reads = hint.prefetch
    hint.request.init_next_round_input(cache, cow_mamba=False)
    if waiting.has_room(cache, waiting.there(hint) - hint.tokens):
        waiting.hold(cache, hint)


def _prompt(scheduler: Any, told: Mapping[str, Any]) -> tuple[array[int], Any, Any]:
    """Token ids of a hint, and the names that keep its pages apart from those of others."""
    if told["session"] is None:
        ids = array("q", base64.b64decode(told["input_ids"]))
        return ids, told["extra_key"], told["cache_salt"]
    session = scheduler.session_controller.get(told["session"])
    if session is None or not session.req_nodes:
        raise RefusedHint(f"session {told['session']!r} is not open, or has had no request")
    last = list(session.req_nodes.values())[-1].req
    ids = array("q", [*last.origin_input_ids, *last.output_ids])
    return ids, last.extra_key, last.cache_salt


def _request(rid: str, prompt: array[int], extra_key: Any, cache_salt: Any) -> Any:
    """A request of SGLang's for a prompt, and a token more: the last one is never looked up."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(rid, "", prompt + array("q", [0]), SamplingParams(max_new_tokens=1))
    request.extra_key, request.cache_salt = extra_key, cache_salt
    return request


def _again(hint: Hint, tokens: int) -> Any:
    before = hint.request
    return _request(before.rid, hint.prompt[:tokens], before.extra_key, before.cache_salt)


def go_on(cache: Any) -> None:
    """Called in every turn of the scheduler, behind HiCache's part: read L3 for a hint."""
    prefetches = current().prefetches
    scheduler = prefetches.scheduler
    hint = next((one for one in prefetches.hints.values() if one.reads), None)
    if hint is None or scheduler.waiting_queue or cache.ongoing_prefetch:
        return
    there, before = waiting.there(hint), hint.request
    tokens = min(_TOKENS, len(hint.prompt) - there)
    # L3 had no more, or it would not be worth a read.
    hint.reads = there > hint.asked and tokens >= cache.prefetch_threshold
    if hint.reads and waiting.has_room(cache, tokens):
        cache.release_aborted_request(before.cache_request_handle)
        hint.asked = there
        scheduler._prefetch_kvcache(_again(hint, there + tokens))


def ask(turn: Turn) -> tuple[list[str], Said]:
    """Say whose time is over, and who looks again: together, because ranks have other clocks."""
    due, over, now = list[str](), list[bool](), time.monotonic()
    for name, hint in current().prefetches.hints.items():
        hint.turns += 1
        if hint.turns % _TURNS == 0:
            due.append(name)
            over += now - hint.since > hint.seconds, now - hint.since > hint.next_look
    return due, turn.say(*over)


def hear(due: list[str], said: Said) -> None:
    cache, over = said.turn.cache, torch.tensor(said.least, dtype=torch.int64)
    if due:
        cache._pp_sync(over)  # the first pipeline stage's clock is that of all
    for name, (is_over, looks) in zip(due, over.view(-1, 2).tolist(), strict=True):
        hint = current().prefetches.hints[name]
        if is_over:
            waiting.end_hint(name, "useless")
        elif looks:  # for what was computed, or backed up, since the last look
            hint.next_look *= 2
            if hint.operation is None and hint.tokens <= len(hint.prompt) - cache.page_size:
                hint.request = _again(hint, len(hint.prompt))
                _look_up(cache, hint)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
ATTACH = Hook(_SCHEDULER + "attach_hicache_storage_wrapped", around_attach)
