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

import ctypes
import difflib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

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

from hcache_backend.config import ConfigError, HCacheConfig, parse_config
from hcache_backend.engine import hooks, metrics
from hcache_backend.engine.keys import key_bytes
from hcache_backend.engine.measured_store import MeasuredStore
from hcache_backend.engine.partitioning import keep_profile
from hcache_backend.engine.runtime import Runtime, Weights, current
from hcache_backend.store.base import EIGHTHS, Parts, Segment, SegmentTable, Subset
from hcache_backend.store.server_report import write_report
from hcache_backend.store.striped import open_store

logger = logging.getLogger("hcache")

_OUTER_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "hcache")
_Result = TypeVar("_Result")


class HCacheStorage(HiCacheStorage):
    """Pages in local files, hidden-state pages in hidden mode and plain KV pages in KV mode.

    Args:
        storage_config: SGLang's description of this rank.
        kwargs: Unused; part of SGLang's calling convention.

    Raises:
        ConfigError: An option is wrong, or would change the shape of pages of a running server.
            At start-up it stops the server, at a run-time attach it becomes an HTTP 400.
    """

    # Pages are read without the segments that the host pool does not want.
    reads_parts = True

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        _check_outer_keys(extra)
        config = parse_config(extra.get("hcache"), "hcache")
        self._runtime = current()
        _join_running_server(self._runtime, config)
        self._rank = _rank_fields(storage_config)
        self._store = _open_store(config, self._runtime.writer)
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()
        self._runtime.on_distrust.append(self._drop_own_pages)
        if storage_config.tp_rank == storage_config.pp_rank == 0:
            self._guard("report", partial(_leave_report, config, self._runtime), None)
        logger.info(
            "hcache: L3 in %s, %s mode%s",
            ", ".join(map(str, config.dirs)),
            self._runtime.mode or "kv",
            f" ({self._runtime.reason})" if self._runtime.reason else "",
        )

    # ---- zero-copy interface (v1), one pool ----

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._guard("get", lambda: self._get(keys, host_indices), [False] * len(keys))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        self._guard("set", lambda: self._set(keys, host_indices), None)
        return [True] * len(keys)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return _leading(self._guard("exists", lambda: self._exists(keys), [False] * len(keys)))

    # ---- several pools (v2) ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        usable = pages
        for transfer in pool_transfers or []:
            present = self._guard(
                "exists", partial(self._exists, keys[:pages], transfer.name), [False] * pages
            )
            length = _usable_length(present, transfer)
            if length:
                hits[transfer.name] = length
            usable = min(usable, length)
        return PoolTransferResult(usable, hits)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            t.name: self._guard(
                "get",
                partial(self._get, t.keys or [], t.host_indices, t.name),
                [False] * len(t.keys or []),
            )
            for t in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        for t in transfers:
            self._guard("set", partial(self._set, t.keys or [], t.host_indices, t.name), None)
        return {t.name: [True] * len(t.keys or []) for t in transfers}

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
        parts = [_tensor_parts(target) for target in targets]
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
        parts = [_tensor_parts(value.contiguous()) for value in values]
        self._guard("set", lambda: self._write(keys, parts), None)
        return True

    # ---- the rest ----

    def clear(self) -> None:
        """Delete the pages of this server's namespaces; other models in the folders stay."""
        pools = {PoolName.KV, *getattr(self, "registered_pools", {})}
        for pool in pools:
            self._guard("clear", partial(self._clear_pool, pool), None)

    def get_stats(self) -> StorageMetrics:
        """Pages and bandwidths since the last call."""
        self._guard("stats", self._store.counters.publish, None)
        with self._lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def close(self) -> None:
        """Called at detach; data stays."""
        if self._drop_own_pages in self._runtime.on_distrust:
            self._runtime.on_distrust.remove(self._drop_own_pages)
        self._store.close()

    # ---- internals ----

    def _get(self, keys: Sequence[str], host_indices: Any, pool: str = PoolName.KV) -> list[bool]:
        parts = self._page_parts(pool, host_indices, len(keys))
        wanted = _wanted_layers(self._host_pool(pool), host_indices)
        return self._read(keys, parts, pool, wanted)

    def _set(self, keys: Sequence[str], host_indices: Any, pool: str = PoolName.KV) -> None:
        self._write(keys, self._page_parts(pool, host_indices, len(keys)), pool)

    def _exists(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
        namespace = self._serving_namespace(pool)
        if namespace is None:
            metrics.count_lookups("suspended", len(keys))
            return [False] * len(keys)
        return self._store.exists(namespace, [key_bytes(key) for key in keys])

    def _read(
        self,
        keys: Sequence[str],
        parts: Sequence[Parts],
        pool: str = PoolName.KV,
        wanted: _Wanted | None = None,
    ) -> list[bool]:
        namespace = self._serving_namespace(pool)
        if namespace is None:
            return [False] * len(keys)
        start = time.perf_counter()
        hashes = [key_bytes(key) for key in keys]
        found = self._store.get(namespace, hashes, parts, subset=wanted and wanted.subset)
        sizes = [wanted.bytes if wanted else _bytes(page) for page in parts]
        size = sum(size for size, ok in zip(sizes, found, strict=True) if ok)
        metrics.count_pages("read", sum(found))
        metrics.count_pages("missed", len(found) - sum(found))
        with self._lock:
            self._metrics.prefetch_pgs.append(sum(found))
            self._metrics.prefetch_bandwidth.append(_gigabytes_a_second(size, start))
        return found

    def _write(self, keys: Sequence[str], parts: Sequence[Parts], pool: str = PoolName.KV) -> None:
        namespace = self._serving_namespace(pool)
        if namespace is None:
            metrics.count_pages("dropped_suspended", len(keys))
            return
        start = time.perf_counter()
        stored = self._store.put(
            namespace,
            [key_bytes(key) for key in keys],
            parts,
            table=_segment_table(self._host_pool(pool)),
        )
        size = sum(map(_bytes, parts))
        metrics.count_pages("written", sum(stored))
        metrics.count_pages("dropped_error", len(stored) - sum(stored))
        with self._lock:
            self._metrics.backup_pgs.append(sum(stored))
            self._metrics.backup_bandwidth.append(_gigabytes_a_second(size, start))

    def _serving_namespace(self, pool: str) -> bytes | None:
        """Namespace to read and write, or None while L3 is suspended.

        The weights are looked at once: an update that begins on the scheduler thread a moment later
        must not move what is on its way under the new weights' namespace.
        """
        weights = self._runtime.weights
        if weights is None or weights.suspended is not None:
            return None
        return self._namespace(pool, weights)

    def _namespace(self, pool: str, weights: Weights) -> bytes:
        if self._runtime.mode == "hidden" and pool == PoolName.KV:
            return self._runtime.namespace_of(weights, **self._runtime.page_fields)
        host_pool = self._host_pool(pool)
        return self._runtime.namespace_of(
            weights,
            kind="kv",
            pool=str(pool),
            host_pool=type(host_pool).__name__,
            layout=host_pool.layout,
            bytes_per_token=host_pool.size_per_token,
            **self._rank,
        )

    def _host_pool(self, pool: str) -> Any:
        return getattr(self, "registered_pools", {}).get(pool, self.mem_pool_host)

    def _page_parts(self, pool: str, host_indices: Any, pages: int) -> list[Parts]:
        host_pool = self._host_pool(pool)
        if pages == 0:
            return []
        pointers, sizes = host_pool.get_page_buffer_meta(host_indices)
        if len(pointers) % pages:
            raise ValueError(f"{len(pointers)} pieces of memory for {pages} pages of pool {pool}")
        pieces = [_memory(*piece) for piece in zip(pointers, sizes, strict=True)]
        per_page = len(pieces) // pages
        return [pieces[i : i + per_page] for i in range(0, len(pieces), per_page)]

    def _clear_pool(self, pool: str) -> None:
        if self._runtime.weights is not None:
            self._store.clear(self._namespace(pool, self._runtime.weights))

    def _drop_own_pages(self) -> None:
        def drop() -> int:
            if self._runtime.weights is None:
                return 0
            own = self._namespace(PoolName.KV, self._runtime.weights)
            return self._store.drop_writer(own, self._runtime.writer)

        dropped = self._guard("drop", drop, 0)
        logger.error("hcache: %d pages that this server wrote were deleted", dropped)

    def _guard(self, what: str, work: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return work()
        except Exception:
            metrics.count_problem(f"storage_{what}")
            logger.exception("hcache: storage %s failed; it counts as a miss", what)
            return otherwise


def _check_outer_keys(extra: dict[str, Any]) -> None:
    for key, value in extra.items():
        if key not in _OUTER_KEYS:
            if key in HCacheConfig.model_fields:
                hint = f'it belongs under the key \'hcache\': {{"hcache": {{"{key}": ...}}}}'
            else:
                near = difflib.get_close_matches(key, _OUTER_KEYS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_OUTER_KEYS)}"
            raise ConfigError(f"extra config: unknown key {key!r} (value {value!r}); {hint}")
    if extra.get("interface_v1") != 1:
        raise ConfigError(
            f"extra config: 'interface_v1' is {extra.get('interface_v1')!r}; it must be 1, so that "
            "SGLang hands over pages without copying them"
        )


def _join_running_server(runtime: Runtime, config: HCacheConfig) -> None:
    """Check ``config`` against the running server, or become one in KV mode (run-time attach).

    Raises:
        ConfigError: The options would change the shape of pages.
    """
    if runtime.config is not None:
        running, wanted = runtime.config.page_shape(), config.page_shape()
        for key, value in wanted.items():
            if running[key] != value:
                raise ConfigError(
                    f"hcache: option {key!r} is {value!r} but this server runs with "
                    f"{running[key]!r}; it shapes pages, so it can only change at a restart"
                )
    else:
        # The server was started without us: its host pool holds plain KV.
        missing = hooks.install(hooks.weight_hooks())
        if missing:
            raise ConfigError(f"hcache: {missing}; weight updates could not be noticed")
        runtime.use_kv_mode("the server was started without HCACHE_ENABLE=1")
    if runtime.weights is None:
        runtime.read_weights()


def _open_store(config: HCacheConfig, writer: bytes) -> MeasuredStore:
    try:
        return MeasuredStore(open_store(config, writer))
    except OSError as error:
        raise ConfigError(
            f"hcache: option 'dirs' is {[str(path) for path in config.dirs]}: {error}; "
            "every folder must be one that this user can create and write"
        ) from None


def _leave_report(config: HCacheConfig, runtime: Runtime) -> None:
    report = runtime.report()
    for folder in config.dirs:
        write_report(folder, report)
    keep_profile(runtime, config.dirs[0])


def _segment_table(host_pool: Any) -> SegmentTable | None:
    """How a page of hidden states divides; None for pages whose inside we do not know."""
    layout = getattr(host_pool, "page_layout", None)
    if layout is None or layout.page_size % EIGHTHS:
        return None
    segments = (
        Segment(length, host_pool.planes(layer))
        for layer, length in enumerate(layout.segment_bytes)
        if length
    )
    return SegmentTable((Segment(layout.header_bytes, 0), *segments))


class _Wanted(NamedTuple):
    """The part of a page of ours that is to be read, and its bytes."""

    subset: Subset
    bytes: int


def _wanted_layers(host_pool: Any, host_indices: Any) -> _Wanted | None:
    """What is to be read into pages of ours; None: all of them, or pages of another kind."""
    layout = getattr(host_pool, "page_layout", None)
    if layout is None:
        return None
    first = host_pool.first_layer(host_indices)
    if first == 0:
        return None
    stored = [layer for layer, length in enumerate(layout.segment_bytes) if length]
    segments = frozenset((0, *(1 + i for i, layer in enumerate(stored) if layer >= first)))
    size = layout.header_bytes + sum(layout.segment_bytes[first:])
    return _Wanted(Subset(segments), size)


def _rank_fields(config: HiCacheStorageConfig) -> dict[str, object]:
    rank: dict[str, object] = {"pp": [config.pp_rank, config.pp_size]}
    if config.attn_cp_size > 1:
        rank["cp"] = [config.attn_cp_rank, config.attn_cp_size]
    if not config.is_mla_model:  # MLA pages are the same on every tensor-parallel rank
        rank["tp"] = [config.tp_rank, config.tp_size]
    return rank


def _memory(pointer: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B")


def _tensor_parts(tensor: torch.Tensor) -> Parts:
    return [memoryview(tensor.view(torch.uint8).numpy()).cast("B")]


def _bytes(page: Parts) -> int:
    return sum(part.nbytes for part in page)


def _leading(found: Sequence[bool]) -> int:
    return list(found).index(False) if False in found else len(found)


def _usable_length(present: Sequence[bool], transfer: PoolTransfer) -> int:
    """Longest prefix whose pages of this pool, by its policy, are all there."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return _leading(present)
    window = max(1, len(transfer.keys or ()))
    for length in range(len(present), 0, -1):
        if all(present[max(0, length - window) : length]):
            return length
    return 0


def _gigabytes_a_second(size: int, start: float) -> float:
    return size / 1e9 / max(time.perf_counter() - start, 1e-9)
