"""HiCache's controller over own pages: backup, load and storage transfers.

A page gets its header when it goes to L3, and counts as a hit only when that proves it is the
wanted one, whatever storage backend brought it. Loads become restores, eager ones too.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import streams
from hcache_backend.arena import Ids
from hcache_backend.config import ConfigError
from hcache_backend.engine import metrics
from hcache_backend.engine.eager_loads import EagerLoads, token_array
from hcache_backend.engine.hits.costs import Recomputing
from hcache_backend.engine.hits.hooks import note_arrival, note_waiting
from hcache_backend.engine.hits.start import stop_judging
from hcache_backend.engine.hooks import READS, guarded
from hcache_backend.engine.host_pool import OwnPagesPool
from hcache_backend.engine.loads import LoadQueue, Prefix, QueuedLoad, TokenIds
from hcache_backend.engine.ranks import smallest
from hcache_backend.engine.read_batches import BackAck, BatchedReads
from hcache_backend.engine.runtime import Runtime, current
from hcache_backend.page import Bytes, Ints, key_bytes
from hcache_backend.restore.eager import batch_pages
from hcache_backend.restore.meeting import Meeting, meeting_of

logger = logging.getLogger("hcache")


class OwnPagesController(HybridCacheController, ABC):
    """Backup, load and storage transfers of own pages.

    ``write``, ``load`` and ``write_storage`` run on the scheduler thread; ``_page_*`` in HiCache's
    storage threads.
    """

    def use_own_pages(
        self, runtime: Runtime, pool: OwnPagesPool, loads: LoadQueue, eager: EagerLoads | None
    ) -> None:
        """Give the controller what it works with; called once, before the first request."""
        self._runtime = runtime
        self._pool = pool
        self._loads = loads
        self.governor = loads.governor
        self.eager = eager
        self._batches: BatchedReads | None = None
        if eager is not None:
            self._batches = BatchedReads(self.page_size, self._report, partial(note_waiting, self))
        self._prefix: Prefix = _unknown
        self._token_ids: TokenIds = _unknown
        self._never_loaded = False  # what is to be evicted
        self.plain_prompt = False  # whether token ids say all of what is being received

    def attach_storage_backend(self, storage_backend: str, *args: Any, **kwargs: Any) -> None:
        # SGLang's own zero-copy backends name two values a page, for K and V: they get halves.
        pool = self.mem_pool_host.anchor_entry.host_pool  # also while SGLang constructs us
        pool.pieces_per_page = 1 if storage_backend == "dynamic" else 2
        super().attach_storage_backend(storage_backend, *args, **kwargs)
        if self._storage_verifies():
            return
        try:
            for judge in current().on_other_l3:
                judge(storage_backend)
        except ConfigError:  # on every rank
            self.detach_storage_backend()
            raise

    def detach_storage_backend(self) -> None:
        super().detach_storage_backend()
        stop_judging(current())

    def reset(self) -> None:
        super().reset()
        self._loads.forget()
        if self.eager is not None:
            self.eager.give_back()

    def turn(self, cache: Any) -> None:
        """HiCache's turn on the scheduler thread; ``cache`` is its radix cache."""
        self.governor.look()
        if self.eager is not None:
            self.eager.turn(cache)
        if self._never_loaded:
            # A node whose load is refused stays a hit for HiCache: a miss for ever, which hides
            # what L3 has. It has no way to remove one node, so all go that are in L2 only.
            cache.evict_host(self._pool.size)
            self._never_loaded = False

    # ---- indices ----

    # Our tables are on the CPU: SGLang would send host indices to the device and we read them back.

    def _move_op_indices(self, op: Any) -> Any:
        return op.host_indices, op.device_indices, op.pool_transfers

    def _move_write_operation(self, op: Any) -> Any:
        return self._move_op_indices(op)

    # ---- device -> host ----

    def start_writing(self) -> None:
        if self.write_queue:
            # HiCache backs a page up as soon as the step that fills its last slot is launched, and
            # waits only for what SGLang's read barrier lets through: with decode graphs that is
            # published before the step has written. (Plain HiCache copies in the same order.)
            self.after_forwards(streams.of(self.l2_transfer_engine.device_to_host_stream))
        super().start_writing()

    def after_forwards(self, stream: streams.Stream) -> None:
        """Let a stream of transfers wait for the forward passes that were launched."""
        stream.wait(streams.current_stream(self.device).record())
        if self.load_fence_stream is not None:  # the forward passes' own, once SGLang is set up
            stream.wait(streams.of(self.load_fence_stream).record())

    def _not_backed_up(self, problem: str, tokens: int) -> None:
        metrics.TOKENS.count(f"not_backed_up_{problem.replace(' ', '_')}", tokens)
        logger.debug("hcache: %d tokens not backed up: %s", tokens, problem)

    # ---- host -> device ----

    @contextmanager
    def loading_behind(self, prefix: Prefix, token_ids: TokenIds) -> Iterator[None]:
        """What is loaded within the block follows the tokens in the slots that ``prefix`` gives;
        ``token_ids`` gives the ids of these and of its own."""
        self._prefix, self._token_ids = prefix, token_ids
        try:
            yield
        finally:
            self._prefix = self._token_ids = _unknown

    def load(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Load nodes, or return None (a miss): the device is full, or they cannot be loaded."""
        host_pages = self._pool.page_ids(host_indices)
        ask = partial(super().load, host_indices, *args, **kwargs)
        if not len(host_pages):
            return ask()
        load = self._planned(host_pages)
        if load is None:
            return None
        device_indices = ask() if self.eager is None else self.eager.load(load, ask)
        if device_indices is not None:
            self._queued(load, device_indices)
        return device_indices

    @abstractmethod
    def _planned(self, host_pages: Ids) -> QueuedLoad | None:
        """A load of ``host_pages`` (int64 ``[pages]``); None: a miss, on every rank."""

    def _depths(self, host_pages: Ids) -> Ids | None:
        """How many layers of each of ``host_pages`` (int64 ``[p]``) a rank lacks, none or all:
        int64 ``[p]``, the same on all ranks. None: of a page that is not known yet.

        What was prepared for a load is there.
        """
        own = self._own_depths(host_pages)
        if self.eager is not None:
            own[self.eager.prepared(host_pages)] = 0
        depths = -np.array(smallest(self.tp_group, *(-own).tolist()), dtype=np.int64)
        return None if (depths > self._pool.layer_num).any() else depths

    def _own_depths(self, host_pages: Ids) -> Ids:
        """The same on this rank, but for what is prepared; more than the number of layers of pages
        that are not known yet."""
        self._pool.settle()
        depths = self._pool.arena.lost(host_pages) * np.int64(self._pool.layer_num)
        settled = [self._pool.settled(page) for page in host_pages.tolist()]
        depths[~np.array(settled, np.bool_)] = self._pool.layer_num + 1
        return depths

    def _queued(self, load: QueuedLoad, device_indices: torch.Tensor) -> None:
        """SGLang queued ``load``, to slots ``device_indices`` (int64 ``[n]``, on the device)."""
        self._loads.add(load, device_indices)

    # ---- host -> storage ----

    def write_storage(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.eager is not None:
            self.eager.until_saved(self._pool.page_ids(host_indices))
        self._pool.settle()
        return super().write_storage(host_indices, *args, **kwargs)

    def _page_backup(self, operation: Any) -> Any:
        sealed = 0
        with metrics.harmless("backup", "pages of a node are not stored"):  # a thread of SGLang's
            sealed = self._seal(operation)
        operation.hash_value = operation.hash_value[:sealed]
        return super()._page_backup(operation)

    def _seal(self, operation: Any) -> int:
        """Seal the first pages of a node; how many, before one that must not be stored."""
        arena, layout, size = self._pool.arena, self._pool.page_layout, self.page_size
        host_pages = self._pool.page_ids(operation.host_indices)
        arena.host_access(arena.physical(host_pages), write=True, header=True)
        tokens, before = token_array(operation.token_ids), operation.prefix_keys
        first = None if before is None else len(before) * size
        pages = zip(operation.hash_value, arena.pages(host_pages), strict=False)
        for i, (key, page) in enumerate(pages):
            own = tokens[i * size : (i + 1) * size]
            at = None if first is None else first + i * size
            problem: str | None = "page_with_lost_layers"
            if not arena.lost(host_pages[i : i + 1]).any():
                problem = self._finish_header(page, own, at)
            if problem is not None:
                metrics.PROBLEMS.count(problem)
                if "other" in problem:
                    logger.warning("hcache: %s: not stored", problem.replace("_", " "))
                return i
            layout.seal(page, key_bytes(key))
        return len(host_pages)

    @abstractmethod
    def _finish_header(self, page: Bytes, token_ids: Ints, position: int | None) -> str | None:
        """See to the header of a page (uint8 ``[page_bytes]``) but for its seal.

        Args:
            token_ids: The page's tokens as the radix tree knows them, int32 ``[page_size]``.
            position: The first token's place in its sequence; None: nobody knows.

        Returns:
            Why the page must not be stored, or None.
        """

    # ---- storage -> host ----

    def pages_per_report(self, pages: int) -> int:
        """How many pages of a prefetch of ``pages`` pages SGLang is told of together."""
        return min(pages, STORAGE_BATCH_SIZE) if self._batches is None else batch_pages(pages)

    def _report(self, ack: PrefetchAck) -> None:
        self.prefetch_sync_queue.put(ack)

    def prefetch(self, *args: Any, **kwargs: Any) -> Any:
        operation = super().prefetch(*args, **kwargs)
        # Before the scheduler hears what L3 has: nothing is read earlier.
        if self.recomputing is not None:
            operation.hcache_meeting = Meeting()
        return operation

    @property
    def recomputing(self) -> Recomputing | None:
        """How long it takes what recomputes the front of a prefetch that begins now; None: it is
        read in order. The same of the two on all ranks."""
        store = self.page_get_func == self._page_get_zero_copy and self.storage_backend
        alike = getattr(store, "reads_any_page_alike", False)
        if not alike or not self.plain_prompt or self.eager is None:
            return None
        return self.eager.seconds_to_recompute if self.eager.recomputes_pages else None

    def _page_transfer(self, operation: Any) -> Any:
        transfer = partial(super()._page_transfer, operation)
        if self._batches is None or self.page_get_func != self._page_get_zero_copy:
            return transfer()
        if meeting_of(operation) is not None:
            return guarded(READS)(OwnPagesController.transfer_from_back, self, operation)
        return self._batches.transfer(operation, transfer)

    def transfer_from_back(self, operation: Any) -> None:
        """Read a prefetch from its last page on, until that meets what is recomputed."""
        meeting = meeting_of(operation)
        assert meeting is not None and self._batches is not None and self.eager is not None
        self._read_drafts(operation)
        self._batches.transfer_from_back(self._read_pages, operation, meeting, self.eager.until_met)
        self._page_transfer_sidecar(operation, 0)  # SGLang's report of other pools

    def _read_drafts(self, operation: Any) -> None:
        """Read the draft model's pages of a whole hit: K and V of its front are recomputed, theirs
        are not. A page that is not there costs accepted drafts, and no token."""
        keys, before = operation.hash_value, list(operation.prefix_keys or ())
        pools = [
            transfer.name
            for transfer in operation.pool_transfers or ()
            if transfer.indices_from_pool == PoolName.KV
        ]
        for start in range(0, len(keys) if pools else 0, STORAGE_BATCH_SIZE):
            if operation.is_terminated():
                break
            some = keys[start : start + STORAGE_BATCH_SIZE]
            tokens = slice(start * self.page_size, (start + len(some)) * self.page_size)
            here = operation.host_indices[tokens]
            self.storage_backend.batch_get_v2(
                [PoolTransfer(name=pool, host_indices=here, keys=some) for pool in pools],
                extra_info=HiCacheStorageExtraInfo(prefix_keys=before + keys[:start]),
            )

    def _reduce_prefetch_ack(self, ack: PrefetchAck) -> None:
        super()._reduce_prefetch_ack(ack)
        if isinstance(ack, BackAck):
            ack.reduce(partial(self._all_reduce, groups=self.prefetch_completion_sync_groups))

    def _page_get_zero_copy(self, operation: Any, hash_values: Any, *args: Any) -> int:
        if self._batches is None:
            return self._read_pages(operation, hash_values, *args)
        return self._batches.read(self._read_pages, operation, hash_values, *args)

    def _read_pages(
        self, operation: Any, hash_values: Any, host_indices: torch.Tensor, *others: Any
    ) -> int:
        read = partial(super()._page_get_zero_copy, operation, hash_values, host_indices, *others)
        return self._got(read, operation, hash_values, host_indices)

    def _generic_page_get(
        self, operation: Any, hash_values: Any, host_indices: torch.Tensor, *others: Any
    ) -> int:
        read = partial(super()._generic_page_get, operation, hash_values, host_indices, *others)
        return self._got(read, operation, hash_values, host_indices)

    def _got(
        self,
        read: Callable[[], int],
        operation: Any,
        hash_values: Sequence[str],
        host_indices: torch.Tensor,
    ) -> int:
        """How many pages ``read`` has brought that are right."""
        with metrics.harmless("read", "pages of L3 are a miss"):  # a thread of SGLang's
            host_pages = self._expect(host_indices)
            proven = self._proven_pages(operation, hash_values, host_pages, read())
            note_arrival(self, proven)
            return proven
        return 0

    def _expect(self, host_indices: torch.Tensor) -> Ids:
        """L3 is about to fill these pages; int64 ``[pages]``."""
        host_pages = self._pool.page_ids(host_indices)
        self._pool.arena.expect(host_pages)
        return host_pages

    def _storage_verifies(self) -> bool:
        """Whether L3 is our own store, which verifies each unit that it reads."""
        return getattr(self.storage_backend, "verifies_segments", False)

    def _proven_pages(
        self, operation: Any, hash_values: Sequence[str], host_pages: Ids, got: int
    ) -> int:
        """How many of the first ``got`` pages are what the radix tree asked for."""
        namespace, layout = self._runtime.page_namespace(), self._pool.page_layout
        size = self.page_size
        tokens = token_array(operation.token_ids)
        # With buffer_only, `hash_value` loses pages that the device has got meanwhile.
        first = operation.all_hash_values.index(hash_values[0]) if hash_values else 0
        segments = not self._storage_verifies()
        for i, page in enumerate(self._pool.arena.pages(host_pages[:got])):
            key, start = hash_values[i], (first + i) * size
            wanted = tokens[start : start + size]
            problem = layout.problem(page, namespace, key_bytes(key), wanted, segments=segments)
            if problem is None and not self._has_known_positions(page):
                problem = "positions"
            if problem is not None:
                why = problem.replace(" ", "_")
                metrics.PROBLEMS.count(f"page_{why}")
                metrics.L3_TOKENS.count(f"refused_{why}", (got - i) * size)
                logger.warning(
                    "hcache: page %s from L3 is not the requested one (%s): counted as a miss",
                    key[:12],
                    problem,
                )
                return i
        return got

    def _has_known_positions(self, page: Bytes) -> bool:
        """Whether RoPE tables have the positions of ``page`` (uint8 ``[page_bytes]``).

        Kernels look them up there, and cannot check them without stalling the GPU.
        """
        positions = self._pool.page_layout.positions(page)
        limit = int(self._runtime.runner.model_config.context_len)
        return bool(0 <= positions.min() <= positions.max() < limit)


def _unknown() -> None:
    """:data:`Prefix` of loads that nothing is known of."""
