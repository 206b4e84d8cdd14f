"""Backups that HiCache would not make or not wait for: beginnings of conversations, the last ones.
With ``write_back`` HiCache writes a node when the device evicts it, ends of conversations first.
The beginning of one that goes on would never be written, so it is put once its end was written.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from hcache_backend import metrics
from hcache_backend.format.envelope import key_bytes
from hcache_backend.metrics import logger

_PAGES = 128  # a turn puts no further node once its nodes have this many pages
_NODES = 1 << 16  # known ends of written beginnings; the oldest ones are forgotten
_FINISH_SECONDS = 10.0  # SGLang kills processes 15 s after it has told them to stop
_POLL_SECONDS = 0.001


class Backups:
    """Scheduler thread only. All ranks put the same nodes at once. Pipeline stages put none."""

    def __init__(self, stages: int) -> None:
        self._on = stages == 1
        self._cache: Any = None
        self._heads: dict[bytes, int] = {}  # ends of beginnings that are to be put, by their key
        self._written: dict[bytes, None] = {}  # keys of ends of beginnings that were put

    def wrote(self, cache: Any, node: int) -> None:
        """``node`` is on its way to L3: note the node before it."""
        if self._on and cache.is_write_back and len(cache.tree_components) == 1:
            found = cache.tree_core.snapshot_buffer_backup(node, False)
            if found is not None and not found.parent_is_root:
                self._heads[key_bytes(found.parent_last_hash)] = found.parent_node_id

    def put_heads(self, cache: Any) -> None:
        """Back up nodes before those that were written, a part of them; called after HiCache's
        turn. Only ``write_back`` leaves such nodes, which are still on the device."""
        self._cache = cache
        if not self._heads or cache.ongoing_write_through:
            return
        from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

        end = next(iter(self._heads))
        chain: list[tuple[bytes, int, int]] = []  # from the last node to the first
        key: bytes | None = end
        first = node = self._heads.pop(end)
        while key is not None and key not in self._written:
            found = cache.tree_core.snapshot_buffer_backup(node, False)
            if found is None or key_bytes(found.hash_values[-1]) != key:
                return  # it was evicted, and so written
            chain.append((key, node, len(found.hash_values)))
            key = None if found.parent_is_root else key_bytes(found.parent_last_hash)
            node = found.parent_node_id
        pages = 0
        while chain and pages < _PAGES:
            key, node, more = chain.pop()
            if not cache.is_backuped(node):
                pages += more
                if not cache._execute_and_commit_kv_backup(BackupKV([node])):
                    more += sum(of_node for _, _, of_node in chain)
                    metrics.PAGES.count("heads_not_put", more)
                    return
                metrics.PAGES.count("heads_put", more)
            self._written[key] = None
            if len(self._written) > _NODES:
                del self._written[next(iter(self._written))]
        if chain:
            self._heads[end] = first

    def forget(self) -> None:
        """L3 lost all that was put."""
        self._written.clear()
        self._heads.clear()

    def finish(self) -> None:
        """Wait for running backups, for a limited time, before the weights change or the memory of
        the GPU is released: SGLang ends a server whose caches cannot be flushed then. Every rank
        calls it in the same turn."""
        cache = self._cache
        self.forget()
        if not self._on or cache is None or cache.ongoing_load_back or cache.ongoing_prefetch:
            return
        if not self._backups_end(cache, time.monotonic() + _FINISH_SECONDS):
            logger.warning(
                f"hcache: backups did not end in {_FINISH_SECONDS:g} s: SGLang may be unable to "
                "flush its caches now, and then ends the server"
            )

    def stop(self, cache: Any) -> bool:
        """Before the end of the server, wait like :meth:`finish` until L3 has all that is queued,
        and with ``write_back`` all that is on the device. Returns True if it has."""
        if not self._on:
            return False
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        def nodes() -> int:
            return len(cache.ongoing_backup) + len(cache.ongoing_write_through)

        end = time.monotonic() + _FINISH_SECONDS
        within = "hcache: shutting down: up to %g s to write %d more nodes to L3"
        logger.info(within, _FINISH_SECONDS, nodes())
        ended = self._backups_end(cache, end)
        some = EvictParams(num_tokens=_PAGES * cache.page_size)
        while ended and cache.is_write_back and cache.evict(some).num_tokens_evicted:
            ended = self._backups_end(cache, end)
        if not ended:
            late = "hcache: %d nodes were not written to L3 within %g s of the shutdown"
            logger.warning(late, nodes(), _FINISH_SECONDS)
        return ended

    def _backups_end(self, cache: Any, end: float) -> bool:
        """Returns True if all backups end before ``end`` (monotonic) on all ranks."""
        while cache.ongoing_write_through or cache.ongoing_backup or self._heads:
            cache.check_hicache_events()
            goes_on = torch.tensor(time.monotonic() < end, dtype=torch.int32)
            cache._all_reduce_attn_groups(goes_on, dist.ReduceOp.MIN)
            if not goes_on:
                return False
            time.sleep(_POLL_SECONDS)
        return True
