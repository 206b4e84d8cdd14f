"""Hints of clients (``POST /hcache/hint``): a prompt comes back soon, or not for a long time.

A hint stands for a request that has not come. Host memory keeps what it has of its prompt for a
limited time, as for a request that waits (:mod:`.waiting`). For ``prefetch`` L3 is read for the
rest, a few pages at a time, and only while no request waits; nothing is computed. A hint gives way
to requests that need its room. All tensor-parallel ranks get the same hints in the same turns.
"""

from __future__ import annotations

import base64
import json
import time
from array import array
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from hcache_backend import metrics
from hcache_backend.prefetch.prefetch import Held, Hint
from hcache_backend.ranks import Said, Turn
from hcache_backend.sglang import waiting
from hcache_backend.sglang.hint_route import NAME, RefusedHint
from hcache_backend.sglang.hook_registry import Hook
from hcache_backend.sglang.runtime import current
from hcache_backend.sglang.storage_threads import keys_to, our_l3

_MOST = 256  # hints at a time
_TOKENS = 2048  # that are read at a time: a request waits for no more than these
_TURNS = 64  # of the scheduler, between two looks at the time of a hint

_numbers = count()


def around_attach(
    original: Callable[..., Any], scheduler: Any, request: Any, *a: Any, **kw: Any
) -> Any:
    """A hint comes as a request to attach a backend that nobody has. SGLang brings it to all ranks,
    and brings back the answer of the first one."""
    if request.hicache_storage_backend != NAME:
        return original(scheduler, request, *a, **kw)
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    told = json.loads(request.hicache_storage_backend_extra_config_json)
    try:
        message = json.dumps(_take(scheduler, told))
    except RefusedHint as refused:
        metrics.HINTS.count("refused")
        return AttachHiCacheStorageReqOutput(success=False, message=str(refused))
    return AttachHiCacheStorageReqOutput(success=True, message=message)


def _take(scheduler: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Follow a hint; returns what is known about its prompt. Raises RefusedHint."""
    cache, prefetches = scheduler.tree_cache, current().prefetches
    l3, hints = our_l3(cache), prefetches.hints
    if l3 is None or not waiting.follows(cache):
        raise RefusedHint("this server takes no hints: its L3 is another one, or it has stages")
    prefetches.scheduler = scheduler
    prompt, names = _prompt(scheduler, told)
    request = _request(scheduler, f"{NAME}:{next(_numbers)}", prompt, names)
    request.init_next_round_input(cache, cow_mamba=False)
    reads, demotes = (told["action"] == action for action in ("prefetch", "demote"))
    hint = Hint(prompt, request, told["seconds"], time.monotonic(), reads)
    keys = keys_to(cache, request.last_host_node)
    for name, other in list(hints.items()):
        longer, shorter = (other, hint) if demotes else (hint, other)
        begins = longer.prompt[: len(shorter.prompt)] == shorter.prompt
        if begins and _names(other.request) == names and (demotes or other.seconds <= hint.seconds):
            waiting.end_hint(name, "replaced")
    said = {"tokens": len(prompt), "in_memory": hint.there, "kept": 0}
    if demotes:
        l3.demote(keys, told["shared"] // cache.page_size)
        return said
    l3.use(keys)
    if len(hints) >= _MOST:
        raise RefusedHint(f"{_MOST} hints are there already; one has to end first")
    hints[request.rid], prefetches.held[request.rid] = hint, Held(request)
    if _has_room(cache, hint.there):
        waiting.hold(cache, prefetches.held[request.rid])
    return said | {"kept": prefetches.held[request.rid].tokens}


def _prompt(scheduler: Any, told: Mapping[str, Any]) -> tuple[array[int], tuple[Any, Any]]:
    """Token ids of a hint, and the names that keep its pages apart from those of others."""
    if told["session"] is None:
        names = told["extra_key"], told["cache_salt"]
        return array("q", base64.b64decode(told["input_ids"])), names
    session = scheduler.session_controller.get(told["session"])
    if session is None or not session.req_nodes:
        raise RefusedHint(f"session {told['session']!r} is not open, or has had no request")
    last = list(session.req_nodes.values())[-1].req
    return array("q", [*last.origin_input_ids, *last.output_ids]), _names(last)


def _names(request: Any) -> tuple[Any, Any]:
    return request.extra_key, request.cache_salt


def _request(scheduler: Any, rid: str, prompt: array[int], names: tuple[Any, Any]) -> Any:
    """A request of SGLang's for a prompt. SGLang never looks the last token up, so there is one
    more."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(rid, "", prompt + array("q", [0]), SamplingParams(max_new_tokens=1))
    request.extra_key, request.cache_salt = names
    return request


def _has_room(cache: Any, tokens: int) -> bool:
    return waiting.held_tokens() + tokens <= waiting.room(cache)


def go_on(cache: Any) -> None:
    """Called in every turn of the scheduler, behind HiCache's part: read L3 for a hint."""
    prefetches = current().prefetches
    scheduler = prefetches.scheduler
    if not prefetches.hints or scheduler.waiting_queue or cache.ongoing_prefetch:
        return
    hint = next((one for one in prefetches.hints.values() if one.reads), None)
    if hint is None:
        return
    there = hint.there
    tokens = min(_TOKENS, len(hint.prompt) - there)
    # L3 had no more, or it would not be worth a read.
    hint.reads = there > hint.asked and tokens >= cache.prefetch_threshold
    if hint.reads and _has_room(cache, tokens):
        cache.release_aborted_request(hint.request.cache_request_handle)
        hint.asked, before = there, hint.request
        hint.request = _request(
            scheduler, before.rid, hint.prompt[: there + tokens], _names(before)
        )
        scheduler._prefetch_kvcache(hint.request)


def ask(turn: Turn) -> tuple[list[str], Said]:
    """Say whose time is over; ranks have other clocks, so they end hints together."""
    looked_at, over, now = list[str](), list[bool](), time.monotonic()
    for name, hint in current().prefetches.hints.items():
        hint.turns += 1
        if hint.turns % _TURNS == 0:
            looked_at.append(name)
            over.append(now - hint.since > hint.seconds)
    return looked_at, turn.say(*over)


def hear(looked_at: list[str], said: Said) -> None:
    for name, is_over in zip(looked_at, said.least, strict=True):
        if is_over:
            waiting.end_hint(name, "useless")


ATTACH = Hook(
    "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped", around_attach
)
