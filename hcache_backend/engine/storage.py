"""HCacheStorage: the L3 backend that SGLang loads by name.

::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "hcache", "module_path": "hcache_backend",
        "class_name": "HCacheStorage", "interface_v1": 1,
        "hcache": {"dirs": ["/mnt/ssd0/hcache"]}}'

Nothing here raises into HiCache's threads, which are not restarted: a problem is a miss, and a page
that was not stored is reported as done and counted, because a False would end the rest of its node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import and_
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from hcache_backend.engine import metrics
from hcache_backend.engine.pool_pages import PartialRead, PoolPages, tensor_parts
from hcache_backend.engine.runtime import Weights
from hcache_backend.engine.startup import attach
from hcache_backend.page import key_bytes
from hcache_backend.store import Parts

logger = logging.getLogger("hcache")

_Result = TypeVar("_Result")


class HCacheStorage(HiCacheStorage):
    """Pages in local files, hidden-state pages in hidden mode and plain KV pages in KV mode.

    Args:
        storage_config: SGLang's description of this rank.
        kwargs: Unused; part of SGLang's calling convention.

    Raises:
        ConfigError: An option is wrong, or would change the shape of pages of a running server.
            At start-up it stops the server, at a run-time attach it becomes an HTTP 400. All ranks
            raise, or none.
    """

    # What the store gives is verified block by block, and it may be put together from the shares
    # of several ranks; segments that the host pool does not want are not read.
    verifies_segments = True

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        joined = attach.join(storage_config)
        self._runtime, config, self._adapters, self._store = joined
        self._store_counters = metrics.StoreCounters(self._store.stats)
        self._storage_config = storage_config
        self._pools: dict[str, PoolPages] = {}
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()
        self._runtime.on_distrust.append(self._drop_own_pages)
        if storage_config.tp_rank == storage_config.pp_rank == 0:
            self._guard("report", partial(attach.leave_report, joined), None)
        logger.info(
            "hcache: L3 in %s, %s mode%s",
            ", ".join(map(str, config.dirs)),
            self._runtime.mode or "kv",
            f" ({self._runtime.reason})" if self._runtime.reason else "",
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Called once, before any page.

        Raises:
            ConfigError: ``tp_lcm_size`` does not divide the KV heads; on all ranks alike.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pages_of(PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pages_of(host_pool_name)

    # ---- zero-copy interface (v1), one pool ----

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        found = self._get(keys, host_indices)
        pages = _leading(found)
        self._count_tokens(hit=pages, unreadable=len(keys) - pages)
        return found

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        self._set(keys, host_indices, prefix=_prefix(extra_info))
        return [True] * len(keys)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        pages = _leading(self._exists(keys))
        self.use_prefix([*_prefix(extra_info), *keys[:pages]])
        self._count_tokens(found=pages, absent=len(keys) - pages)
        return pages

    # ---- several pools (v2) ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        pages = _leading(self._exists(keys))
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            lengths = _usable_lengths(self._exists(keys[:pages], transfer.name), transfer)
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        usable = restorable[-1] if restorable else 0
        self.use_prefix([*_prefix(extra_info), *keys[:usable]])
        self._count_tokens(found=usable, other_pool=pages - usable, absent=len(keys) - pages)
        return PoolTransferResult(usable, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._get(t.keys or [], t.host_indices, t.name) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        for t in transfers:
            self._set(t.keys or [], t.host_indices, t.name, _prefix(extra_info))
        return {t.name: [True] * len(t.keys or []) for t in transfers}

    def use_prefix(self, keys: Sequence[str]) -> None:
        """A request uses the pages ``keys`` of its prompt, from the first one on, wherever they are.

        Any thread; waits for nothing.
        """

        def use() -> None:
            hashes = [key_bytes(key) for key in keys]
            for share in range(self._pages_of(PoolName.KV).shares):
                namespace = self._serving_namespace(PoolName.KV, share)
                if namespace is not None:
                    self._store.use(namespace, hashes)

        self._guard("use", use, None)

    # ---- single values ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(target is None for target in targets):
            return [None] * len(keys)
        parts = [tensor_parts(target) for target in targets]
        found = self._guard("get", lambda: self._read(keys, parts), [False] * len(keys))
        return [target if ok else None for target, ok in zip(targets, found, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        values = list(values or [])
        if len(values) != len(keys) or any(value is None for value in values):
            return False
        parts = [tensor_parts(value.contiguous()) for value in values]
        self._guard("set", lambda: self._write(keys, parts), None)
        return True

    # ---- the rest ----

    def clear(self) -> None:
        """Delete the pages of this server's namespaces; other models in the folders stay."""
        nothing: list[bytes] = []
        for namespace in self._guard("clear", self._own_namespaces, nothing):
            self._guard("clear", partial(self._store.drop, namespace), 0)

    def get_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        with self._lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def close(self) -> None:
        """Called at detach; data stays."""
        if self._drop_own_pages in self._runtime.on_distrust:
            self._runtime.on_distrust.remove(self._drop_own_pages)
        self._store.close()
        self._store_counters.publish()

    # ---- internals ----

    def _get(self, keys: Sequence[str], host_indices: Any, pool: str = PoolName.KV) -> list[bool]:
        def get() -> list[bool]:
            pages = self._pages_of(pool)
            found = [True] * len(keys)
            if pages.empty:
                return found
            memory = pages.to_read(host_indices, len(keys))
            if memory is None:
                return [False] * len(keys)
            wanted = pages.wanted(host_indices)
            for share, parts in enumerate(memory.shares):
                here = self._read(keys, parts, pool, share, wanted)
                found = list(map(and_, found, here))
            memory.finish(found)
            return found

        return self._guard("get", get, [False] * len(keys))

    def _set(
        self,
        keys: Sequence[str],
        host_indices: Any,
        pool: str = PoolName.KV,
        prefix: Sequence[str] = (),
    ) -> None:
        def put() -> None:
            pages = self._pages_of(pool)
            memory = None if pages.empty else pages.to_write(host_indices, len(keys))
            for share, parts in enumerate(memory.shares if memory else ()):
                self._write(keys, parts, pool, share, prefix)

        self._guard("set", put, None)

    def _exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        def exists() -> list[bool]:
            pages, found = self._pages_of(pool), [True] * len(keys)
            for share in range(0 if pages.empty else pages.shares):
                namespace = self._serving_namespace(pool, share)
                if namespace is None:
                    metrics.LOOKUPS.count("suspended", len(keys))
                    return [False] * len(keys)
                hashes = [key_bytes(key) for key in keys]
                with metrics.timed("l3_exists"):
                    here = self._store.exists(namespace, hashes, share=pages.share_of_tokens)
                metrics.LOOKUPS.count("found", sum(here))
                metrics.LOOKUPS.count("absent", len(here) - sum(here))
                found = list(map(and_, found, here))
            return found

        return self._guard("exists", exists, [False] * len(keys))

    def _read(
        self,
        keys: Sequence[str],
        parts: Sequence[Parts],
        pool: str = PoolName.KV,
        share: int = 0,
        wanted: PartialRead | None = None,
    ) -> list[bool]:
        namespace = self._serving_namespace(pool, share)
        if namespace is None:
            return [False] * len(keys)
        start = time.perf_counter()
        hashes = [key_bytes(key) for key in keys]
        share_of_tokens, subset = self._pages_of(pool).share_of_tokens, wanted and wanted.subset
        with metrics.timed("l3_read"):
            found = self._store.get(namespace, hashes, parts, subset=subset, share=share_of_tokens)
        self._store_counters.publish()
        there = compress(parts, found)
        size = sum(wanted.bytes if wanted else _bytes(page) for page in there)
        metrics.PAGES.count("read", sum(found))
        metrics.PAGES.count("missed", len(found) - sum(found))
        with self._lock:
            self._metrics.prefetch_pgs.append(sum(found))
            self._metrics.prefetch_bandwidth.append(_gigabytes_per_second(size, start))
        return found

    def _write(
        self,
        keys: Sequence[str],
        parts: Sequence[Parts],
        pool: str = PoolName.KV,
        share: int = 0,
        prefix: Sequence[str] = (),
    ) -> None:
        namespace = self._serving_namespace(pool, share)
        if namespace is None:
            metrics.PAGES.count("dropped_suspended", len(keys))
            return
        start = time.perf_counter()
        pages, hashes = self._pages_of(pool), [key_bytes(key) for key in (*prefix, *keys)]
        before = len(prefix)
        with metrics.timed("l3_write"):
            stored = self._store.put(
                namespace,
                hashes[before:],
                parts,
                prefix=hashes[:before],
                share=pages.share_of_tokens,
                table=pages.table(),
            )
        self._store_counters.publish()
        size = sum(map(_bytes, parts))
        metrics.PAGES.count("written", sum(stored))
        metrics.PAGES.count("dropped_error", len(stored) - sum(stored))
        with self._lock:
            self._metrics.backup_pgs.append(sum(stored))
            self._metrics.backup_bandwidth.append(_gigabytes_per_second(size, start))

    def _count_tokens(self, **pages: int) -> None:
        weights, size = self._runtime.weights, self.mem_pool_host.page_size
        suspended = weights is None or weights.suspended is not None
        for result, number in pages.items():
            if number:
                metrics.L3_TOKENS.count("suspended" if suspended else result, number * size)

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
        if self._runtime.mode == "hidden" and pool == PoolName.KV:
            return self._runtime.namespace_of(weights, **self._runtime.page_fields)
        fields = self._pages_of(pool).fields(share)
        if self._adapters:
            fields["adapters"] = self._adapters
        return self._runtime.namespace_of(weights, **fields)

    def _pages_of(self, pool: str) -> PoolPages:
        host_pool = getattr(self, "registered_pools", {}).get(pool, self.mem_pool_host)
        known = self._pools.get(pool)
        if known is None or known.host_pool is not host_pool:
            known = self._pools[pool] = PoolPages(pool, host_pool, self._storage_config)
        return known

    def _own_namespaces(self) -> list[bytes]:
        weights = self._runtime.weights
        if weights is None:
            return []
        pools = {PoolName.KV, *getattr(self, "registered_pools", {})}
        return [
            self._namespace(pool, share, weights)
            for pool in pools
            for share in range(self._pages_of(pool).shares)
        ]

    def _drop_own_pages(self) -> None:
        def drop() -> int:
            names = self._own_namespaces()
            return sum(self._store.drop(name, self._runtime.writer) for name in names)

        dropped = self._guard("drop", drop, 0)
        logger.error("hcache: %d pages that this server wrote were deleted", dropped)

    def _guard(self, what: str, work: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return work()
        except Exception:
            metrics.PROBLEMS.count(f"storage_{what}")
            logger.exception("hcache: storage %s failed; it counts as a miss", what)
            return otherwise


def _bytes(page: Parts) -> int:
    return sum(part.nbytes for part in page)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    """The keys of the pages before those of a call, as far as SGLang tells."""
    return list(extra_info.prefix_keys or ()) if extra_info else []


def _leading(found: Sequence[bool]) -> int:
    return list(found).index(False) if False in found else len(found)


def _usable_lengths(present: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Lengths of prefixes whose pages of this pool, by its policy, are all there."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(present) + 1))
    window = max(1, len(transfer.keys or ()))
    return {
        length
        for length in range(1, len(present) + 1)
        if all(present[max(0, length - window) : length])
    }


def _gigabytes_per_second(size: int, start: float) -> float:
    return size / 1e9 / max(time.perf_counter() - start, 1e-9)
