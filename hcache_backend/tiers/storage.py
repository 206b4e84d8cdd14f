"""HCacheStorage: the L3 backend that SGLang loads by name.

Nothing here raises into HiCache's threads, which are not restarted: a problem is a miss. A page
that was not stored is reported as done: a False would end the rest of its node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

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

from hcache_backend import metrics
from hcache_backend.fingerprint import Weights
from hcache_backend.format.envelope import PageKeys, PageName
from hcache_backend.metrics import logger
from hcache_backend.sglang.arguments import may_be, page_size, warn_of_small_host_pool
from hcache_backend.sglang.backups import Backups
from hcache_backend.start import attach
from hcache_backend.tiers.events import L3Events
from hcache_backend.tiers.pool_pages import PoolPages
from hcache_backend.tiers.shared_backend import make_backend
from hcache_backend.tiers.tier import LocalTier, Pages, Tiered

_Extra: TypeAlias = HiCacheStorageExtraInfo | None

_REPORT_SECONDS = 60.0  # between two reports for ``hcache doctor`` and ``hcache stats``


class HCacheStorage(HiCacheStorage):
    """Pages in local files: our own, or SGLang's plain KV pages; and pages of other machines.
    Raises ConfigError, on all ranks or none, if an option is wrong or would change the shape of
    pages of a running server. It stops a start, and is an HTTP 400 at an attach."""

    # The store verifies each unit that it reads. A page may combine shards of several ranks.
    verifies_segments = True

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._joined = attach.join(storage_config, make_backend)
        self._runtime, config, self._kv_fields, store, shared = self._joined
        self._weights, self._config = self._runtime.weights, storage_config
        self._tier = Tiered(LocalTier(store, self._runtime.writer), shared, self._runtime.l3)
        self._pools: dict[str, PoolPages] = {}
        self._windows: dict[str, int] = {}  # pages of a pool at the end of a hit, if not all
        self._state_tokens = config.state_tokens
        self.reads_any_page_alike = shared is None  # no page of a hit is farther away than others
        self.backups = Backups(storage_config.pp_size, self._runtime.prefetches)
        self.events: L3Events | None = None
        if config.events and attach.publishes_events():
            self.events = L3Events(page_size(self._runtime.runner.server_args))
            store.stats.on_evicted = self._note_evicted
        self._promises_hits = not may_be("decode", self._runtime.runner.server_args)
        if not self._promises_hits:
            why = "SGLang fails a request whose hit cannot be read, so every look-up is a miss"
            logger.warning("hcache: a decode server only writes L3: %s", why)
        self._weights.on_quarantine.append(self._drop_own_pages)
        self._weights.on_weights_changed.append(self.backups.finish)
        self._reported = time.monotonic()
        self._report()
        quota = f"at most {config.quota_bytes / 1e9:.1f} GB in each" if config.quota_bytes else ""
        beside = f", shared L3: {config.shared.backend}" if config.shared is not None else ""
        folders = ", ".join(map(str, config.dirs))
        logger.info("hcache: L3 in %s, %s%s", folders, quota or "no quota", beside)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Called once, before any page. Raises ConfigError if ``tp_lcm_size`` is wrong."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)
        if not self._runtime.pages.own:  # otherwise the warning came when they were made
            tokens, size = self._runtime.runner.max_total_num_tokens, mem_pool_host.size_per_token
            warn_of_small_host_pool(mem_pool_host.size, int(tokens), size, size)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        first = not self._pools  # the pool of K and V may come a second time, among all others
        pages = self._pools[host_pool_name] = PoolPages(host_pool_name, host_pool, self._config)
        if first and self._config.tp_rank == self._config.pp_rank == 0:
            self._tier.local.store.check_room(pages.part_bytes)
        if host_pool_name != PoolName.KV:
            self._tier.leave_shared("the model has several host pools")
        elif pages.parts:
            self._tier.use_shared(pages.part_bytes, pieces=1 if self._config.is_mla_model else 2)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: _Extra = None
    ) -> list[bool]:
        arrived = self._get(keys, host_indices, extra=extra_info)
        self._count_tokens(unreadable=len(keys) - _count_leading(arrived))
        self._renew_report()
        return arrived

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: _Extra = None
    ) -> list[bool]:
        self._set(keys, host_indices, extra=extra_info)
        self._renew_report()
        return [True] * len(keys)

    def batch_exists(self, keys: list[str], extra_info: _Extra = None) -> int:
        return int(self.batch_exists_v2(keys, extra_info=extra_info).kv_hit_pages)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: _Extra = None,
    ) -> PoolTransferResult:
        """How many pages of a prompt can be restored: of K and V, and what other pools need."""
        pages = _count_leading(self._exists(keys))
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:  # a window or a state
                self._windows[transfer.name] = max(1, len(transfer.keys or ()))
            lengths = _usable_lengths(self._exists(keys[:pages], transfer.name), transfer)
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        usable = restorable[-1] if restorable else 0
        self.use([*_prefix(extra_info), *keys[:usable]])
        self._count_tokens(found=usable, other_pool=pages - usable, absent=len(keys) - pages)
        return PoolTransferResult(usable, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: _Extra = None
    ) -> dict[str, list[bool]]:
        arrived = {t.name: self._get(t.keys or [], t.host_indices, t.name) for t in transfers}
        for transfer in transfers:
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            if trailing and not all(arrived[transfer.name]):
                self._forget_damaged(transfer, _prefix(extra_info))
        return arrived

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: _Extra = None
    ) -> dict[str, list[bool]]:
        for t in transfers:
            if t.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                self._windows.setdefault(t.name, max(1, len(t.keys or ())))
            self._set(t.keys or [], t.host_indices, t.name, extra_info)
        return {t.name: [True] * len(t.keys or []) for t in transfers}

    def take_found_shared(self) -> int:
        """See :attr:`Tiered.found_shared`; sets it to 0."""
        count, self._tier.found_shared = self._tier.found_shared, 0
        return count

    def use(self, keys: Sequence[str]) -> None:
        """A request uses the pages ``keys`` of its prompt, in any tier: L3 sees no uses in L1 or
        L2. Of pools with a window the last pages count. Any thread; never waits."""
        with _catching("use"):
            for pool in list(self._pools):
                first = max(0, len(keys) - self._windows.get(pool, len(keys)))
                for namespace in self._namespaces(pool):
                    self._tier.local.store.use(namespace, PageKeys(keys), first)

    def reaches(self, operation: Any) -> bool:
        """True if look-ups reach the node of a backup ``operation``: L3 has all pages before it, or
        a shared tier may have them. HiCache's thread that writes."""
        if not self.backups.enabled or self._tier.shares or not operation.prefix_keys:
            return True
        with _catching("exists"):
            prefix = self._pages(PoolName.KV, operation.prefix_keys) or ()
            pages = len(operation.prefix_keys)
            stored = _count_leading(_all_parts(map(self._tier.local.exists, prefix), pages))
            if stored < pages:
                metrics.PAGES.count("dropped_without_beginning", len(operation.hash_value))
                self.backups.missing_pages[operation.id] = stored
                return False
        return True

    def wrote(self, operation: Any) -> None:
        """HiCache has written a node, in its thread: publish events of the pages that L3 has."""
        if self.events is None:
            return
        keys, pages = operation.hash_value, self._pages(PoolName.KV, operation.hash_value)
        if pages is not None:
            present = _all_parts(map(self._tier.local.exists, pages), len(keys))
            self.events.note_stored(keys, present, operation.prefix_keys or (), operation.token_ids)

    def _note_evicted(self, names: Sequence[PageName]) -> None:
        with _catching("events"):
            if self.events is not None:
                of_kv = self._namespaces(PoolName.KV)  # pages of other pools have the same keys
                self.events.note_evicted([name.key for name in names if name.namespace in of_kv])

    # SGLang uses no single values with ``interface_v1``.
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, *args: Any, **kwargs: Any) -> None: ...
    def batch_get(self, *args: Any, **kwargs: Any) -> None: ...
    def set(self, *args: Any, **kwargs: Any) -> None: ...
    def batch_set(self, *args: Any, **kwargs: Any) -> None: ...

    def clear(self) -> None:
        """Delete the pages of this server's namespaces; other models in the folders stay."""
        self.backups.forget()
        with _catching("clear"):
            self._tier.drop(self._namespaces())

    def get_stats(self) -> StorageMetrics:
        return self._tier.local.take_stats()

    def stop(self, cache: Any) -> None:
        """Store queued pages, as far as there is time: the server is about to end."""
        if self.backups.stop(cache):
            self._tier.close()

    def close(self) -> None:
        """Close folders and shared tier at a detach; stored pages stay."""
        if self._drop_own_pages in self._weights.on_quarantine:
            self._weights.on_quarantine.remove(self._drop_own_pages)
            self._weights.on_weights_changed.remove(self.backups.finish)
        self._runtime.stop_judging()
        self._tier.close()

    def _get(
        self, keys: Sequence[str], host_indices: Any, pool: str = PoolName.KV, extra: _Extra = None
    ) -> list[bool]:
        with _catching("get"):
            pages = self._pages(pool, keys, extra)
            buffers = self._pools[pool].memory(host_indices, len(keys), read=True)
            if pages is not None and buffers is not None:
                arrived = _all_parts(map(self._tier.get, pages, buffers.parts), len(keys))
                buffers.finish(arrived)
                return arrived
        return [False] * len(keys)

    def _set(
        self, keys: Sequence[str], host_indices: Any, pool: str = PoolName.KV, extra: _Extra = None
    ) -> None:
        with _catching("set"):
            pages = self._pages(pool, keys, extra)
            buffers = self._pools[pool].memory(host_indices, len(keys), read=False)
            if pages is None:
                metrics.PAGES.count("dropped_suspended", len(keys))
            elif buffers is not None and not self._has_state_near(pool, extra):
                for part, pieces in zip(pages, buffers.parts, strict=True):
                    self._tier.put(part, pieces)

    def _forget_damaged(self, transfer: PoolTransfer, prefix: Sequence[str]) -> None:
        """The window or state at the end of a hit did not come. Read earlier ones, the last one
        first, until one comes: the store forgets those that do not, so the next hit ends there."""
        chain, size = [*prefix, *(transfer.keys or ())], len(transfer.keys or ())
        with _catching("get"):
            while lengths := _usable_lengths(self._exists(chain, transfer.name), transfer):
                keys = chain[max(0, max(lengths) - size) : max(lengths)]
                rows = len(keys) * self._pools[transfer.name].host_pool.page_size
                if all(self._get(keys, transfer.host_indices[:rows], transfer.name)):
                    break
                chain = chain[: max(lengths) - 1]

    def _has_state_near(self, pool: str, extra: _Extra) -> bool:
        """True if ``pool`` holds states, and L3 has one, of all ranks, less than ``state_tokens``
        (an option) before this one. A state is as large as thousands of tokens: one is enough."""
        apart = -(-self._state_tokens // self.mem_pool_host.page_size)  # in pages
        if pool != PoolName.MAMBA or apart < 2:
            return False
        keys, ranks = _prefix(extra)[1 - apart :], self._pools[pool].ranks()
        near = [pages for rank in ranks for pages in self._pages(pool, keys, **rank) or ()]
        return any(map(all, zip(*map(self._tier.exists, near), strict=True)))

    def _exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        """Which pages of ``pool`` L3 has: none on a decode server, or while L3 is suspended."""
        present = [False] * len(keys)
        if not self._promises_hits:
            metrics.LOOKUPS.count("not_promised", len(keys))
            return present
        with _catching("exists"):
            pages = self._pages(pool, keys)
            if pages is None:
                metrics.LOOKUPS.count("suspended", len(keys))
                return present
            present = _all_parts(map(self._tier.exists, pages), len(keys))
            metrics.LOOKUPS.count("found", sum(present))
            metrics.LOOKUPS.count("absent", len(present) - sum(present))
        return present

    def _pages(
        self, pool: str, keys: Sequence[str], extra: _Extra = None, **rank: object
    ) -> list[Pages] | None:
        """Names of pages in L3, part by part, or None while L3 is suspended; ``rank``: of another
        rank. Weights are read once, so that an update does not move pages to the new namespace."""
        weights = self._weights.present
        if weights is None or weights.suspended is not None:
            return None
        pages, parts = self._pools[pool], range(self._pools[pool].parts)
        page_keys, prefix = list(PageKeys(keys)), PageKeys(_prefix(extra))
        alone = pool in self._windows
        names = enumerate(self._namespace(pool, part, weights, **rank) for part in parts)
        return [Pages(pages, part, name, page_keys, prefix, alone) for part, name in names]

    def _namespace(self, pool: str, part: int, weights: Weights, **rank: object) -> bytes:
        """The namespace of one part of a pool's pages; ``rank``: fields of another rank."""
        if self._runtime.pages.own and pool == PoolName.KV:
            return self._weights.page_namespace(weights)
        fields = {**self._pools[pool].fields(part), **self._kv_fields, **rank}
        if pool.startswith(PoolName.DRAFT):
            fields["draft"] = self._weights.draft_digest
        return self._weights.namespace_of(weights, **fields)

    def _namespaces(self, *names: str) -> list[bytes]:
        """Of the pools of these names, or of all pools, with the present weights."""
        weights, pools = self._weights.present, list(self._pools.items())
        return [
            self._namespace(pool, part, weights)
            for pool, pages in pools
            for part in range(pages.parts)
            if weights is not None and (not names or pool in names)
        ]

    def _count_tokens(self, **pages: int) -> None:
        """Count the tokens of ``pages`` by result; all by the reason if L3 serves none now."""
        weights, instead = self._weights.present, None if self._promises_hits else "not_promised"
        if weights is None or weights.suspended is not None:
            instead = "suspended"
        if instead is not None:
            pages = {instead: sum(pages.values())}
        size = self.mem_pool_host.page_size
        metrics.L3_TOKENS.add(**{result: number * size for result, number in pages.items()})

    def _renew_report(self) -> None:
        if time.monotonic() > self._reported + _REPORT_SECONDS:
            self._reported = time.monotonic()
            # Not in the thread that reads or writes: the folders may be slow.
            threading.Thread(target=self._report, name="hcache-report", daemon=True).start()

    def _report(self) -> None:
        with _catching("report"):
            attach.leave_report(self._joined, self._config)

    def _drop_own_pages(self) -> None:
        dropped = 0
        with _catching("drop"):
            dropped = self._tier.quarantine(self._namespaces())
        logger.error("hcache: %d pages that this server wrote were deleted", dropped)


def _catching(what: str) -> AbstractContextManager[None]:
    return metrics.catching(f"storage_{what}", f"storage {what} failed; it counts as a miss")


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    return list(extra_info.prefix_keys or ()) if extra_info else []


def _count_leading(flags: Sequence[bool]) -> int:
    return [*flags, False].index(False)


def _all_parts(parts: Iterable[Sequence[bool]], pages: int) -> list[bool]:
    return list(map(all, zip([True] * pages, *parts, strict=True)))


def _usable_lengths(present: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Lengths of prefixes of which L3 has what the pool of ``transfer`` needs: all pages, or the
    last ones, as many as ``transfer`` has keys. ``present``: of each page whether L3 has it."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _count_leading(present) + 1))
    window = max(1, len(transfer.keys or ()))
    return {end for end in range(1, len(present) + 1) if all(present[max(0, end - window) : end])}
