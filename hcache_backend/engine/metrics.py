"""Metrics of one server process; with ``--enable-metrics`` they stand beside SGLang's.

SGLang collects from several processes, so every metric here is one that adds up over processes, or
a gauge whose largest value counts. Their names are used by ``hcache top`` and by the dashboard.

Counts outlive their process, as Prometheus wants. Gauges say how a process is, and end with it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, values

from hcache_backend.store import StoreStats

logger = logging.getLogger("hcache")

STAGE_BUCKETS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2.5, 5))
"""0.1 ms to 50 s."""

_complained = threading.Event()
_held: dict[Path, int] = {}
"""Files of gauges of this process, and the descriptors that hold their locks."""
_holding = threading.Lock()


class Metric:
    """One metric, registered when it is used first: by then SGLang has named the folder for it.

    No count is worth a page or a request: metrics are kept in files, which can fail.

    The name is without the ending that counters have; ``options`` are those of the metric's class.
    """

    def __init__(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> None:
        self._make = lambda: kind(name, text, labels, **options)
        self._mode = options.get("multiprocess_mode")
        self._series: dict[tuple[str, ...], Any] = {}  # to look one up takes longer than to count

    @cached_property
    def family(self) -> Any:
        """Prometheus' object."""
        if self._mode is not None and values.ValueClass._multiprocess:
            with _holding:
                _take_file(self._mode)
        return self._make()

    def count(self, label: str, number: float = 1) -> None:
        """Add ``number`` (at least 0) to a counter."""
        self._do("inc", label, amount=max(0, number))

    def observe(self, label: str, value: float) -> None:
        """Put ``value`` into a histogram."""
        self._do("observe", label, amount=value)

    def set(self, *labels: str, value: float = 1) -> None:
        """Set a gauge."""
        self._do("set", *labels, value=value)

    def clear(self) -> None:
        """Forget all that was counted or set."""
        self._series.clear()
        self.family.clear()

    def _do(self, what: str, *labels: str, **value: float) -> None:
        try:
            series = self._series.get(labels)
            if series is None:
                series = self._series[labels] = self.family.labels(*labels)
            getattr(series, what)(**value)
        except Exception as error:
            if not _complained.is_set():
                _complained.set()
                logger.warning("hcache: metrics could not be written (logged once): %s", error)


def _take_file(mode: str) -> None:
    """Make the file in which Prometheus keeps gauges of ``mode`` for this process, and remove those
    of dead processes. Only our gauges are of these modes.

    A living process holds a lock (flock) on its file. The PID in the name says less: another
    container has equal ones, and a server that is started again often has that of the one before.
    """
    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    path = folder / f"gauge_{mode}_{os.getpid()}.db"
    if path in _held:
        return
    new = path.with_suffix(".new")  # it counts once it is locked and has Prometheus' header
    held = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.pwrite(held, struct.pack("i", 8).ljust(1 << 16, b"\0"), 0)
    for other in folder.glob(f"gauge_{mode}_*.db"):
        with suppress(OSError), other.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()
    new.rename(path)
    _held[path] = held


TOKENS = Metric(Counter, "hcache_tokens", "Tokens by what happened to them", "event")
"""captured, backed_up, restored, checked, ..."""

BYTES = Metric(Counter, "hcache_bytes", "Bytes by what moved them", "event")
"""captured (device to host), restored_METHOD (host to device)."""

SECONDS = Metric(Counter, "hcache_seconds", "Time of the device's streams by stage", "stage")
"""Bubbles are the idle stages of a restore."""

STAGE_SECONDS = Metric(
    Histogram, "hcache_stage_seconds", "How long a stage takes", "stage", buckets=STAGE_BUCKETS
)
"""l3_exists, l3_read and l3_write: a batch of pages in the page store. behind_exists and
behind_read: one in what is behind it. restore: a load to the device.
capture_transfer: the way to the host of what one step captured."""

PAGES = Metric(Counter, "hcache_pages", "Pages by what happened to them", "event")
"""Between the host pool and L3."""

LOOKUPS = Metric(
    Counter, "hcache_lookups", "Pages that were looked for in L3, by the answer", "result"
)
"""found, absent, suspended (L3 was not asked), or not_promised (by a decode server)."""

L3_TOKENS = Metric(
    Counter, "hcache_l3_tokens", "Tokens that were looked for in L3, by how it ended", "result"
)
"""
- ``absent``: their page, or one before it, is not stored (new text, mostly);
- ``suspended``: L3 was not asked;
- ``not_promised``: nor on a decode server;
- ``other_pool``: KV is stored and what other pools of the model need for it is not;
- ``found``: stored. Of these SGLang fetches all that are enough of them (``prefetch_threshold``),
  that have room in the host pool and that their request waits for:
- ``hit``: read;
- ``unreadable``: their page, or one before it, was damaged, gone or too slow when it was read;
- ``refused_PROBLEM``: read, and their page or one before it is not the one that was asked for;
- ``slower``: found, and not read because computing them is sooner;
- ``ended``: found, and their prefetch ended before they arrived because L3 became slow;
- ``recomputed``: found, and recomputed while what is behind them was being read.
"""

