"""Metrics of one server process, declared below; ``--enable-metrics`` shows them beside SGLang's.
SGLang collects from several processes. So a metric here adds up over processes, or is a gauge whose
largest or smallest value counts. ``hcache top`` reads them by these tables; the dashboard and the
alerts name them. Counts outlive their process, as Prometheus wants; gauges end with it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, values

from hcache_backend.store import StoreStats

logger = logging.getLogger("hcache")

_complained = threading.Event()
# files of gauges of this process, and the descriptors that hold their locks
_held: dict[Path, int] = {}
_holding = threading.Lock()

ALL: list[Metric] = []


class Metric:
    """One metric, registered at its first use, after SGLang has named the folder for it. Metrics
    are in files, which can fail: that never raises. ``name`` is without the ending of counters."""

    def __init__(
        self, kind: Any, name: str, text: str, *labels: str, events: str = "(.+)", **options: Any
    ) -> None:
        """``events``: a regular expression; its group is the label's value. ``kind``: a class."""
        self.name, self.labels, self.events = name, labels, events
        self.counters: Sequence[Metric] = (self,)
        self._make = lambda: kind(name, text, labels, **options)  # registers it
        self._mode = options.get("multiprocess_mode")  # of gauges
        self._series: dict[tuple[str, ...], Any] = {}  # to look one up takes longer than to count
        ALL.append(self)

    @cached_property
    def family(self) -> Any:
        if self._mode is not None and values.ValueClass._multiprocess:  # gauges are in files
            with _holding:
                _take_file(self._mode)
        return self._make()

    def event(self, labels: Mapping[str, str]) -> str:
        """The event that a sample counts: ``events``, its group replaced by the label's value."""
        value = labels.get(self.labels[0], "") if self.labels else ""
        return re.sub(r"\(.*\)", lambda _: value, self.events)

    def count(self, label: str, number: float = 1) -> None:
        """Add ``number`` (at least 0) to a counter."""
        self.do("inc", label, amount=max(0, number))

    def observe(self, label: str, value: float) -> None:
        self.do("observe", label, amount=value)

    def set(self, *labels: str, value: float = 1) -> None:
        self.do("set", *labels, value=value)

    def only(self, *labels: str) -> None:
        """Set the series with these labels to 1 and all others to 0; without labels all to 0."""
        for others in self._series.keys() - {labels}:
            self.set(*others, value=0)
        if labels:
            self.set(*labels)

    def clear(self) -> None:
        self._series.clear()
        if self.labels:
            self.family.clear()
        else:
            self.family.reset()

    def do(self, what: str, *labels: str, **value: float) -> None:
        """Call the method ``what`` of the series with these labels; logs the first error only."""
        try:
            if (series := self._series.get(labels)) is None:
                family = self.family
                series = self._series[labels] = family.labels(*labels) if labels else family
            getattr(series, what)(**value)
        except Exception as error:
            if not _complained.is_set():
                _complained.set()
                logger.warning("hcache: metrics could not be written (logged once): %s", error)


class Events:
    """Counters of events of one kind: name, events (see :class:`Metric`), text, and the label of
    the events' group, if any. The sum of a counter's events has a meaning."""

    def __init__(self, *counters: tuple[str, ...]) -> None:
        self.counters = [
            Metric(Counter, name, text, *label, events=events)
            for name, events, text, *label in counters
        ]
        self._found: dict[str, tuple[Metric, tuple[str, ...]]] = {}  # counter and labels by event

    def count(self, event: str, number: float = 1) -> None:
        if event not in self._found:
            matches = ((one, re.fullmatch(one.events, event)) for one in self.counters)
            self._found[event] = next((one, found.groups()) for one, found in matches if found)
        metric, labels = self._found[event]  # the counter whose ``events`` match, its labels
        metric.do("inc", *labels, amount=max(0, number))

    def add(self, **numbers: int) -> None:
        """Count each named event so many times; an event that never happened has no series."""
        for event, number in numbers.items():
            if number:
                self.count(event, number)


def _take_file(mode: str) -> None:
    """Make Prometheus' file of this process for gauges of ``mode``, and remove those of dead
    processes. Only our gauges have such modes. A living process holds a lock (flock) on its file.
    The PID in the name is not enough: other containers and earlier servers often have the same."""
    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    path = folder / f"gauge_{mode}_{os.getpid()}.db"
    if path in _held:
        return
    new = path.with_suffix(".new")  # it counts once it is locked and has Prometheus' header
    new.unlink(missing_ok=True)  # of an earlier process, or a link that somebody laid
    held = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.pwrite(held, struct.pack("i", 8).ljust(1 << 16, b"\0"), 0)
    for other in folder.glob(f"gauge_{mode}_*.db"):
        with suppress(OSError), other.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()
    new.rename(path)
    _held[path] = held


