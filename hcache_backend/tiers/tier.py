"""Places where L3 keeps pages, with one interface: the page store, a tier that machines share, and
both as one.

A value in the shared tier is a page's bytes and a digest of them, the namespace, the key and the
shard. So any value that a backend returns for a name is the page, or a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from sglang.srt.observability.metrics_collector import StorageMetrics

from hcache_backend import metrics
from hcache_backend.format.envelope import TRAILER_BYTES, PageName, trailer
from hcache_backend.format.page import Bytes
from hcache_backend.format.units import Parts
from hcache_backend.metrics import logger
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.store import PageStore
from hcache_backend.store.page_store import WRITE_SECONDS
from hcache_backend.store.stats import ProblemLog
from hcache_backend.tiers.pool_pages import PoolPages
from hcache_backend.tiers.shared_backend import (
    CLOSE_SECONDS,
    START_SECONDS,
    BoundedCalls,
    GivenUp,
    RowPool,
    SharedBackend,
    bounded,
    copy_page,
)

LOOK_UP_SECONDS = 0.4  # longest look-up in the shared tier
REST_SECONDS = 10.0  # pause of a backend that failed, or did not answer in time
_LOOK_UP_PAGES = 64
_PART_BYTES = 16 << 20  # largest part of a read or of a write, unless one page is larger
_THREADS = ("look-up", "read", "write", "keep")
_NOT_USED = "hcache: option 'shared' is not used: "

_Result = TypeVar("_Result")


class Pages(NamedTuple):
    """Names of consecutive pages of a sequence: of each page, part number ``part`` of those into
    which ``pool`` divides it."""

    pool: PoolPages
    part: int
    namespace: bytes
    keys: Sequence[bytes]
    prefix: Sequence[bytes] = ()  # keys of the pages before them
    alone: bool = False  # they are of use without these

    def pick(self, numbers: Sequence[int]) -> Pages:
        return self._replace(keys=[self.keys[number] for number in numbers])

    def names(self) -> list[PageName]:
        return [PageName(self.namespace, key, self.pool.shard) for key in self.keys]


class Tier(Protocol):
    """A place for pages. Any thread. ``memory``: the pieces of each page, in order.

    - ``exists`` returns flags of the pages that are there. It may give up at a page that is not.
    - ``get`` reads pages; False is a miss, and the memory of that page has any bytes.
    - ``put`` stores pages; their memory may change then. False: it was not stored in time.
    - ``quarantine``: pages of this server may be wrong. Take no more, and delete those that only
      this machine has; returns their number. ``namespaces``: those of the present weights.
    - ``close`` stores queued pages, in limited time, and releases all resources.
    """

    def exists(self, pages: Pages) -> list[bool]: ...
    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]: ...
    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]: ...
    def quarantine(self, namespaces: Sequence[bytes]) -> int: ...
    def close(self) -> None: ...


class LocalTier(Tier):
    """The page store of this machine; calls may raise. ``writer``: number of this server run."""

    def __init__(self, store: PageStore, writer: bytes) -> None:
        self.store, self._writer = store, writer
        self._counters = metrics.StoreCounters(store.stats)
        self._writing, self._noting = threading.Lock(), threading.Lock()
        self._quarantined, self._stats = False, StorageMetrics()

    def exists(self, pages: Pages) -> list[bool]:
        with metrics.timed("l3_exists"):
            return self.store.exists(pages.namespace, pages.keys, shard=pages.pool.shard)

    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        start = time.perf_counter()
        with metrics.timed("l3_read"):
            arrived = self.store.get(pages.namespace, pages.keys, memory, shard=pages.pool.shard)
        self._note("prefetch", memory, arrived, start)
        metrics.PAGES.count("read", sum(arrived))
        metrics.PAGES.count("missed", len(arrived) - sum(arrived))
        return arrived

    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        start = time.perf_counter()
        with self._writing:
            if self._quarantined:
                metrics.PAGES.count("dropped_suspended", len(pages.keys))
                return [False] * len(pages.keys)
            with metrics.timed("l3_write"):
                stored = self.store.put(
                    pages.namespace,
                    pages.keys,
                    memory,
                    prefix=pages.prefix,
                    alone=pages.alone,
                    shard=pages.pool.shard,
                    table=pages.pool.table,
                    digests=pages.pool.digests(memory),
                )
        self._note("backup", memory, stored, start)
        metrics.PAGES.count("written", sum(stored))
        metrics.PAGES.count("dropped_error", len(stored) - sum(stored))
        return stored

    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        """Write no more, and delete all files that this server run wrote; returns how many. Waits
        for a write that has begun: otherwise its pages would be named after the deletion."""
        with self._writing:
            self._quarantined = True
            return self.store.drop_writer(self._writer)

    def close(self) -> None:
        self.store.close()
        self._counters.publish()
        metrics.FOLDERS.only()

    def take_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        with self._noting:
            taken, self._stats = self._stats, StorageMetrics()
        return taken

    def _note(self, kind: str, memory: Sequence[Parts], moved: list[bool], start: float) -> None:
        """Add pages that were ``moved`` since ``start`` to SGLang's statistics of ``kind``."""
        self._counters.publish()
        size = sum(part.nbytes for page in compress(memory, moved) for part in page)
        rate = size / 1e9 / max(time.perf_counter() - start, 1e-9)  # SGLang wants GB/s
        with self._noting:
            getattr(self._stats, f"{kind}_pgs").append(sum(moved))
            getattr(self._stats, f"{kind}_bandwidth").append(rate)


