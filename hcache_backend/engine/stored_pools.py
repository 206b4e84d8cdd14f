"""What L3 holds of the pages of SGLang's host pools, and under which namespaces.

Everything here may raise; :class:`~hcache_backend.engine.storage.HCacheStorage` makes misses of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import compress
from operator import and_
from typing import Any, overload

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.observability.metrics_collector import StorageMetrics

from hcache_backend.engine import metrics
from hcache_backend.engine.pool_pages import PartialRead, PoolPages
from hcache_backend.engine.runtime import Runtime, Weights
from hcache_backend.page import key_bytes
from hcache_backend.store import Gap, PageStore
from hcache_backend.units import Parts


class PageKeys(Sequence[bytes]):
    """SGLang's keys of pages as those of the store, each converted when it is read.

    The scheduler's thread passes on thousands of them with every request, and reads none.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> PageKeys: ...

    def __getitem__(self, place: int | slice) -> bytes | PageKeys:
        if isinstance(place, slice):
            return PageKeys(self._texts[place])
        return key_bytes(self._texts[place])


class StoredPools:
    """The pages of the host pools in the page store ``store``; any thread.

    Args:
        config: SGLang's description of this rank.
        kv_fields: What K and V depend on besides the weights, for the namespace of plain pages.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: PageStore,
        config: HiCacheStorageConfig,
        kv_fields: dict[str, object],
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._store_counters = metrics.StoreCounters(store.stats)
        self._config = config
        self._kv_fields = kv_fields
        self._pools: dict[str, PoolPages] = {}
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def register(self, name: str, host_pool: Any) -> None:
        """``host_pool`` has the pages that calls mean by ``name``.

        Raises:
            ConfigError: ``tp_lcm_size`` does not divide the KV heads.
        """
        is_first = not self._pools  # the pool of K and V may come a second time, among all others
        pages = self._pools[name] = PoolPages(name, host_pool, self._config)
        if is_first and self._config.tp_rank == self._config.pp_rank == 0:
            page_bytes = host_pool.size_per_token * host_pool.page_size
            self._store.check_room(page_bytes // pages.shares)

    def is_suspended(self) -> bool:
        """Whether L3 neither takes nor gives for now."""
        weights = self._runtime.weights
        return weights is None or weights.suspended is not None

    def exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        """Whether L3 has all shares of each page."""
        pages, found = self._pools[pool], [True] * len(keys)
        for share in range(0 if pages.empty else pages.shares):
            namespace = self._serving_namespace(pool, share)
            if namespace is None:
                metrics.LOOKUPS.count("suspended", len(keys))
                return [False] * len(keys)
            hashes = [key_bytes(key) for key in keys]
            with metrics.timed("l3_exists"):
                here = self._store.exists(namespace, hashes, share=pages.share)
            metrics.LOOKUPS.count("found", sum(here))
            metrics.LOOKUPS.count("absent", len(here) - sum(here))
            found = list(map(and_, found, here))
        return found

    def get(self, keys: Sequence[str], host_indices: Any, pool: str = PoolName.KV) -> list[bool]:
        """Read pages into the host pool; False is a miss."""
        pages = self._pools[pool]
        found = [True] * len(keys)
        if pages.empty:
            return found
        memory = pages.to_read(host_indices, len(keys))
        if memory is None:
            return [False] * len(keys)
        wanted = pages.wanted(host_indices)
        for share, parts in enumerate(memory.shares):
            found = list(map(and_, found, self.read(keys, parts, pool, share, wanted)))
        memory.finish(found)
        return found

    def set(
        self,
        keys: Sequence[str],
        host_indices: Any,
        pool: str = PoolName.KV,
        prefix: Sequence[str] = (),
        last_use: int | None = None,
    ) -> None:
        """Store pages of the host pool; see :meth:`PageStore.put`."""
        pages = self._pools[pool]
        memory = None if pages.empty else pages.to_write(host_indices, len(keys))
        for share, parts in enumerate(memory.shares if memory else ()):
            self.write(keys, parts, pool, share, prefix, last_use)

    def use(self, keys: Sequence[str]) -> None:
        """A request uses the pages ``keys`` of its prompt, from the first one on.

        The time that this takes does not grow with the prompt.
        """
        for pool, namespace in self._namespaces():
            # Other pools need the last pages of a prompt only.
            complete = pool == PoolName.KV and not self._pools[pool].empty
            self._store.use(namespace, PageKeys(keys), complete=complete)

    def take_gaps(self) -> list[Gap]:
        """KV pages of prompts in use that L3 has no more, since the last call. Never waits."""
        return self._store.take_gaps()

    def drop(self) -> int:
        """Delete the pages of the weights and pools that are served; returns how many files."""
        return sum(self._store.drop(namespace) for _, namespace in self._namespaces())

    def drop_written(self) -> int:
        """Delete all pages that this server wrote, of earlier weights too, once L3 is suspended.

        A write that had begun before is waited for, or its pages would be named afterwards.
        Returns how many files went.
        """
        with self._writing:
            return self._store.drop_writer(self._runtime.writer)

    def read(
        self,
        keys: Sequence[str],
        parts: Sequence[Parts],
        pool: str = PoolName.KV,
        share: int = 0,
        wanted: PartialRead | None = None,
    ) -> list[bool]:
        """Read a share of pages into the memory ``parts``; False is a miss."""
        namespace = self._serving_namespace(pool, share)
        if namespace is None:
            return [False] * len(keys)
        start = time.perf_counter()
        hashes = [key_bytes(key) for key in keys]
        own, subset = self._pools[pool].share, wanted and wanted.subset
        with metrics.timed("l3_read"):
            found = self._store.get(namespace, hashes, parts, subset=subset, share=own)
        self._store_counters.publish()
        there = compress(parts, found)
        size = sum(wanted.bytes if wanted else _bytes(page) for page in there)
        metrics.PAGES.count("read", sum(found))
        metrics.PAGES.count("missed", len(found) - sum(found))
        with self._lock:
            self._metrics.prefetch_pgs.append(sum(found))
            self._metrics.prefetch_bandwidth.append(_gigabytes_per_second(size, start))
        return found

    def write(
        self,
        keys: Sequence[str],
        parts: Sequence[Parts],
        pool: str = PoolName.KV,
        share: int = 0,
        prefix: Sequence[str] = (),
        last_use: int | None = None,
    ) -> None:
        """Store a share of pages from the memory ``parts``; see :meth:`PageStore.put`."""
        start = time.perf_counter()
        pages, hashes = self._pools[pool], [key_bytes(key) for key in keys]
        with self._writing:
            namespace = self._serving_namespace(pool, share)
            if namespace is None:
                metrics.PAGES.count("dropped_suspended", len(keys))
                return
            with metrics.timed("l3_write"):
                stored = self._store.put(
                    namespace,
                    hashes,
                    parts,
                    prefix=PageKeys(prefix),
                    last_use=last_use,
                    share=pages.share,
                    table=pages.table(),
                    digests=pages.digests(parts),
                )
        self._store_counters.publish()
        size = sum(map(_bytes, parts))
        metrics.PAGES.count("written", sum(stored))
        metrics.PAGES.count("dropped_error", len(stored) - sum(stored))
        with self._lock:
            self._metrics.backup_pgs.append(sum(stored))
            self._metrics.backup_bandwidth.append(_gigabytes_per_second(size, start))

    def take_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        with self._lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def close(self) -> None:
        """Close the store."""
        self._store.close()
        self._store_counters.publish()

    def _serving_namespace(self, pool: str, share: int) -> bytes | None:
        """Namespace to read and write, or None while L3 is suspended.

        The weights are looked at once: an update that begins on the scheduler thread a moment later
        must not move what is on its way under the new weights' namespace.
        """
        weights = self._runtime.weights
        if weights is None or weights.suspended is not None:
            return None
        return self._namespace(pool, share, weights)

    def _namespace(self, pool: str, share: int, weights: Weights) -> bytes:
        if self._runtime.own_pages and pool == PoolName.KV:
            return self._runtime.namespace_of(weights, **self._runtime.page_fields)
        fields = {**self._pools[pool].fields(share), **self._kv_fields}
        return self._runtime.namespace_of(weights, **fields)

    def _namespaces(self) -> list[tuple[str, bytes]]:
        """Those of all shares of all pools, with the pools' names."""
        weights = self._runtime.weights
        if weights is None:
            return []
        return [
            (pool, self._namespace(pool, share, weights))
            for pool, pages in list(self._pools.items())
            for share in range(pages.shares)
        ]


def _bytes(page: Parts) -> int:
    return sum(part.nbytes for part in page)


def _gigabytes_per_second(size: int, start: float) -> float:
    return size / 1e9 / max(time.perf_counter() - start, 1e-9)
