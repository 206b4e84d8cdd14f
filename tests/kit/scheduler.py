"""What plugins of tests do in the process of SGLang's scheduler."""

import functools
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    """Replace a function of ``owner`` by ``wrap(original, ...)``."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrap(original, *args, **kwargs)

    setattr(owner, name, functools.wraps(original)(wrapped))  # hooks ask for its signature


def aborts(scheduler: Any, aborted: dict[str, str]) -> list[Any]:
    """Abort requests whose ids say ``abort in prefetch`` (or ``load``, ``prefill``, ``decode``) in
    the first turn that finds them there; ``aborted`` gets the phase of each."""
    from sglang.srt.managers.io_struct import AbortReq

    cache, last, chunked = scheduler.tree_cache, scheduler.last_batch, scheduler.chunked_req
    loading = last.reqs if last is not None and getattr(cache, "ongoing_load_back", None) else []
    middle = {
        "prefetch": [handle.rid for handle in getattr(cache, "ongoing_prefetch", ())],
        "load": [req.rid for req in loading],
        "prefill": [chunked.rid] if chunked is not None else [],
        "decode": [req.rid for req in scheduler.running_batch.reqs if len(req.output_ids) > 1],
    }
    found = {
        rid: phase
        for phase, rids in middle.items()
        for rid in rids
        if f"abort in {phase}" in rid and rid not in aborted
    }
    aborted.update(found)
    return [AbortReq(rid=rid) for rid in found]
