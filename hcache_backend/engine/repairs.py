"""Pages that L3 evicted although L2 has them are put again, when the server has nothing else to do.

HiCache writes a node of its tree to L3 once. When a page of it is evicted there while the node goes
on being used, nothing behind that page can be found in L3, however often it is written.
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
        never_in_l3: Whether L3 lacks a page (by its key) because it cannot be stored there.
    """

    def __init__(
        self,
        take_gaps: Callable[[], Sequence[Gap]],
        stages: int,
        never_in_l3: Callable[[bytes], bool] = lambda _key: False,
    ) -> None:
        self._take_gaps = take_gaps
        self._never_in_l3 = never_in_l3
        self._on = stages == 1
        self._turns = 0
        self._nodes: dict[bytes, int] = {}  # by the key of their last page
        self._waiting: dict[bytes, _Lack] = {}
        self._last_uses: dict[str, int] = {}
        self._cache: Any = None

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

    def turn(self, cache: Any) -> None:
        """The scheduler has nothing to do."""
        self._turns += 1
        if not self._on or self._turns % TURNS or cache.ongoing_backup:
            return
        try:
            own = self._missing(cache)
        except Exception:
            logger.exception("hcache: what L3 lacks could not be looked for")
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
        cache, end = self._cache, time.monotonic() + _FINISH_SECONDS
        while self._on and cache is not None and _only_backs_up(cache):
            cache.check_hicache_events()
            goes_on = torch.tensor(time.monotonic() < end, dtype=torch.int32)
            cache._all_reduce_attn_groups(goes_on, dist.ReduceOp.MIN)
            if not goes_on:
                logger.warning(
                    "hcache: backups did not end in %g s: SGLang may be unable to flush its caches "
                    "after this weight update, and then ends the server",
                    _FINISH_SECONDS,
                )
                return
            time.sleep(_POLL_SECONDS)

    def _missing(self, cache: Any) -> dict[bytes, _Lack]:
        """Nodes in L2 that lack pages in L3, up to the first page of a sequence that both lack, or
        that L3 never has."""
        found: dict[bytes, _Lack] = {}
        for gap in self._take_gaps():
            ends = [place for place, key in enumerate(gap.keys) if key in self._nodes]
            for number, place in enumerate(gap.missing):
                if self._never_in_l3(gap.keys[place]):
                    break
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
