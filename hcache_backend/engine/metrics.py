"""Metrics of one server process; with ``--enable-metrics`` they stand beside SGLang's.

SGLang collects from several processes, so every metric here is one that adds up over processes, or
a gauge whose largest value counts. Their names are used by ``hcache top`` and by the dashboard.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec

from prometheus_client import Counter, Gauge, Histogram

from hcache_backend.store import StoreStats

logger = logging.getLogger("hcache")

STAGE_BUCKETS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2.5, 5))
"""0.1 ms to 50 s."""


@cache
def tokens() -> Counter:
    """Tokens by what happened to them: captured, backed_up, restored, checked, ..."""
    return Counter("hcache_tokens", "Tokens by what happened to them", ["event"])


@cache
def moved_bytes() -> Counter:
    """Bytes by what moved them: captured (device to host), restored_METHOD (host to device)."""
    return Counter("hcache_bytes", "Bytes by what moved them", ["event"])


@cache
def seconds() -> Counter:
    """Time of the device's streams by stage; bubbles are the idle stages of a restore."""
    return Counter("hcache_seconds", "Time of the device's streams by stage", ["stage"])


@cache
def stage_seconds() -> Histogram:
    """How long a stage takes: l3_exists, l3_read and l3_write a batch of pages, restore a load to
    the device, capture_transfer the way to the host of what one step captured."""
    return Histogram(
        "hcache_stage_seconds", "How long a stage takes", ["stage"], buckets=STAGE_BUCKETS
    )


@cache
def pages() -> Counter:
    """Pages by what happened to them between the host pool and L3."""
    return Counter("hcache_pages", "Pages by what happened to them", ["event"])


@cache
def lookups() -> Counter:
    """Pages that were looked for in L3: found, absent, or suspended (L3 was not asked)."""
    return Counter("hcache_lookups", "Pages that were looked for in L3, by the answer", ["result"])


@cache
def l3_tokens() -> Counter:
    """Tokens that were looked for in L3, by how it ended.

    - ``absent``: their page, or one before it, is not stored (new text, mostly);
    - ``suspended``: L3 was not asked;
    - ``other_pool``: KV is stored and what other pools of the model need for it is not;
    - ``found``: stored. Of these SGLang fetches all that are enough of them
      (``prefetch_threshold``), that have room in the host pool and that their request waits for:
    - ``hit``: read;
    - ``unreadable``: their page, or one before it, was damaged, gone or too slow when it was read;
    - ``refused_PROBLEM``: read, and their page or one before it is not the one that was asked for.
    """
    return Counter(
        "hcache_l3_tokens", "Tokens that were looked for in L3, by how it ended", ["result"]
    )


@cache
def store() -> Counter:
    """The page store's own counters: bytes, evictions, drops by reason, damaged pages, errors."""
    return Counter("hcache_store", "The page store's counters", ["what"])


@cache
def problems() -> Counter:
    """Problems by kind; each is a cache miss, never an error of a request."""
    return Counter("hcache_problems", "Problems by kind, each a cache miss", ["kind"])


@cache
def mode() -> Gauge:
    """1 for the mode of the server, with the reason when it is KV mode."""
    return Gauge(
        "hcache_mode",
        "1 for the mode (hidden, kv) that the server is in, and why",
        ["mode", "reason"],
        multiprocess_mode="max",
    )


@cache
def suspended() -> Gauge:
    """1 while L3 neither takes nor gives, with the reason."""
    return Gauge(
        "hcache_l3_suspended",
        "1 while L3 neither takes nor gives, and why",
        ["reason"],
        multiprocess_mode="max",
    )


@cache
def codec() -> Gauge:
    """1 for the codec in which hidden states are stored, by the one that was asked for."""
    return Gauge(
        "hcache_codec",
        "1 for the codec that is used, by the one that was asked for",
        ["asked", "used"],
        multiprocess_mode="max",
    )


ALL = (
    tokens, moved_bytes, seconds, stage_seconds, pages, lookups, l3_tokens, store, problems, mode,
    suspended, codec,
)  # fmt: skip


_Arguments = ParamSpec("_Arguments")
_complained = threading.Event()


def _harmless(count: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """No count is worth a page or a request: they are kept in files, which can fail."""

    @wraps(count)
    def counted(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            count(*args, **kwargs)
        except Exception as error:
            if not _complained.is_set():
                _complained.set()
                logger.warning("hcache: metrics cannot be kept (said once): %s", error)

    return counted


@_harmless
def count_tokens(event: str, number: int) -> None:
    tokens().labels(event=event).inc(number)


@_harmless
def count_bytes(event: str, number: int) -> None:
    moved_bytes().labels(event=event).inc(number)


@_harmless
def count_milliseconds(stage: str, milliseconds: float) -> None:
    seconds().labels(stage=stage).inc(max(0.0, milliseconds) / 1e3)


@_harmless
def observe(stage: str, elapsed: float) -> None:
    """Note that ``stage`` took ``elapsed`` seconds."""
    stage_seconds().labels(stage=stage).observe(elapsed)


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Note how long the body takes."""
    start = time.perf_counter()
    try:
        yield
    finally:
        observe(stage, time.perf_counter() - start)


@_harmless
def count_pages(event: str, number: int = 1) -> None:
    pages().labels(event=event).inc(number)


@_harmless
def count_lookups(result: str, number: int) -> None:
    lookups().labels(result=result).inc(number)


@_harmless
def count_l3_tokens(result: str, number: int) -> None:
    if number:
        l3_tokens().labels(result=result).inc(number)


@_harmless
def count_problem(kind: str) -> None:
    problems().labels(kind=kind).inc()


@_harmless
def set_mode(name: str, reason: str | None) -> None:
    """The mode that the server is in from now on."""
    mode().labels(mode=name, reason=reason or "").set(1)


@_harmless
def set_codec(asked: str, used: str) -> None:
    """The codec in which hidden states are stored from now on."""
    codec().labels(asked=asked, used=used).set(1)


class SuspendedGauge:
    """Says in the metrics whether L3 is suspended."""

    def __init__(self) -> None:
        self._reason: str | None = None

    @_harmless
    def set(self, reason: str | None) -> None:
        """L3 is suspended for ``reason`` from now on, or serves (None)."""
        before, self._reason = self._reason, reason
        if before is not None:
            suspended().labels(reason=before).set(0)
        if reason is not None:
            suspended().labels(reason=reason).set(1)


class StoreCounters:
    """Passes on what a page store counted since the last time.

    Args:
        stats: The counters of the store.
    """

    def __init__(self, stats: StoreStats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._published = dict.fromkeys(stats.snapshot(), 0)

    @_harmless
    def publish(self) -> None:
        """Any thread may call it."""
        with self._lock:
            counts = self._stats.snapshot()
            for what, count in counts.items():
                if count > self._published[what]:
                    store().labels(what=what).inc(count - self._published[what])
            self._published = counts