STORE = Metric(Counter, "hcache_store", "The page store's counters", "what")
"""Bytes, evictions, drops by reason, damaged pages, errors."""

PROBLEMS = Metric(Counter, "hcache_problems", "Problems by kind, each a cache miss", "kind")
"""Never an error of a request."""

MODE = Metric(
    Gauge,
    "hcache_mode",
    "1 for the mode (hidden, kv) that the server is in, its pages (own, plain), and why",
    "mode",
    "pages",
    "reason",
    multiprocess_mode="livemax",
)

SUSPENDED = Metric(
    Gauge,
    "hcache_l3_suspended",
    "1 while L3 neither takes nor gives, and why",
    "reason",
    multiprocess_mode="livemax",
)

CODEC = Metric(
    Gauge,
    "hcache_codec",
    "1 for the codec that is used, by the one that was asked for",
    "asked",
    "used",
    multiprocess_mode="livemax",
)

PAIRS = Metric(
    Counter,
    "hcache_pairs",
    "Pairs of layers in nodes that are backed up, by their code",
    "code",
)
"""merged or fp8; with codec krul only."""

PAIR_DISTANCES = Metric(
    Histogram,
    "hcache_pair_distance",
    "Distance of the attention of the layers of each pair chosen for a node, by the pair's code",
    "code",
    buckets=tuple(base * 10.0**power for power in range(-3, 1) for base in (1, 2, 5)),
)
"""Of pairs that were chosen by it: those of the start are not among them."""

BEHIND = Metric(
    Gauge,
    "hcache_l3_behind",
    "1 for the L3 behind the page store and its state (answers, silent)",
    "backend",
    "state",
    multiprocess_mode="livemax",
)
"""silent: it failed, or did not answer in time, when it was asked last."""

BEHIND_PAGES = Metric(
    Counter,
    "hcache_behind_pages",
    "Pages and the L3 behind the page store",
    "event",
)
"""
- ``found``, ``absent``: looked for, since the page store lacks them;
- ``read``, ``missed``: asked for, and proven or not; ``damaged``: not what they should be;
- ``not_asked``: not looked for or read, since it does not answer, or failed a moment ago;
- ``kept``, ``not_kept``: were read, and given to the page store at once, or not;
- ``written``, ``write_failed``, ``dropped_full``: written, refused, or too many waited already.
"""

SLICES = Metric(
    Counter,
    "hcache_slices",
    "Turns of the scheduler in which first layers could be recomputed, by what was decided",
    "decision",
)
"""``whole``, ``shorter``, ``put_off_running``, ``put_off_waiting``; see engine/recompute."""

RATES = Metric(
    Gauge,
    "hcache_tokens_per_second",
    "What decisions about L3 hits expect of an operation on 4,096 tokens",
    "operation",
    "backend",
    multiprocess_mode="livemin",
)
"""l3_read, behind_read (of the L3 behind the page store), load (host memory to the KV pool, as far
as a batch waits for it) and prefill; of several ranks the slowest counts."""

ALL = (
    TOKENS, BYTES, SECONDS, STAGE_SECONDS, PAGES, LOOKUPS, L3_TOKENS, STORE, PROBLEMS, MODE,
    SUSPENDED, CODEC, PAIRS, PAIR_DISTANCES, BEHIND, BEHIND_PAGES, SLICES, RATES,
)  # fmt: skip


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Note how long the body takes, as ``stage``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        STAGE_SECONDS.observe(stage, time.perf_counter() - start)


@contextmanager
def harmless(problem: str, consequence: str) -> Iterator[None]:
    """SGLang goes on whatever the body raises: one problem of that kind, one log line."""
    try:
        yield
    except Exception:
        PROBLEMS.count(problem)
        logger.exception("hcache: %s", consequence)


class SuspendedGauge:
    """Says in the metrics whether L3 is suspended."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def set(self, reason: str | None) -> None:
        """L3 is suspended for ``reason`` from now on, or serves (None)."""
        before, self._reason = self._reason, reason
        if before is not None:
            SUSPENDED.set(before, value=0)
        if reason is not None:
            SUSPENDED.set(reason)


class StoreCounters:
    """Passes on what a page store counted since the last time."""

    def __init__(self, stats: StoreStats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._published = dict.fromkeys(stats.snapshot(), 0)

    def publish(self) -> None:
        """Any thread may call it."""
        with self._lock:
            counts = self._stats.snapshot()
            for what, count in counts.items():
                if count > self._published[what]:
                    STORE.count(what, count - self._published[what])
            self._published = counts
