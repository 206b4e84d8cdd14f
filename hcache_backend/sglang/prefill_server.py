"""A prefill server sends no K and V that are still on their way to the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hcache_backend import metrics
from hcache_backend.sglang.compat import is_first


def before_sending_prefix(
    original: Callable[..., Any], scheduler: Any, req: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``Scheduler.maybe_send_cached_prefix_chunk``, before the forward pass of a batch.

    SGLang sends there the part of ``req`` that the radix tree has on the device. A node is in the
    tree once its load is queued, and before 0.5.23 the transfer waits for no load. With overlap and
    chunks, the forward pass before may still compute the node. A prefix that is held back goes with
    the rest of the prompt, after the forward pass, which waits for every layer of every load.
    """
    early = False
    with metrics.harmless("early_send", "a prefix is sent with the rest of its prompt"):
        loading = bool(scheduler.tree_cache.cache_controller.ack_load_queue)
        computing = scheduler.enable_overlap and is_first()
        early = not (loading or computing)
        if not early and req.early_send_prefix_end is None:
            req.early_send_prefix_end = 0  # the staging buffer wants one answer for all chunks
    return original(scheduler, req, *a, **kw) if early else None