_counter = partial(Metric, Counter)
_gauge = partial(Metric, Gauge, multiprocess_mode="livemax")


def _histogram(
    name: str, text: str, label: str, bases: Sequence[float], powers: Sequence[int]
) -> Metric:
    """A histogram whose buckets end at each of ``bases`` times ten to each of ``powers``."""
    buckets = tuple(base * 10.0**power for power in powers for base in bases)
    return Metric(Histogram, name, text, label, buckets=buckets)


TOKENS = Events(
    ("hcache_captured_tokens", "captured", "Tokens captured from forward passes"),
    ("hcache_not_written_tokens", "not_written", "Captured tokens that lack rows of a layer"),
    ("hcache_not_encodable_tokens", "not_encodable", "Tokens that the codec cannot encode"),
    ("hcache_backed_up_tokens", "backed_up", "Tokens backed up to host memory"),
    ("hcache_not_backed_up_tokens", "not_backed_up_(.+)", "Tokens not backed up", "reason"),
    ("hcache_waited_for_rows_tokens", "waited_for_rows", "Tokens whose backup waited for the GPU"),
    ("hcache_restored_tokens", "restored", "Tokens restored to the device"),
    ("hcache_not_restored_tokens", "not_restored_(.+)", "Tokens whose load was refused", "reason"),
    ("hcache_eager_tokens", "eager", "Tokens restored while the rest of their hit was read"),
    ("hcache_load_tokens", "(ready_at_load|not_ready_at_load)", "Tokens of hits at load", "state"),
    ("hcache_checked_tokens", "checked", "Tokens compared with the model's K and V in service"),
)

# transfer: captured (device to host), restored_METHOD (host to device)
BYTES = _counter("hcache_device_bytes", "Bytes copied between host and device", "transfer")

# state: busy, idle
STREAM_SECONDS = _counter(
    "hcache_restore_stream_seconds", "Time of the streams of restores, copy and compute", "state"
)

# l3_exists, l3_read and l3_write: a batch of pages in the page store. shared_exists, shared_read
# and shared_write: one in the shared L3. restore: a load to the device. capture_transfer: the way
# to the host of the rows of one step. host_backup and host_load: the scheduler thread launches the
# copies of K and V of a backup, or a restore.
STAGE_SECONDS = _histogram(
    "hcache_stage_seconds", "How long a stage takes", "stage", (1, 2.5, 5), range(-4, 2)
)

PAGES = Events(
    ("hcache_l3_read_pages", "(read|missed)", "Pages asked for in L3", "result"),
    ("hcache_l3_written_pages", "(written|dropped_.+)", "Pages given to L3", "result"),
    ("hcache_l3_head_pages", "heads_(.+)", "Pages of beginnings that L3 lacked", "result"),
)

# result: found, absent, suspended (L3 was not asked), or not_promised (by a decode server)
LOOKUPS = _counter("hcache_l3_lookup_pages", "Pages looked up in L3", "result")

_LOOKED_UP = "(found|absent|suspended|not_promised|other_pool)"
# docs/operations.md has the meaning of each result
L3_TOKENS = Events(
    ("hcache_l3_lookup_tokens", _LOOKED_UP, "Tokens looked up in L3", "result"),
    ("hcache_l3_hit_tokens", "(.+)", "Tokens found in L3, by what became of them", "result"),
)

STORE = Events(
    ("hcache_store_read_bytes", "bytes_read", "Bytes read from page files"),
    ("hcache_store_written_bytes", "bytes_written", "Bytes written to page files"),
    ("hcache_store_evicted_bytes", "bytes_evicted", "Bytes of evicted page files"),
    ("hcache_store_copied_bytes", "bytes_copied", "Bytes copied because memory was not aligned"),
    ("hcache_store_pages", "pages_(.+)", "Pages of the page store by event", "event"),
    ("hcache_store_missed_pages", "misses", "Pages asked for and not stored"),
    ("hcache_store_bad_pages", "bad_pages", "Pages deleted because they were damaged"),
    ("hcache_store_errors", "(.+)_errors", "Failed operations of the page store", "operation"),
    ("hcache_store_lost_folders", "folders_lost", "Times that a folder went away"),
    ("hcache_store_syncs", "syncs", "Flushes of page files to the disks"),
)

