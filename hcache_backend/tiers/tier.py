"""One interface for every place where L3 keeps pages, and the page store as such a place."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from sglang.srt.observability.metrics_collector import StorageMetrics

from hcache_backend import metrics
from hcache_backend.format.envelope import PageName
from hcache_backend.format.units import Parts
from hcache_backend.store import PageStore
from hcache_backend.tiers.pool_pages import PoolPages


class Pages(NamedTuple):
    """Names of consecutive pages of a sequence: of each page, part number ``part`` of those into
    which ``pool`` divides it."""

    pool: PoolPages
    part: int
    namespace: bytes
    keys: Sequence[bytes]
    prefix: Sequence[bytes] = ()  # keys of the pages before them

    def some(self, numbers: Sequence[int]) -> Pages:
        return self._replace(keys=[self.keys[number] for number in numbers])

    def names(self) -> list[PageName]:
        return [PageName(self.namespace, key, self.pool.share) for key in self.keys]


class Tier(ABC):
    """A place for pages. Any thread. ``memory``: the pieces of each page, in order."""

    @abstractmethod
    def exists(self, pages: Pages) -> list[bool]:
        """Flags of the pages that are there. A tier may give up at a page that is not."""

    @abstractmethod
    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        """Read pages into ``memory``; False is a miss, and that page's memory has any bytes."""

    @abstractmethod
    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        """Store pages, now or later; their memory may change when this returns. False: the page
        will not be stored."""

    @abstractmethod
    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        """Pages of this server may be wrong: take no more, and delete those that only this machine
        has. Returns the number of files. ``namespaces``: those of the present weights."""

    @abstractmethod
    def close(self) -> None:
        """Store queued pages, in limited time, and release all resources."""


class LocalTier(Tier):
    """The page store of this machine; calls may raise. ``writer``: the number of this server
    run."""

    def __init__(self, store: PageStore, writer: bytes) -> None:
        self.store = store
        self._writer = writer
        self._counters = metrics.StoreCounters(store.stats)
        self._writing, self._noting = threading.Lock(), threading.Lock()
        self._quarantined = False
        self._stats = StorageMetrics()

    def exists(self, pages: Pages) -> list[bool]:
        with metrics.timed("l3_exists"):
            return self.store.exists(pages.namespace, pages.keys, share=pages.pool.share)

    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        start = time.perf_counter()
        with metrics.timed("l3_read"):
            found = self.store.get(pages.namespace, pages.keys, memory, share=pages.pool.share)
        self._note("prefetch", memory, found, start)
        metrics.PAGES.count("read", sum(found))
        metrics.PAGES.count("missed", len(found) - sum(found))
        return found

    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        start, (pool, _, namespace, keys, prefix) = time.perf_counter(), pages
        with self._writing:
            if self._quarantined:
                metrics.PAGES.count("dropped_suspended", len(keys))
                return [False] * len(keys)
            with metrics.timed("l3_write"):
                stored = self.store.put(
                    namespace,
                    keys,
                    memory,
                    prefix=prefix,
                    share=pool.share,
                    table=pool.table(),
                    digests=pool.digests(memory),
                )
        self._note("backup", memory, stored, start)
        metrics.PAGES.count("written", sum(stored))
        metrics.PAGES.count("dropped_error", len(stored) - sum(stored))
        return stored

    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        """Pages of earlier weights go, too. A write that began before is waited for: otherwise its
        pages would be named afterwards."""
        with self._writing:
            self._quarantined = True
            return self.store.drop_writer(self._writer)

    def close(self) -> None:
        self.store.close()
        self._counters.publish()

    def take_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        with self._noting:
            taken, self._stats = self._stats, StorageMetrics()
        return taken

    def _note(self, kind: str, memory: Sequence[Parts], done: list[bool], start: float) -> None:
        self._counters.publish()
        size = sum(part.nbytes for page in compress(memory, done) for part in page)
        rate = size / 1e9 / max(time.perf_counter() - start, 1e-9)  # SGLang wants GB/s
        with self._noting:
            getattr(self._stats, f"{kind}_pgs").append(sum(done))
            getattr(self._stats, f"{kind}_bandwidth").append(rate)
