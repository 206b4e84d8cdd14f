"""Backups that HiCache would not make or not wait for: beginnings of conversations, the last ones.
A look-up ends at the first page that L3 lacks. So a node is written only if L3 has all pages before
it. HiCache gives L3 a node once. L3 may lack the pages before: they were computed before it was
attached, ``write_back`` keeps them on the device, or L3 has lost them since. Then the nodes from
the one with the first missing page on are put again, the node last."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hcache_backend import metrics
from hcache_backend.format.envelope import key_bytes
from hcache_backend.metrics import logger
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.ranks import Proposal, Turn

_PAGES = 128  # a turn puts no further node once its nodes have this many pages
_NODES = 1 << 16  # nodes that are known after the device has evicted them; the oldest are forgotten
_ANSWERS = 32  # on which the ranks agree in a turn
_LEFT_OUT = 64  # chains through a node that L3 did not take, before the next one is tried
_NONE_MISSING = 1 << 62
_FINISH_SECONDS = 10.0  # SGLang kills processes 15 s after it has asked them to stop
_POLL_SECONDS = 0.001


class _Node(NamedTuple):
    """A node of SGLang's tree, by its contents: ids are used again."""

    node_id: int
    key: bytes  # of its last page
    pages: int
    parent_id: int | None  # of the node before it; None: a sequence begins with it


class _Answer(NamedTuple):
    """The backup thread is done with an operation."""

    operation: int
    node_id: int  # of its node
    missing_page: int  # the first one before the node, which was not written; or _NONE_MISSING


