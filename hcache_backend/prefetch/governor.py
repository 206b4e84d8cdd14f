"""How much of the GPU's time recomputation of hits that are still being read may take."""

from __future__ import annotations

from typing import Any, NamedTuple

from hcache_backend import metrics

RUNNING_LIMIT = 8
"""Where so many requests run, nothing is recomputed beside them."""


class Pace(NamedTuple):
    """What the governor decides.

    Attributes:
        share: 0 to 1: 1 is the time that a slice may take where nobody else wants the GPU.
        decision: The metric's label: ``whole``, ``shorter`` beside running requests, or why there
            is no slice, ``put_off_running`` or ``put_off_waiting``.
    """

    share: float
    decision: str


_WHOLE = Pace(1.0, "whole")


class Governor:
    """Keeps recomputation of hits that are still being read out of the way of other requests.

    The rule: a slice may take ``1 - running / RUNNING_LIMIT`` of the time that it may take alone,
    so nothing from :data:`RUNNING_LIMIT` running requests on; and nothing while a request is queued
    for anything but L3 (for a turn of the GPU, room for its K and V, a place in the batch), or
    while a prompt is computed in chunks.

    It goes by what SGLang's scheduler holds, which is the same on all tensor-parallel ranks, and
    by no clock. What was put off is recomputed at once by the load of the hit, in front of the
    forward pass that needs it, and the requests that run wait for that. So it is put off until
    SGLang admits the request, and no longer.

    Attributes:
        scheduler: SGLang's; None until the first request comes.
    """

    def __init__(self) -> None:
        self.scheduler: Any = None
        self._blind = False
        self._pace = _WHOLE

    def look(self) -> None:
        """The scheduler's turn begins: see what it holds, which on other threads may change."""
        if self.scheduler is None or self._blind:
            return
        self._blind = True
        with metrics.harmless("governor", "who wants the GPU is not known: no more slices"):
            self._pace = _pace_beside(self.scheduler)
            self._blind = False
        if self._blind:
            self._pace = Pace(0.0, "put_off_waiting")

    def pace(self) -> Pace:
        """For this turn of the scheduler. Any thread."""
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
    """Whether requests wait that could run but for the GPU; those that wait for L3 could not."""
    reading = scheduler.tree_cache.ongoing_prefetch
    return any(req.cache_request_handle not in reading for req in scheduler.waiting_queue)
