"""Pages of SGLang's host pools in L3, and their namespaces. Everything here may raise;
:class:`~hcache_backend.tiers.storage.HCacheStorage` turns that into misses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from itertools import compress
from operator import and_
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.observability.metrics_collector import StorageMetrics

from hcache_backend import metrics
from hcache_backend.format.envelope import key_bytes
from hcache_backend.format.units import Parts
from hcache_backend.sglang.runtime import Runtime, Weights
from hcache_backend.store import PageStore
from hcache_backend.tiers.pool_pages import PageKeys, PoolPages
from hcache_backend.tiers.shared import LOOK_UP_SECONDS, StoreBehind
from hcache_backend.tiers.shared_backend import MadeBackend
from hcache_backend.tiers.threads import GivenUp

logger = logging.getLogger("hcache")

WRITE_BEHIND_SECONDS = 5.0  # longest wait of a batch of pages for room in the shared tier


class StoredPools:
    """The pages of the host pools in the page store ``store``; any thread. ``kv_fields`` go into
    the namespace of plain pages. ``behind``: the shared tier, closed with this object."""

    def __init__(
        self,
        runtime: Runtime,
        store: PageStore,
        config: HiCacheStorageConfig,
        kv_fields: dict[str, object],
        behind: MadeBackend | None = None,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._store_counters = metrics.StoreCounters(store.stats)
        self._config = config
        self._kv_fields = kv_fields
        self._unused_behind = behind
        self._behind: StoreBehind | None = None
        self._found_behind = 0
        self._pools: dict[str, PoolPages] = {}
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def register(self, name: str, host_pool: Any) -> None:
        """Calls with ``name`` mean ``host_pool``. Raises ConfigError if ``tp_lcm_size`` is
        wrong."""
        is_first = not self._pools  # the pool of K and V may come a second time, among all others
        pages = self._pools[name] = PoolPages(name, host_pool, self._config)
        if is_first and self._config.tp_rank == self._config.pp_rank == 0:
            page_bytes = host_pool.size_per_token * host_pool.page_size
            self._store.check_room(page_bytes // pages.shares)
        if name != PoolName.KV:
            self._go_without_behind("the model has several host pools")
        elif self._unused_behind is not None and not pages.empty:
            self._use_behind(pages, self._unused_behind)

    def is_suspended(self) -> bool:
        weights = self._runtime.weights
        return weights is None or weights.suspended is not None

    def exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        """Flags of the pages whose shares are all in L3. Pages of the shared tier count only up to
        the first page that no store has."""
        pages, found = self._pools[pool], [True] * len(keys)
        for share in range(0 if pages.empty else pages.shares):
            namespace = self._serving_namespace(pool, share)
            if namespace is None:
                metrics.LOOKUPS.count("suspended", len(keys))
                return [False] * len(keys)
            hashes = [key_bytes(key) for key in keys]
            with metrics.timed("l3_exists"):
                here = self._store.exists(namespace, hashes, share=pages.share)
            if self._behind is not None and pool == PoolName.KV:
                self._runtime.l3.may_take_longer(LOOK_UP_SECONDS)
                with metrics.timed("behind_exists"):
                    only_there = self._behind.complete(namespace, pages.share, hashes, here)
                if share == 0:
                    start = 0 if self._found_behind else only_there.start
                    self._found_behind += only_there.stop - start
            metrics.LOOKUPS.count("found", sum(here))
            metrics.LOOKUPS.count("absent", len(here) - sum(here))
            found = list(map(and_, found, here))
        return found

    def take_found_behind(self) -> int:
        """Pages that look-ups (one thread) found since the last call, from the first remote one."""
        found, self._found_behind = self._found_behind, 0
        return found

    def get(
        self,
        keys: Sequence[str],
        host_indices: Any,
        pool: str = PoolName.KV,
        prefix: Sequence[str] = (),
    ) -> list[bool]:
        """Read pages, which follow those of ``prefix``, into the host pool; False is a miss."""
        pages = self._pools[pool]
        found = [True] * len(keys)
        if pages.empty:
            return found
        memory = pages.to_read(host_indices, len(keys))
        if memory is None:
            return [False] * len(keys)
        for share, parts in enumerate(memory.shares):
            here = self.read(keys, parts, pool, share)
            if self._behind is not None and pool == PoolName.KV and not all(here):
                self._read_behind(self._behind, keys, parts, share, prefix, here)
            found = list(map(and_, found, here))
        memory.finish(found)
        return found

    def set(
        self,
        keys: Sequence[str],
        host_indices: Any,
        pool: str = PoolName.KV,
        prefix: Sequence[str] = (),
    ) -> None:
        """Store pages of the host pool; see :meth:`PageStore.put`."""
        pages = self._pools[pool]
        memory = None if pages.empty else pages.to_write(host_indices, len(keys))
        for share, parts in enumerate(memory.shares if memory else ()):
            namespace, behind = self.write(keys, parts, pool, share, prefix), self._behind
            if behind is not None and pool == PoolName.KV and namespace is not None:
                hashes = [key_bytes(key) for key in keys]
                self._write_behind(behind, namespace, share, hashes, parts)

    def use(self, keys: Sequence[str]) -> None:
        """A request uses the pages ``keys`` of its prompt, from the first one on. The time that
        this takes does not grow with the prompt."""
        for _, namespace in self._namespaces():
            self._store.use(namespace, PageKeys(keys))

    def drop(self) -> int:
        """Delete the pages of the present weights and pools; returns the number of files."""
        behind = self._behind
        if behind is not None:
            behind.forget_kept()
        return sum(self._store.drop(namespace) for _, namespace in self._namespaces())

    def drop_written(self) -> int:
        """Delete all pages that this server wrote, of earlier weights too, once L3 is suspended.
        Returns the number of files. A write that began before is waited for: otherwise its pages
        would be named afterwards. Pages in the shared tier stay there."""
        with self._writing:
            behind = self._behind
            if behind is not None:
                behind.distrust([namespace for _, namespace in self._namespaces()])
            return self._store.drop_writer(self._runtime.writer)

    def read(
        self,
        keys: Sequence[str],
        parts: Sequence[Parts],
        pool: str = PoolName.KV,
        share: int = 0,
    ) -> list[bool]:
        """Read a share of pages into the memory ``parts``; False is a miss."""
        namespace = self._serving_namespace(pool, share)
        if namespace is None:
            return [False] * len(keys)
        start = time.perf_counter()
        hashes = [key_bytes(key) for key in keys]
        with metrics.timed("l3_read"):
            found = self._store.get(namespace, hashes, parts, share=self._pools[pool].share)
        self._store_counters.publish()
        size = sum(map(_bytes, compress(parts, found)))
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
        made_by: bytes | None = None,
    ) -> bytes | None:
        """Store a share of pages from the memory ``parts``; see :meth:`PageStore.put`. Returns
        their namespace, or None if it is not served and they were dropped. ``made_by``: the
        namespace that they must have; None: the one that is served."""
        start = time.perf_counter()
        pages, hashes = self._pools[pool], [key_bytes(key) for key in keys]
        with self._writing:
            namespace = self._serving_namespace(pool, share)
            if namespace is None or made_by not in (None, namespace):
                metrics.PAGES.count("dropped_suspended", len(keys))
                return None
            with metrics.timed("l3_write"):
                stored = self._store.put(
                    namespace,
                    hashes,
                    parts,
                    prefix=PageKeys(prefix),
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
        return namespace

    def take_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        with self._lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def close(self) -> None:
        self._close_behind()
        self._store.close()
        self._store_counters.publish()

    def _use_behind(self, pages: PoolPages, made: MadeBackend) -> None:
        """Use the shared tier for the pages of the only pool."""
        page_bytes = pages.host_pool.size_per_token * pages.host_pool.page_size // pages.shares
        problem = f"{made.option.backend} did not register the buffers: "
        try:
            self._behind = StoreBehind(made, page_bytes, 1 if self._config.is_mla_model else 2)
        except GivenUp as error:  # its call may still run, so it must not be closed
            logger.warning("hcache: option 'behind' is not used: %s%s", problem, error)
        except Exception as error:  # raised on one rank, it would leave the others waiting
            self._go_without_behind(f"{problem}{type(error).__name__}: {error}")
        self._unused_behind = None

    def _go_without_behind(self, problem: str) -> None:
        if self._behind is not None or self._unused_behind is not None:
            logger.warning("hcache: option 'behind' is not used: %s", problem)
            self._close_behind()

    def _close_behind(self) -> None:
        for behind in (self._behind, self._unused_behind):
            if behind is not None:
                behind.close()
        self._behind = self._unused_behind = None

    def _write_behind(
        self,
        behind: StoreBehind,
        namespace: bytes,
        share: int,
        hashes: Sequence[bytes],
        parts: Sequence[Parts],
    ) -> None:
        """Pass pages on to the shared tier, as room comes, up to the first without room."""
        deadline, given = time.monotonic() + WRITE_BEHIND_SECONDS, 0
        while given < len(hashes) and behind.wait_for_room(deadline):
            with self._writing:  # otherwise pages distrusted since would be written
                if self._serving_namespace(PoolName.KV, share) != namespace:
                    return
                own = self._pools[PoolName.KV].share
                given += behind.write(namespace, own, hashes[given:], parts[given:])
        metrics.BEHIND_PAGES.count("dropped_full", len(hashes) - given)

    def _read_behind(
        self,
        behind: StoreBehind,
        keys: Sequence[str],
        parts: Sequence[Parts],
        share: int,
        prefix: Sequence[str],
        found: list[bool],
    ) -> None:
        """Read pages that are not ``found`` from the shared tier; keep them in the page store."""
        namespace, pages = self._serving_namespace(PoolName.KV, share), self._pools[PoolName.KV]
        if namespace is None:
            return
        start = time.monotonic()
        missing = [number for number, here in enumerate(found) if not here]
        hashes = [key_bytes(keys[number]) for number in missing]
        with metrics.timed("behind_read"):
            came = behind.read(namespace, pages.share, hashes, [parts[n] for n in missing])
        proven = list(compress(missing, came))
        for number in proven:
            found[number] = True
        end = found.index(False) if False in found else len(found)
        count = sum(number < end for number in proven) if share == 0 else 0  # once, not of all
        tokens = count * pages.host_pool.page_size
        seconds = time.monotonic() - start
        self._runtime.l3.came_from_shared(tokens, seconds, gave_up=behind.silent)
        if proven:
            kept, before = [keys[n] for n in proven], [*prefix, *keys[: proven[0]]]

            def keep(copies: list[Parts]) -> bool:
                names = kept[: len(copies)]
                stored = self.write(names, copies, PoolName.KV, share, before, made_by=namespace)
                return stored is not None

            behind.put_locally([parts[n] for n in proven], keep)

    def _serving_namespace(self, pool: str, share: int) -> bytes | None:
        """Namespace to read and write, or None while L3 is suspended. The weights are read once: an
        update a moment later must not move these pages under the new weights' namespace."""
        weights = self._runtime.weights
        if weights is None or weights.suspended is not None:
            return None
        return self._namespace(pool, share, weights)

    def _namespace(self, pool: str, share: int, weights: Weights) -> bytes:
        if self._runtime.own_pages and pool == PoolName.KV:
            return self._runtime.namespace_of(weights, **self._runtime.page_fields)
        fields = {**self._pools[pool].fields(share), **self._kv_fields}
        if pool.startswith(PoolName.DRAFT):
            fields["draft"] = self._runtime.draft_digest
        return self._runtime.namespace_of(weights, **fields)

    def _namespaces(self) -> list[tuple[str, bytes]]:
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