class Backups:
    """Scheduler thread only, but for :attr:`missing_pages`. All ranks put the same nodes at once.
    Pipeline stages, and servers without a cache in host memory, put none, and write each node."""

    def __init__(self, stages: int, prefetches: Prefetches | None = None) -> None:
        self.enabled, self._prefetches = stages == 1, prefetches  # pipeline stages
        # Operations that wrote nothing on this rank, with the first page before theirs L3 lacks.
        self.missing_pages: dict[int, int] = {}
        self._cache: Any = None  # SGLang's radix cache
        self._given: OrderedDict[int, _Node] = OrderedDict()  # nodes queued for L3, by id
        self._answered: deque[_Answer] = deque()  # what the ranks have not agreed on yet
        self._proposal: Proposal | None = None  # missing pages of the first of those answers
        # Nodes to be written to L3 again; a chain is from the last node to the first.
        self._chains: deque[list[_Node]] = deque()
        self._chained = Counter[_Node]()  # nodes of chains, which may share some
        self._may_begin_chains = True
        self._putting: set[int] = set()  # nodes of chains that HiCache has not given to L3 yet
        self._copied: int | None = None  # the last one that was copied to host memory for that
        self._given_again: dict[int, int] = {}  # operations without an answer, by nodes of chains
        # Nodes that L3 did not take: chains to leave out.
        self._refused: OrderedDict[bytes, int] = OrderedDict()

    def note_given(self, cache: Any, node_id: int) -> None:
        """HiCache has queued a node for L3, by itself or for a chain: remember it for chains."""
        if node_id in self._putting:
            self._putting.remove(node_id)
            self._given_again[node_id] = next(reversed(cache.ongoing_backup), 0)
        node = _node_on_device(cache, node_id)
        if node is not None:
            self._given[node_id] = node
            _forget_oldest(self._given)

    def note_answers(self, cache: Any, operations: Sequence[Any]) -> None:
        """The backup thread is done with these, on every rank: their missing pages await a turn."""
        for operation in operations if self.enabled else ():
            missing_page = self.missing_pages.pop(operation.id, _NONE_MISSING)
            if operation.id in cache.ongoing_backup:
                node_id = cache.ongoing_backup[operation.id][0]
                self._answered.append(_Answer(operation.id, node_id, missing_page))

    def propose_missing_pages(self, turn: Turn) -> None:
        """Propose, for the operations that the backup thread ended first, the first page before
        each that L3 lacks on this rank."""
        self.enabled = self.enabled and turn.cache.buffer_pipeline is None
        self._cache = turn.cache
        self._proposal = None
        if self._answered:
            answers = islice(self._answered, _ANSWERS)
            self._proposal = turn.propose(*(answer.missing_page for answer in answers))

    def apply_missing_pages(self, cache: Any) -> None:
        """The ranks agreed: queue nodes from missing pages on, and give L3 some queued nodes."""
        if self._proposal is not None:
            for missing_page in self._proposal.least:
                answer = self._answered.popleft()
                again = self._given_again.get(answer.node_id) == answer.operation
                if again:
                    del self._given_again[answer.node_id]
                if missing_page != _NONE_MISSING:
                    self._begin_chain(cache, answer.node_id, missing_page, again=again)
        self._put_chains(cache)
        if not (cache.ongoing_backup or cache.ongoing_write_through or self._answered):
            self._putting.clear()  # of a tree that was flushed meanwhile
            self._given_again.clear()

    def _begin_chain(self, cache: Any, last: int, missing_page: int, *, again: bool) -> None:
        """Queue the nodes from the one with ``missing_page`` of the sequence on, up to ``last``.
        ``again``: ``last`` was queued before and L3 did not take it: it is left out for a while."""
        if not self._may_begin_chains or last in self._putting or last in self._given_again:
            return  # the last two: it was given to L3 again since then
        chain: list[_Node] = []
        node_id: int | None = last
        while node_id is not None:
            node = _node_on_device(cache, node_id) or self._given.get(node_id)
            if node is None:
                metrics.PAGES.count("heads_not_put", sum(node.pages for node in chain[1:]))
                return  # the device has evicted it, and it is not remembered
            chain.append(node)
            node_id = node.parent_id
        start = 0
        while start + chain[-1].pages <= missing_page and len(chain) > 1:
            start += chain.pop().pages
        if again:  # its disk is full or gone, or a page before it must not be stored
            self._refused[chain[0].key] = _LEFT_OUT
            _forget_oldest(self._refused)
        refused = [node.key for node in chain if self._refused.get(node.key)]
        for key in refused:
            self._refused[key] -= 1
        if refused:
            metrics.PAGES.count("heads_not_put", sum(node.pages for node in chain[1:]))
        elif not self._chained[chain[0]]:
            self._chains.append(chain)
            self._chained.update(chain)

    def _put_chains(self, cache: Any) -> None:
        """Give L3 nodes of chains, from the first of each on, about _PAGES pages. One that host
        memory lacks is copied there: HiCache gives it to L3 later, and others wait for that."""
        from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

        pages, copies = 0, cache.ongoing_write_through
        running = copies.values() if self._chains else ()
        copying = {node_id for copy in running for node_id in copy.publish_node_ids}
        while self._chains and pages < _PAGES:
            chain = self._chains[0]
            node, in_tree = chain[-1], _tree_has(cache, chain[-1])
            if in_tree and cache.is_backuped(node.node_id):
                # A state or a window of the node may be on its way to host memory, too.
                if self._copied in copies or node.node_id in copying:
                    return
                self._putting.add(node.node_id)
                cache.write_backup_storage(node.node_id)
            elif in_tree and cache._execute_and_commit_kv_backup(BackupKV([node.node_id])):
                self._copied = node.node_id
                self._putting.add(node.node_id)
            else:
                metrics.PAGES.count("heads_not_put", sum(other.pages for other in chain[1:]))
                self._chained.subtract(self._chains.popleft())
                continue
            pages += node.pages
            self._chained.subtract((chain.pop(),))
            if chain:
                metrics.PAGES.count("heads_put", node.pages)
            else:
                self._chains.popleft()
        if not self._chains:
            self._chained.clear()

    def forget(self) -> None:
        """L3 is emptied, or the weights change: no node that was known is written again."""
        self._given.clear()
        self._answered.clear()
        self._chains.clear()
        self._chained.clear()
        self._putting.clear()
        self._given_again.clear()
        self._refused.clear()

    def finish(self) -> None:
        """Wait a limited time for backups, before weights change or the GPU's memory is released:
        SGLang ends a server whose caches cannot be flushed then. For that finished requests leave
        their batches now, not in the next turn. Every rank calls it in the same turn."""
        cache, scheduler = self._cache, self._prefetches and self._prefetches.scheduler
        self.forget()
        for batch in (scheduler.running_batch, scheduler.last_batch) if scheduler else ():
            if batch is not None and all(req.finished() for req in batch.reqs):
                batch.filter_batch()
        if not self.enabled or cache is None or cache.ongoing_load_back or cache.ongoing_prefetch:
            return
        self._may_begin_chains = False  # they would be of weights that are about to leave
        ended = self._backups_end(cache, time.monotonic() + _FINISH_SECONDS)
        self._may_begin_chains = True
        if not ended:
            logger.warning(
                f"hcache: backups did not end in {_FINISH_SECONDS:g} s: SGLang may be unable to "
                "flush its caches now, and then ends the server"
            )

    def stop(self, cache: Any) -> bool:
        """Before the end of the server, wait like :meth:`finish` until L3 has all that is queued,
        and with ``write_back`` all that is on the device. Returns True if it has."""
        if not self.enabled:
            return False
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        def nodes() -> int:
            return len(cache.ongoing_backup) + len(cache.ongoing_write_through)

        end = time.monotonic() + _FINISH_SECONDS
        within = "hcache: shutting down: up to %g s to write %d more nodes to L3"
        logger.info(within, _FINISH_SECONDS, nodes())
        ended = self._backups_end(cache, end)
        batch = EvictParams(num_tokens=_PAGES * cache.page_size)
        while ended and cache.is_write_back and cache.evict(batch).num_tokens_evicted:
            ended = self._backups_end(cache, end)
        if not ended:
            late = "hcache: %d nodes were not written to L3 within %g s of the shutdown"
            logger.warning(late, nodes(), _FINISH_SECONDS)
        return ended

    def _backups_end(self, cache: Any, end: float) -> bool:
        """Run turns until no backup is left; False if that lasts till ``end`` (monotonic)."""
        while cache.ongoing_write_through or cache.ongoing_backup or self._answered or self._chains:
            cache.check_hicache_events()
            goes_on = torch.tensor(time.monotonic() < end, dtype=torch.int32)
            cache._all_reduce_attn_groups(goes_on, dist.ReduceOp.MIN)
            if not goes_on:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _forget_oldest(known: OrderedDict[Any, Any]) -> None:
    if len(known) > _NODES:
        known.popitem(last=False)


def _node_on_device(cache: Any, node_id: int) -> _Node | None:
    """What is known of a node of SGLang's tree; None if the device has no K and V of it."""
    snapshot = cache.tree_core.snapshot_buffer_backup(node_id, False)
    if snapshot is None:
        return None
    parent_id = None if snapshot.parent_is_root else snapshot.parent_node_id
    return _Node(node_id, key_bytes(snapshot.hash_values[-1]), len(snapshot.hash_values), parent_id)


def _tree_has(cache: Any, node: _Node) -> bool:
    """False if SGLang's tree has lost ``node``, or uses its id for another node."""
    try:
        keys = cache.tree_core.get_hash_values(node.node_id)
    except Exception:  # the two trees raise errors of their own
        return False
    return bool(keys) and key_bytes(keys[-1]) == node.key
