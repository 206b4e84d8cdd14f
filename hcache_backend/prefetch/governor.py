"""The share of the GPU's time for recomputation of hits that are still being read."""

from __future__ import annotations

from typing import Any, NamedTuple

from hcache_backend import metrics

RUNNING_LIMIT = 8  # beside this many running requests nothing is recomputed


class Pace(NamedTuple):
    """The governor's decision."""

    share: float  # 0 to 1: of the time that a slice may take if no request wants the GPU
    # The metric's label: ``whole``, ``shorter`` beside running requests, or the reason why there is
    # no slice, ``put_off_running`` or ``put_off_waiting``.
    decision: str


_WHOLE = Pace(1.0, "whole")


class Governor:
    """Keeps recomputation of hits that are still being read out of the way of other requests.

    - A slice may take ``1 - running / RUNNING_LIMIT`` of the time that it may take alone.
    - It may take nothing while a request is queued for a turn of the GPU, room for its K and V, or
      a place in the batch, but not for L3; nor while a prompt is computed in chunks.
    - The governor uses no clock, only the state of SGLang's scheduler, which is the same on all
      tensor-parallel ranks.
    - The load of the hit does work that was put off, in front of the forward pass that needs it,
      and running requests wait. So it is put off until SGLang admits the request, and no longer.
    """

    def __init__(self) -> None:
        self._blind = False
        self._pace = _WHOLE

    def look(self, scheduler: Any) -> None:
        """Look at SGLang's scheduler when its turn begins: later, other threads may change it.
        None until the first request comes."""
        if scheduler is None or self._blind:
            return
        self._blind = True
        with metrics.harmless("governor", "who wants the GPU is not known: no more slices"):
            self._pace = _pace_beside(scheduler)
            self._blind = False
        if self._blind:
            self._pace = Pace(0.0, "put_off_waiting")

    def pace(self) -> Pace:
        """The decision for this turn of the scheduler. Any thread."""
        return self._pace


def _pace_beside(scheduler: Any) -> Pace:
    if scheduler.chunked_req is not None or waits_for_gpu(scheduler):
        return Pace(0.0, "put_off_waiting")
    requests, batch = [*scheduler.running_batch.reqs], scheduler.last_batch
    if batch is not None and batch.forward_mode.is_extend():  # not among those that run yet
        requests += batch.reqs
    running = sum(not req.finished() for req in requests)
    if running >= RUNNING_LIMIT:
        return Pace(0.0, "put_off_running")
    return Pace(1 - running / RUNNING_LIMIT, "shorter") if running else _WHOLE


def waits_for_gpu(scheduler: Any) -> bool:
    """True if requests wait for the GPU only; those that wait for L3 could not run."""
    reading = scheduler.tree_cache.ongoing_prefetch
    return any(req.cache_request_handle not in reading for req in scheduler.waiting_queue)