# of: pages (of all servers and models), quota (0: none), free (on its disk)
_FOLDERS = "Bytes of a folder of the page store, of its quota, and of its disk"
FOLDERS = _gauge("hcache_store_folder_bytes", _FOLDERS, "folder", "of")

# never an error of a request
PROBLEMS = _counter("hcache_problems", "Problems by kind, each a cache miss", "kind")

_MODE = (
    "1 for the mode of the server (hidden, kv), its pages (own, plain), and those that its model "
    "and arguments should have; the log says why"
)
MODE = _gauge("hcache_mode_info", _MODE, "mode", "pages", "expected")

_CAPABILITY = "1 for a capability that the server has, 0 for one that it goes without"
CAPABILITY = _gauge("hcache_capability_info", _CAPABILITY, "capability")

# reason: quarantined (a check failed, or weight updates would go unnoticed), not_restorable,
# flush_needed, stages (not all pipeline stages have sent the digest of their weights)
SUSPENDED = _gauge("hcache_l3_suspended", "1 while L3 is neither read nor written", "reason")

_CODEC = "1 for the codec that is used, by the requested one"
CODEC = _gauge("hcache_codec_info", _CODEC, "asked", "used")

# codec: merged or int8; with codec krul only
PAIRS = _counter("hcache_pairs", "Pairs of layers in nodes that were backed up", "codec")
_DISTANCE = "Distance of the attention of the layers of each pair that was chosen for a node"
PAIR_DISTANCES = _histogram("hcache_pair_distance", _DISTANCE, "codec", (1, 2, 5), range(-3, 1))

# silent: it failed, or did not answer in time, when it was asked last
_SHARED = "1 for the shared L3 and its state (answers, silent)"
SHARED = _gauge("hcache_l3_shared", _SHARED, "backend", "state")

_WRITTEN = "(written|not_written)"
SHARED_PAGES = Events(
    ("hcache_shared_lookup_pages", "(found|absent)", "Pages looked up in the shared L3", "result"),
    ("hcache_shared_read_pages", "(read|missed)", "Pages asked for in the shared L3", "result"),
    ("hcache_shared_damaged_pages", "damaged", "Pages of the shared L3 with wrong bytes"),
    ("hcache_shared_skipped_pages", "not_asked", "Pages not asked for: the shared L3 is silent"),
    ("hcache_shared_kept_pages", "(kept|not_kept)", "Pages copied to the page store", "result"),
    ("hcache_shared_written_pages", _WRITTEN, "Pages given to the shared L3", "result"),
)

# result: whole, shorter, put_off_running, put_off_waiting; see prefetch/slices.py
_SLICES = "Turns of the scheduler in which first layers could be recomputed"
SLICES = _counter("hcache_slices", _SLICES, "result")

# operation: l3_read, shared_read (of the shared L3), load (host memory to the KV pool, as far as a
# batch waits for it) and prefill; of several ranks the slowest counts
_RATES = "Rate of an operation on 4,096 tokens, as decisions about L3 hits expect it"
_LABELS = "operation", "backend"
RATES = Metric(
    Gauge, "hcache_expected_tokens_per_second", _RATES, *_LABELS, multiprocess_mode="livemin"
)

# tables of counts, by their names in ``hcache top --json``
COUNTS: Mapping[str, Metric | Events] = {
    "tokens": TOKENS,
    "bytes": BYTES,
    "pages": PAGES,
    "lookups": LOOKUPS,
    "l3_tokens": L3_TOKENS,
    "store": STORE,
    "shared": SHARED_PAGES,
    "slices": SLICES,
    "problems": PROBLEMS,
}


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Observe the duration of the body as ``stage``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        STAGE_SECONDS.observe(stage, time.perf_counter() - start)


@contextmanager
def catching(problem: str, consequence: str) -> Iterator[None]:
    """Count an error of the body as ``problem`` and log ``consequence``; SGLang goes on."""
    try:
        yield
    except Exception:
        PROBLEMS.count(problem)
        logger.exception("hcache: %s", consequence)


class StoreCounters:
    """Passes on the new counts of a page store."""

    def __init__(self, stats: StoreStats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._published = dict.fromkeys(stats.snapshot(), 0)  # counts that were passed on
        stats.on_room = self._show_room  # called with the bytes of each folder

    def publish(self) -> None:
        """Pass on all counts since the last call. Any thread."""
        with self._lock:
            counts = self._stats.snapshot()
            STORE.add(**{what: count - self._published[what] for what, count in counts.items()})
            self._published = counts

    def _show_room(self, folder: str, found: Mapping[str, int]) -> None:
        for of, count in found.items():
            FOLDERS.set(folder, of, value=count)