class SharedTier(Tier):
    """Pages of one host pool in a backend that other machines use, too. Calls never raise, and wait
    for a bounded time: ``read_seconds`` for each part that is read or written. Then the backend is
    left alone for a while, reads and writes apart. This object closes ``backend``. The constructor
    raises if that takes no memory. ``page_bytes``: of the largest page, in ``pieces`` pieces."""

    def __init__(self, backend: SharedBackend, page_bytes: int, pieces: int) -> None:
        self._backend, self._name = backend, backend.option.backend
        room = backend.option.buffer_bytes
        size = 2 * min(_PART_BYTES, room // 3)  # a part to read, and one to write
        use_memory = partial(backend.use_memory, size, page_bytes + TRAILER_BYTES, pieces)
        bounded("hcache-shared-register", use_memory, START_SECONDS)
        # A late call may still use it: the first half is for reads, the second one for writes.
        self._memory: Bytes = backend.memory.numpy()
        self._part, length = len(self._memory) // 2, self._memory.shape[1]  # pages; bytes of one
        self._threads = [BoundedCalls(f"hcache-shared-{name}") for name in _THREADS]
        self._looking, self._reading, self._writing, self._keeping = self._threads
        self._one_read, self._one_write, self._noting = (threading.Lock() for _ in range(3))
        # Pages that may wait to be kept; those of an earlier generation are dropped.
        self._room = threading.Semaphore(max(1, room // length - len(self._memory)))
        self._generation = 0
        self._quarantined, self._problems = False, ProblemLog()
        self._rest_until = {"reads": 0.0, "writes": 0.0}
        self.failing: set[str] = set()  # "reads" or "writes", if the last one did
        metrics.SHARED.set(self._name, "answers")

    def exists(self, pages: Pages) -> list[bool]:
        """Pages up to the first one that the backend lacks, or does not report in time. No page if
        it fails: a page that will not be read is not promised."""
        names = [name.value for name in pages.names()]
        deadline, took, count = time.monotonic() + LOOK_UP_SECONDS, 0.0, 0
        with metrics.timed("shared_exists"):
            # A call is made only if there is time for one twice as long as the last one.
            while count < len(names) and (began := time.monotonic()) + 2 * took <= deadline:
                part = names[count : count + _LOOK_UP_PAGES]
                count_leading = partial(self._backend.count_leading, part)
                leading = self._ask(self._looking, count_leading, deadline - began)
                if leading is None:
                    metrics.SHARED_PAGES.count("not_asked", len(names) - count)
                    return [False] * len(names)
                metrics.SHARED_PAGES.count("found", leading)
                metrics.SHARED_PAGES.count("absent", len(part) - leading)
                count += leading
                if leading < len(part):
                    break
                took = time.monotonic() - began
            else:
                metrics.SHARED_PAGES.count("not_asked", len(names) - count)
        return [True] * count + [False] * (len(names) - count)

    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        """Read pages into rows, part by part, and copy verified ones to their ``memory``."""
        names = pages.names()
        hits: list[bool] = []
        with self._one_read, metrics.timed("shared_read"):
            while len(hits) < len(names):
                part = names[len(hits) : len(hits) + self._part]
                values = [name.value for name in part]
                get = partial(self._backend.get, values, range(len(part)))
                arrived = self._ask(self._reading, get, self._backend.option.read_seconds)
                if arrived is None:
                    break
                for row, ok in enumerate(arrived):
                    hits.append(ok and self._copy_value(row, part[row], memory[len(hits)]))
        metrics.SHARED_PAGES.count("read", sum(hits))
        metrics.SHARED_PAGES.count("missed", len(hits) - sum(hits))
        metrics.SHARED_PAGES.count("not_asked", len(names) - len(hits))
        return hits + [False] * (len(names) - len(hits))

    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        """Write pages, part by part, until a call fails or is late, or the time is over."""
        deadline, names = time.monotonic() + WRITE_SECONDS, pages.names()
        stored: list[bool] = []
        with self._one_write, metrics.timed("shared_write"):
            while len(stored) < len(names) and time.monotonic() < deadline:
                part = slice(len(stored), len(stored) + self._part)
                flags = None if self._quarantined else self._write(names[part], memory[part])
                if flags is None:
                    break
                stored += flags
        metrics.SHARED_PAGES.count("written", sum(stored))
        metrics.SHARED_PAGES.count("not_written", len(names) - sum(stored))
        return stored + [False] * (len(names) - len(stored))

    def keep_in(self, pages: Pages, memory: Sequence[Parts], tier: Tier) -> None:
        """Copy the first pages, as many as may wait, for a thread that puts them into ``tier``."""
        count, generation = 0, self._generation
        while count < len(memory) and self._room.acquire(blocking=False):
            count += 1
        if not count:
            metrics.SHARED_PAGES.count("not_kept", len(memory))
            return
        # The backend does not know this memory: it cannot write there later.
        rows = RowPool(count, self._memory.shape[1], 1).kv_buffer.numpy()
        copies = [copy_page(row, page) for row, page in zip(rows, memory, strict=False)]

        def keep() -> None:
            stored = 0
            with metrics.catching("storage_set", "pages of the shared L3 are not kept"):
                if generation == self._generation:  # forget_kept() was not called since
                    stored = sum(tier.put(pages.pick(range(count)), copies))
            self._room.release(count)
            metrics.SHARED_PAGES.count("kept", stored)
            metrics.SHARED_PAGES.count("not_kept", len(memory) - stored)

        self._keeping.submit(keep)

    def forget_kept(self) -> None:
        """Drop the pages that wait to be kept."""
        self._generation += 1

    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        """Write no more pages, and log the names to delete. Returns 0: none is deleted here."""
        self._quarantined = True
        names = " or ".join(sorted({f"hcache-{namespace.hex()}-" for namespace in namespaces}))
        logger.error(
            f"hcache: pages that this server wrote are still in the shared L3 ({self._name}), and "
            "other machines read and keep them. Delete the values there whose names begin with "
            f"{names}, then run `hcache clear` on every machine"
        )
        return 0

    def close(self) -> None:
        """Close the backend after queued calls; if that takes 5 s, calls and backend are left."""
        deadline = time.monotonic() + CLOSE_SECONDS
        ended = [thread.end(deadline) for thread in self._threads]
        if all(ended):
            self._backend.close()
        self.forget_kept()
        for state in ("answers", "silent"):
            metrics.SHARED.set(self._name, state, value=0)

    def _write(self, names: Sequence[PageName], memory: Sequence[Parts]) -> list[bool] | None:
        """Write copies of pages: a late call may still read its memory. None as :meth:`_ask`."""
        if self._is_left_alone("writes"):  # a late call may still read the rows
            return None
        rows = range(self._part, self._part + len(names))
        for row, name, page in zip(rows, names, memory, strict=True):
            copy = copy_page(self._memory[row], page)
            self._memory[row, -TRAILER_BYTES:] = np.frombuffer(trailer(name, copy), np.uint8)

        def write() -> list[bool]:
            stored = self._backend.set([name.value for name in names], rows)
            if not any(stored):
                raise RuntimeError("it takes no pages")
            return stored

        return self._ask(self._writing, write, self._backend.option.read_seconds)

    def _copy_value(self, row: int, name: PageName, page: Parts) -> bool:
        """Copy the value in a row to the memory of its page. False: its trailer is wrong."""
        start, value = 0, self._memory[row]
        for part in page:
            np.frombuffer(part, np.uint8)[:] = value[start : start + part.nbytes]
            start += part.nbytes
        if value[-TRAILER_BYTES:].tobytes() == trailer(name, page):
            return True
        metrics.SHARED_PAGES.count("damaged")
        metrics.PROBLEMS.count("shared_damaged")
        problem = f"page {name.key.hex()[:12]} from {self._name} is damaged: a miss"
        self._problems.report("damaged", problem)
        return False

    def _is_left_alone(self, what: str) -> bool:
        """Whether ``what``, "reads" or "writes", failed or was late a moment ago, or still runs."""
        calls = (self._writing,) if what == "writes" else (self._looking, self._reading)
        return time.monotonic() < self._rest_until[what] or any(thread.hangs for thread in calls)

    def _ask(
        self, calls: BoundedCalls, work: Callable[[], _Result], seconds: float
    ) -> _Result | None:
        """The result of ``work()``; None if the backend failed or was too slow, now or recently."""
        what = "writes" if calls is self._writing else "reads"
        if self._is_left_alone(what):
            return None
        result = problem = None
        try:
            result = calls.call(work, seconds)
        except Exception as error:
            failed = "" if isinstance(error, GivenUp) else f"failed: {type(error).__name__}: "
            problem = f"{failed}{error}; no {what} for {REST_SECONDS:.0f} s"
            self._rest_until[what] = time.monotonic() + REST_SECONDS
            metrics.PROBLEMS.count("shared_silent")
        self._note_state(what, problem)
        return result

    def _note_state(self, work: str, problem: str | None) -> None:
        """Log and publish a change of the state of ``work`` ("reads" or "writes"); None: well."""
        with self._noting:
            if (work in self.failing) == (problem is not None):
                return
            self.failing ^= {work}
            metrics.SHARED.set(self._name, "answers", value=int(not self.failing))
            metrics.SHARED.set(self._name, "silent", value=int(bool(self.failing)))
        if problem is not None:
            logger.warning("hcache: the shared L3 (%s) %s", self._name, problem)
        elif not self.failing:
            logger.info("hcache: the shared L3 (%s) responds again", self._name)


class Tiered(Tier):
    """The page store, and a shared tier that is asked for pages that the page store lacks."""

    def __init__(self, local: LocalTier, backend: SharedBackend | None, l3: L3Progress) -> None:
        self.local, self._l3 = local, l3
        self._backend_to_start = backend  # until the size of a page is known
        self._shared: SharedTier | None = None
        # Pages that look-ups (one thread) found, from the first one on that only ``shared`` has.
        self.found_shared = 0

    @property
    def shares(self) -> bool:
        """True while there is a shared tier."""
        return self._shared is not None

    def use_shared(self, page_bytes: int, pieces: int) -> None:
        """Begin to use the shared tier, once; it is not used if :class:`SharedTier` raises."""
        backend, self._backend_to_start = self._backend_to_start, None
        if backend is None:
            return
        try:
            self._shared = SharedTier(backend, page_bytes, pieces)
        except Exception as error:  # raised on one rank, it would leave the others waiting
            problem = f"{backend.option.backend} did not register the buffers"
            logger.warning("%s%s: %s: %s", _NOT_USED, problem, type(error).__name__, error)
            if not isinstance(error, GivenUp):  # the call may still run
                backend.close()

    def leave_shared(self, problem: str | None = None) -> None:
        """Close the shared tier, or its backend if it has not begun; the page store goes on."""
        shared = self._shared or self._backend_to_start
        self._shared = self._backend_to_start = None
        if shared is not None:
            if problem is not None:
                logger.warning("%s%s", _NOT_USED, problem)
            shared.close()

    def exists(self, pages: Pages) -> list[bool]:
        """Of each page if a tier has it; the shared one counts up to the first that none has."""
        present = self.local.exists(pages)
        if self._shared is None:
            return present
        self._l3.may_take_longer(LOOK_UP_SECONDS)
        absent = [number for number, is_present in enumerate(present) if not is_present]
        count = sum(self._shared.exists(pages.pick(absent))) if absent else 0
        for number in absent[:count]:
            present[number] = True
        if pages.part == 0:  # each page counts once in found_shared, not each of its parts
            end = [*present, False].index(False)
            start = 0 if self.found_shared else absent[0] if count else end
            self.found_shared += end - start
        return present

    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        """Read pages; those that the page store lacks come from the shared tier, and are kept."""
        arrived, start = self.local.get(pages, memory), time.monotonic()
        missing = [number for number, is_here in enumerate(arrived) if not is_here]
        if self._shared is None or not missing:
            return arrived
        hits = self._shared.get(pages.pick(missing), [memory[number] for number in missing])
        verified = list(compress(missing, hits))
        for number in verified:
            arrived[number] = True
        end = [*arrived, False].index(False)  # pages behind the first miss are of no use
        count = sum(number < end for number in verified) if pages.part == 0 else 0
        tokens = count * pages.pool.host_pool.page_size
        seconds, gave_up = time.monotonic() - start, "reads" in self._shared.failing
        self._l3.add_shared_read(tokens, seconds, gave_up=gave_up)
        if verified:
            kept = pages.pick(verified)._replace(prefix=[*pages.prefix, *pages.keys[: verified[0]]])
            self._shared.keep_in(kept, [memory[number] for number in verified], self.local)
        return arrived

    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        stored = self.local.put(pages, memory)
        if self._shared is not None:
            self._shared.put(pages, memory)
        return stored

    def drop(self, namespaces: Sequence[bytes]) -> int:
        """Delete pages from the page store; returns the number of files."""
        if self._shared is not None:
            self._shared.forget_kept()
        return sum(map(self.local.store.drop, namespaces))

    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        if self._shared is not None:
            self._shared.quarantine(namespaces)
        return self.local.quarantine(namespaces)

    def close(self) -> None:
        self.leave_shared()
        self.local.close()
