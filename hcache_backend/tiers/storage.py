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

from hcache_backend import metrics
from hcache_backend.sglang.arguments import decodes_for_others
from hcache_backend.sglang.backups import Backups
from hcache_backend.start import attach
from hcache_backend.tiers.pool_pages import tensor_parts
from hcache_backend.tiers.stored_pools import StoredPools

logger = logging.getLogger("hcache")

_Result = TypeVar("_Result")

_REPORT_SECONDS = 60.0
"""Between two reports for ``hcache doctor`` and ``hcache stats``, whose numbers change."""


class HCacheStorage(HiCacheStorage):
    """Pages in local files: our own, or SGLang's plain KV pages; and what other machines have.

    Args:
        storage_config: SGLang's description of this rank.
        kwargs: Unused; part of SGLang's calling convention.

    Raises:
        ConfigError: An option is wrong, or would change the shape of pages of a running server.
            At start-up it stops the server, at a run-time attach it becomes an HTTP 400. All ranks
            raise, or none.

    Attributes:
        backups: Those that HiCache would not make, or not wait for.
        reads_any_page_alike: Whether no page of a hit is farther away than others.
    """

    # What the store gives is verified unit by unit, and it may be put together from the shares of
    # several ranks.
    verifies_segments = True

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        joined = attach.join(storage_config)
        self._runtime, config, kv_fields, store, behind = joined
        self._pools = StoredPools(self._runtime, store, storage_config, kv_fields, behind)
        self.reads_any_page_alike = behind is None
        self.backups = Backups(storage_config.pp_size)
        self._promises_hits = not decodes_for_others(self._runtime.runner.server_args)
        if not self._promises_hits:
            logger.warning(
                "hcache: a decode server only writes L3: SGLang fails a request whose hit cannot "
                "be read, so every look-up is a miss"
            )
        self._runtime.on_distrust.append(self._drop_own_pages)
        self._runtime.on_weights_changed.append(self.backups.finish)
        self._leave_report = partial(attach.leave_report, joined, storage_config)
        self._reported = time.monotonic()
        self._guard("report", self._leave_report, None)
        quota = config.quota_bytes
        logger.info(
            "hcache: L3 in %s, %s%s",
            ", ".join(map(str, config.dirs)),
            f"at most {quota / 1e9:.1f} GB in each" if quota else "no quota",
            f", {config.behind.backend} behind" if config.behind is not None else "",
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Called once, before any page.

        Raises:
            ConfigError: ``tp_lcm_size`` does not divide the KV heads; on all ranks alike.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pools.register(PoolName.KV, mem_pool_host)
        if not self._runtime.own_pages:  # else it was said when they were made
            tokens, size = self._runtime.runner.max_total_num_tokens, mem_pool_host.size_per_token
            attach.warn_of_small_host_pool(mem_pool_host.size, int(tokens), size, size)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.register(host_pool_name, host_pool)

    # ---- zero-copy interface (v1), one pool ----

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        found = self._get(keys, host_indices, prefix=_prefix(extra_info))
        pages = _leading(found)
        self._count_tokens(hit=pages, unreadable=len(keys) - pages)
        self._renew_report()
        return found

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        self._set(keys, host_indices, extra_info=extra_info)
        self._renew_report()
        return [True] * len(keys)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        pages = _leading(self._exists(keys))
        self.use([*_prefix(extra_info), *keys[:pages]])
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
        self.use([*_prefix(extra_info), *keys[:usable]])
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
            self._set(t.keys or [], t.host_indices, t.name, extra_info)
        return {t.name: [True] * len(t.keys or []) for t in transfers}

    def take_found_behind(self) -> int:
        """Pages that look-ups found behind the page store only, since the last call."""
        return self._pools.take_found_behind()

    def use(self, keys: Sequence[str]) -> None:
        """A request uses the pages ``keys`` of its prompt, from the first one on.

        Wherever they are: L3 would not know of those that L1 or L2 has. Any thread; never waits.
        """
        self._guard("use", partial(self._pools.use, keys), None)

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
        found = self._guard("get", lambda: self._pools.read(keys, parts), [False] * len(keys))
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
        self._guard("set", lambda: self._pools.write(keys, parts), None)
        return True

    # ---- the rest ----

    def clear(self) -> None:
        """Delete the pages of this server's namespaces; other models in the folders stay."""
        self.backups.forget()
        self._guard("clear", self._pools.drop, 0)

    def get_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        return self._pools.take_stats()

    def stop(self, cache: Any) -> None:
        """Store what is queued, as far as there is time: the server is about to end."""
        if self.backups.stop(cache):
            self._pools.close()

    def close(self) -> None:
        """Called at detach; data stays."""
        if self._drop_own_pages in self._runtime.on_distrust:
            self._runtime.on_distrust.remove(self._drop_own_pages)
            self._runtime.on_weights_changed.remove(self.backups.finish)
        self._runtime.stop_judging()
        self._pools.close()

    # ---- internals ----

    def _get(
        self,
        keys: Sequence[str],
        host_indices: Any,
        pool: str = PoolName.KV,
        prefix: Sequence[str] = (),
    ) -> list[bool]:
        get = partial(self._pools.get, keys, host_indices, pool, prefix)
        return self._guard("get", get, [False] * len(keys))

    def _set(
        self,
        keys: Sequence[str],
        host_indices: Any,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> None:
        set_all = partial(self._pools.set, keys, host_indices, pool, _prefix(extra_info))
        self._guard("set", set_all, None)

    def _exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        if not self._promises_hits:
            metrics.LOOKUPS.count("not_promised", len(keys))
            return [False] * len(keys)
        return self._guard("exists", partial(self._pools.exists, keys, pool), [False] * len(keys))

    def _count_tokens(self, **pages: int) -> None:
        size, instead = self.mem_pool_host.page_size, None
        if self._pools.is_suspended():
            instead = "suspended"
        elif not self._promises_hits:
            instead = "not_promised"
        for result, number in pages.items():
            if number:
                metrics.L3_TOKENS.count(instead or result, number * size)

    def _renew_report(self) -> None:
        if time.monotonic() > self._reported + _REPORT_SECONDS:
            self._reported = time.monotonic()
            report = partial(self._guard, "report", self._leave_report, None)
            # Not in the thread that reads or writes: the folders may be slow.
            threading.Thread(target=report, name="hcache-report", daemon=True).start()

    def _drop_own_pages(self) -> None:
        dropped = self._guard("drop", self._pools.drop_written, 0)
        logger.error("hcache: %d pages that this server wrote were deleted", dropped)

    def _guard(self, what: str, work: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return work()
        except Exception:
            metrics.PROBLEMS.count(f"storage_{what}")
            logger.exception("hcache: storage %s failed; it counts as a miss", what)
            return otherwise


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
