"""Pages without which L3 cannot find others: they are put there although HiCache would not.

HiCache writes a node of its tree to L3 once. When a page of it is evicted there while the node goes
on being used, nothing behind that page can be found in L3, however often it is written. Such pages
are put again when the server has nothing else to do.

With ``write_back`` HiCache writes a node when the device evicts it, ends of conversations first: of
one that goes on, the beginning would never be written. It is put when the end has been.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hcache_backend.engine import metrics
from hcache_backend.engine.ranks import said_by_all_ranks
from hcache_backend.page import key_bytes
from hcache_backend.store import Gap

logger = logging.getLogger("hcache")

TURNS = 128
"""Idle turns of the scheduler from one look at what is missing to the next."""
_PAGES = 128
"""No further node is put in a turn once its nodes have so many pages."""
_NODES = 1 << 16
"""Nodes that are known; those that were not used for longest are forgotten."""
_FINISH_SECONDS = 10.0
"""SGLang kills processes 15 s after it has told them to stop."""
_POLL_SECONDS = 0.001


class _Lack(NamedTuple):
    """How many pages L3 lacks of a node, which was used at ``time`` (ns since 1970)."""

    time: int
    pages: int


class Repairs:
    """Nodes of the radix tree that L3 has lost pages of. The scheduler's thread only.

    Every rank sees the same nodes and has the same idle turns, so all put the same nodes at once,
    whichever rank lacks pages. Pipeline stages do not: they put none.

    Args:
        take_gaps: What uses of L3 found missing since the last call. Never waits.
        stages: Pipeline stages of the server.
    """

    def __init__(self, take_gaps: Callable[[], Sequence[Gap]], stages: int) -> None:
        self._take_gaps = take_gaps
        self._on = stages == 1
        self._turns = 0
        self._nodes: dict[bytes, int] = {}  # by the key of their last page
        self._waiting: dict[bytes, _Lack] = {}
        self._last_uses: dict[str, int] = {}
        self._cache: Any = None
        self._heads: dict[bytes, int] = {}  # ends of beginnings that are to be put, by their key
        self._written: dict[bytes, None] = {}  # keys of ends of what was put, with all before it

    def last_use(self, keys: Sequence[str]) -> int | None:
        """When pages that are being put were used (ns since 1970); None: they are in use.

        Any thread.
        """
        last_uses = self._last_uses
        return min((last_uses[key] for key in keys if key in last_uses), default=None)

    def saw(self, cache: Any, node: int) -> None:
        """``node`` of the tree of ``cache`` is used, or was given to L3."""
        self._cache = cache
        text = cache.get_last_hash_value(node)
        if self._on and text is not None:
            key = key_bytes(text)
            self._nodes.pop(key, None)
            self._nodes[key] = node
            if len(self._nodes) > _NODES:
                del self._nodes[next(iter(self._nodes))]

    def wrote(self, cache: Any, node: int) -> None:
        """``node`` is on its way to L3."""
        self.saw(cache, node)
        if self._on and cache.is_write_back and len(cache.tree_components) == 1:
            found = cache.tree_core.snapshot_buffer_backup(node, False)
            if found is not None and not found.parent_is_root:
                self._heads[key_bytes(found.parent_last_hash)] = found.parent_node_id

    def put_heads(self, cache: Any) -> None:
        """HiCache has had its turn: back up what is before nodes that were written, a part of it.

        Only ``write_back`` leaves such nodes. They are still on the device.
        """
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
                return  # it was evicted meanwhile, and so written
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
        """L3 has nothing of what was put."""
        self._written.clear()
        self._heads.clear()

    def turn(self, cache: Any) -> None:
        """The scheduler has nothing to do."""
        self._turns += 1
        if not self._on or self._turns % TURNS or cache.ongoing_backup:
            return
        try:
            own = self._missing(cache)
        except Exception:
            logger.exception("hcache: pages that L3 lacks could not be looked for")
            own = {}
        for said in said_by_all_ranks(own):
            self._waiting |= said
        nodes: list[int] = []
        last_uses: dict[str, int] = {}
        while self._waiting and len(last_uses) < _PAGES:
            key = next(iter(self._waiting))
            lack = self._waiting.pop(key)
            if self._is_in_l2(cache, key):
                nodes.append(node := self._nodes[key])
                last_uses |= dict.fromkeys(cache.tree_core.get_hash_values(node), lack.time)
                metrics.PAGES.count("put_again", lack.pages)
            else:
                metrics.PAGES.count("not_put_again", lack.pages)
        self._last_uses = last_uses  # those of the turn before have been put
        for node in nodes:
            cache.write_backup_storage(node)

    def finish(self) -> None:
        """Weights are about to change: wait, not for long, until nothing is being backed up.

        SGLang ends a server whose caches cannot be flushed then, since it was idle before. Every
        rank calls it in the same turn, with the same backups under way.
        """
        cache = self._cache
        self.forget()
        if not self._on or cache is None or not _only_backs_up(cache):
            return
        if not self._backups_end(cache, time.monotonic() + _FINISH_SECONDS):
            logger.warning(
                "hcache: backups did not end in %g s: SGLang may be unable to flush its caches "
                "after this weight update, and then ends the server",
                _FINISH_SECONDS,
            )

    def stop(self, cache: Any) -> bool:
        """The server is about to end: wait, not for long, until L3 has what is queued for it, and
        with ``write_back`` all that is on the device; whether it has. As :meth:`finish`."""
        if not self._on:
            return False
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        end = time.monotonic() + _FINISH_SECONDS
        logger.info(
            "hcache: shutting down: up to %g s to write %d more nodes to L3",
            _FINISH_SECONDS,
            len(cache.ongoing_backup) + len(cache.ongoing_write_through),
        )
        ended = self._backups_end(cache, end)
        some = EvictParams(num_tokens=_PAGES * cache.page_size)
        while ended and cache.is_write_back and cache.evict(some).num_tokens_evicted:
            ended = self._backups_end(cache, end)
        if not ended:
            logger.warning(
                "hcache: %d nodes were not written to L3 within %g s of the shutdown",
                len(cache.ongoing_backup) + len(cache.ongoing_write_through),
                _FINISH_SECONDS,
            )
        return ended

    def _backups_end(self, cache: Any, end: float) -> bool:
        """Whether all backups end until ``end`` (monotonic), on all ranks."""
        while cache.ongoing_write_through or cache.ongoing_backup or self._heads:
            cache.check_hicache_events()
            goes_on = torch.tensor(time.monotonic() < end, dtype=torch.int32)
            cache._all_reduce_attn_groups(goes_on, dist.ReduceOp.MIN)
            if not goes_on:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _missing(self, cache: Any) -> dict[bytes, _Lack]:
        """Nodes in L2 that lack pages in L3, up to the first page of a sequence that both lack."""
        found: dict[bytes, _Lack] = {}
        for gap in self._take_gaps():
            ends = [place for place, key in enumerate(gap.keys) if key in self._nodes]
            for number, place in enumerate(gap.missing):
                key = next((gap.keys[end] for end in ends if end >= place), b"")
                if key not in found and not self._is_in_l2(cache, key):
                    metrics.PAGES.count("not_put_again", len(gap.missing) - number)
                    break
                pages = found[key].pages if key in found else 0
                found[key] = _Lack(gap.time, pages + 1)
        return found

    def _is_in_l2(self, cache: Any, key: bytes) -> bool:
        """Whether a node that ends with page ``key`` is known and has its pages in host memory."""
        node = self._nodes.get(key)
        if node is None:
            return False
        try:
            text = cache.get_last_hash_value(node)
        except Exception:  # what a tree raises for a node that is gone is its own affair
            text = None
        return text is not None and key_bytes(text) == key and bool(cache.is_backuped(node))


def _only_backs_up(cache: Any) -> bool:
    """Whether backups, and nothing else, keep a cache from being flushed."""
    backups = cache.ongoing_write_through or cache.ongoing_backup
    return bool(backups) and not (cache.ongoing_load_back or cache.ongoing_prefetch)
