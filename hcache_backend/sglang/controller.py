"""HiCache's controller over own pages: backup, load and storage transfers. Loads become restores.

- A page of L3 is a hit only if its header proves that it is the wanted one, from any backend.
- If layers are captured, a node is backed up only when all of its rows are valid, by exchanging
  table entries of the arena.
- The slots of a node are in device memory, and HiCache wants its answer at once. If no row of any
  token in the KV pool was lost, a node gets host pages before the CPU knows its slots, and the
  exchange follows a few passes later. Otherwise the scheduler thread waits for the slots, behind
  the beginning of the last pass.
- If a plug-in chooses the layout of each node, its backup waits for that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import metrics, streams
from hcache_backend.arena import NOT_SETTLED, Ids
from hcache_backend.capture.ledger import Ledger, Read
from hcache_backend.capture.staging import StagedCapture
from hcache_backend.config import ConfigError
from hcache_backend.format.envelope import key_bytes
from hcache_backend.format.page import Bytes, Ints, PageLayout
from hcache_backend.host.loads import LoadQueue, Prefix, QueuedLoad, TokenIds
from hcache_backend.host.page_layout import NodeLayouts
from hcache_backend.prefetch.eager import batch_pages
from hcache_backend.prefetch.eager_loads import EagerLoads, token_array
from hcache_backend.prefetch.prefetch import Meeting, Recomputing
from hcache_backend.ranks import smallest
from hcache_backend.sglang.hook_registry import guarded
from hcache_backend.sglang.host_pool import OwnPagesPool
from hcache_backend.sglang.read_batches import BackAck, BatchedReads
from hcache_backend.sglang.runtime import Runtime, current
from hcache_backend.sglang.stage_pages import StagePages
from hcache_backend.sglang.storage_threads import READ, note_arrival, note_waiting
from hcache_backend.turn import Checks, Turn

logger = logging.getLogger("hcache")


# the next forward pass copies a node's slots to the CPU; they are known when one more began
_PASSES = 2

_STAGED_PASSES = 16  # at least as many as are under way between pipeline stages


@dataclass(eq=False)
class _Backup:
    slots: Read = field(default_factory=Read)  # of its tokens, int64 [n], if layers are captured
    valid: int = True  # all rows are there, as far as is known
    due: int = 0  # number of begun forward passes at which that, and the slots, are known
    host_pages: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # int64 [n / page_size]


class OwnPagesController(HybridCacheController):
    """``write``, ``load`` and ``write_storage`` run on the scheduler thread; ``_page_*`` in
    HiCache's storage threads."""

    def use_own_pages(
        self,
        runtime: Runtime,
        pool: OwnPagesPool,
        loads: LoadQueue,
        eager: EagerLoads | None,
        stages: StagePages,
        kv_checks: Checks,
        *,
        capture: StagedCapture | None = None,
        checks: Checks | None = None,
        pairs: NodeLayouts | None = None,
    ) -> None:
        """Give the controller its parts; called once, before the first request. ``capture`` fills
        hidden states, which ``checks`` checks; None: pages hold K and V only. ``pairs`` chooses
        the layouts of nodes."""
        self._runtime = runtime
        self._pool = pool
        self._loads = loads
        self.governor = None if eager is None else eager.governor
        self.eager = eager
        self._stages = stages
        self._kv_checks = kv_checks
        self._capture = capture
        self._checks = checks
        self._pairs = pairs
        self._tree: Any = None
        self._writing = False
        self._backups: deque[_Backup] = deque()  # as write_queue
        self._passes = 0  # of the last turn
        if capture is not None and not stages.alone:
            capture.ledger.without_results = _STAGED_PASSES
        pool.frees_duplicates = lambda: self.write_policy == "write_back"
        self._batches: BatchedReads | None = None
        if eager is not None:
            self._batches = BatchedReads(self.page_size, self._report, note_waiting)
        self._prefix: Prefix = _unknown
        self._token_ids: TokenIds = _unknown
        self._never_loaded = False  # True: host pages that no load can use are to be evicted
        self.plain_prompt = False  # token ids are all input of the request that is being received

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
        current().stop_judging()

    def reset(self) -> None:
        super().reset()
        self._loads.forget()
        if self.eager is not None:
            self.eager.give_back()
        self._backups.clear()
        self._kv_checks.forget()
        if self._checks is not None:
            self._checks.forget()
        if self._pairs is not None:
            self._pairs.forget()

    def begin_turn(self, cache: Any, turn: Turn) -> None:
        """Add our part to a scheduler's turn, after HiCache's; ``cache`` is its radix cache."""
        if self.eager is not None:
            self.eager.governor.look()
            self.eager.begin_turn(cache, turn)
        if self._pairs is not None:
            self._tree = cache.tree_core
            self._pairs.look(turn)
        if self._checks is not None:
            self._checks.ask(turn)
        self._kv_checks.ask(turn)

    def end_turn(self, cache: Any) -> None:
        """Act on the values that the ranks have agreed on."""
        if self.eager is not None:
            self.eager.end_turn()
        if self._capture is not None:
            ledger = self._capture.ledger
            if ledger.passes == self._passes and self._backups:
                # No pass was launched since the last turn: nothing is late because of a wait.
                self._finish_when_idle(ledger)
            self._passes = ledger.passes
        if self._pairs is not None and self._pairs.answered():
            self.start_writing()
        if self._checks is not None:
            self._checks.hear()
        self._kv_checks.hear()
        self._stages.talk()
        if self._never_loaded or (self._kv_checks.failed and self._stages.alone):
            # A node whose load is refused stays a hit for HiCache. It would be a miss for ever and
            # hide its copy in L3. HiCache cannot remove one node, so all that are in L2 only go.
            cache.evict_host(self._pool.size)
            self._never_loaded = False

    # ---- indices ----

    # Our tables are on the CPU: SGLang would send host indices to the device and we read them back.

    def _move_op_indices(self, op: Any) -> Any:
        return op.host_indices, op.device_indices, op.pool_transfers

    def _move_write_operation(self, op: Any) -> Any:
        return self._move_op_indices(op)

    # ---- device -> host ----

    def write(self, device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Back up a node, or return None on every rank if one of its rows is not valid. Pipeline
        stages cannot agree, so they back it up in any case."""
        self._stages.talk()
        backup = self._begun(device_indices)
        if backup is None:
            return None
        self._writing = True
        try:
            host_indices = super().write(device_indices, *args, **kwargs)
        finally:
            self._writing = False
        if host_indices is None:
            return None
        backup.host_pages = self._pool.page_ids(host_indices)
        self._pool.arena.wait_for(backup.host_pages)
        self._backups.append(backup)
        if self._pairs is not None:
            # HiCache waits for a write-back on the spot.
            tree = self._tree if self.write_policy != "write_back" else None
            self._pairs.ask(tree, self.write_queue[-1].node_ids)
        if kwargs.get("flush", True):
            self.start_writing()
        return host_indices

    def _begun(self, device_indices: torch.Tensor) -> _Backup | None:
        """A backup of tokens in these slots (int64 ``[n]``, on the device), or None."""
        problem, tokens = self._ended(), len(device_indices)
        if self._capture is None:
            if problem is None:
                return _Backup()
            self._not_backed_up(problem, tokens)
            return None
        ledger = self._capture.ledger
        backup = _Backup(due=ledger.passes + _PASSES)
        backup.valid, can_wait = self._agreed(problem is None, self._can_wait())
        if backup.valid:
            backup.slots = ledger.read(device_indices)
            if not can_wait:
                metrics.TOKENS.count("waited_for_rows", tokens)
                ledger.settle()
                problem, backup.due = self._problem(backup.slots), 0
                (backup.valid,) = self._agreed(problem is None)
        if not backup.valid:
            self._not_backed_up(problem or "another rank", tokens)
            if self._stages.alone:
                return None
            backup.due = 0  # nothing is waited for: another stage may have launched its own
        return backup

    def start_writing(self) -> None:
        """Launch the backups that are ready."""
        if self._writing:
            return  # not within ``write``: K and V must go to the pages of an exchange
        if self._capture is not None:
            self._capture.ledger.settle(wait=False)
        due = 0
        while self._backups and (layout := self._ready(self._backups[0])) is not None:
            self._launch(self._backups.popleft(), layout)
            due += 1
        later = self.write_queue[due:]
        del self.write_queue[due:]
        if self.write_queue:
            # HiCache backs a page up as soon as the step that fills its last slot is launched, and
            # waits only for what SGLang's read barrier lets through: with decode graphs that is
            # published before the step has written. (Plain HiCache copies in the same order.)
            self.after_forwards(streams.of(self.l2_transfer_engine.device_to_host_stream))
        super().start_writing()
        self.write_queue.extend(later)

    def _finish_when_idle(self, ledger: Ledger) -> None:
        ledger.settle()
        for backup in self._backups:
            backup.due = 0
        self.start_writing()

    def _ready(self, backup: _Backup) -> PageLayout | None:
        """The layout of the pages of the first backup; None if it has to wait."""
        if self._pairs is not None:
            return self._pairs.next()
        passes = 0 if self._capture is None else self._capture.ledger.passes
        return self._pool.page_layout if backup.due <= passes else None

    def _launch(self, backup: _Backup, layout: PageLayout) -> None:
        """Let HiCache copy a backup. From now on its host pages belong to its tokens."""
        arena, tokens = self._pool.arena, len(backup.host_pages) * self.page_size
        self._stages.backed_up(backup.host_pages)
        if self._capture is None:
            self._pool.divide(backup.host_pages, layout)
            metrics.TOKENS.count("backed_up", tokens)
            return
        slots = backup.slots
        if backup.valid and slots.values is None:
            self._capture.ledger.settle()  # the pass that should have copied them could not
        problem = self._problem(slots)
        if backup.valid and problem is not None:
            self._not_backed_up(problem, tokens)
        if not backup.valid or problem is not None or slots.values is None:
            arena.spoil(backup.host_pages)
            return
        metrics.TOKENS.count("backed_up", tokens)
        self._capture.back_up(slots.values, backup.host_pages)

    def _can_wait(self) -> bool:
        """True if a node may get host pages before its rows are known to be valid. False if HiCache
        needs a backup at once, between pipeline stages, whose passes begin at different times, and
        while tokens of other weights, whose rows are void, may be cached."""
        assert self._capture is not None
        weights = self._runtime.weights
        flushed = weights is not None and weights.suspended is None
        fine = flushed and self._capture.ledger.none_lost
        return fine and self._stages.alone and self.write_policy != "write_back"

    def _ended(self) -> str | None:
        """Reason why nothing is backed up any more, or None."""
        if self._capture is None:
            failed = self._kv_checks.failed and self._stages.alone
            return "self-check failed" if failed else None
        if self._runtime.distrust is not None:
            return "self-check failed"
        return "capture broke" if self._capture.ledger.broken is not None else None

    def _problem(self, slots: Read) -> str | None:
        """Reason why a node in ``slots`` cannot be backed up, or None."""
        assert self._capture is not None
        ended = self._ended()
        if ended is not None or slots.values is None:
            return ended or "capture broke"
        return self._pool.arena.problem(slots.values)

    def _agreed(self, *fine: int) -> list[int]:
        """Smallest values over all ranks; at most 0 if a rank lost its trust: then this one does,
        too."""
        *agreed, trusted = smallest(self.tp_group, *fine, self._trusted)
        if not trusted and self._capture is not None:
            self._runtime.lose_trust("another tensor-parallel rank failed its self-check")
        return [one if trusted else min(one, 0) for one in agreed]

    @property
    def _trusted(self) -> bool:
        """True if this rank may load pages; those of K and V need nothing from the model."""
        if self._capture is None and self._stages.alone:
            return not self._kv_checks.failed
        return self._runtime.distrust is None

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
        """Loads within the block follow the tokens whose slots ``prefix`` gives. ``token_ids``
        gives the ids of these tokens and of the loaded ones."""
        self._prefix, self._token_ids = prefix, token_ids
        try:
            yield
        finally:
            self._prefix = self._token_ids = _unknown

    def load(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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

    def _planned(self, host_pages: Ids) -> QueuedLoad | None:
        """A load of ``host_pages`` (int64 ``[pages]``), or None: a miss on every rank. A page may
        be of other weights, or lack layers that cannot be recomputed."""
        layers, problem, load = self._pool.layer_num, None, None
        own = self._depths(host_pages)
        self._stages.talk()
        if (own == NOT_SETTLED).any():
            problem = "unsettled"
        elif not self._may_project(host_pages):
            problem = "stale_host_page"
        elif not self._stages.have(host_pages):
            problem = "another_stage"
        depths = np.where(own == NOT_SETTLED, layers + 1, own)
        told = (-depths).tolist()
        *told, fine, may_come = self._agreed(*told, problem is None, problem != "stale_host_page")
        if fine:
            depths = -np.array(told, np.int64)
            load = self._loads.plan(host_pages, depths, self._prefix, self._token_ids)
            if depths.any() or self._loads.stored_from:
                # Which tokens are recomputed stands in the headers of each rank.
                [fine] = smallest(self.tp_group, load is not None)
                may_come = fine
            if not fine:
                problem = "layers_not_recomputable"
        if problem in ("stale_host_page", "layers_not_recomputable"):
            metrics.PROBLEMS.count(problem)
        if not self._stages.decide(bool(fine)):
            tokens = len(host_pages) * self.page_size
            metrics.TOKENS.count(f"not_restored_{problem or 'another_rank'}", tokens)
            if self._stages.alone:  # stages could not do it at one point
                self._never_loaded |= not may_come
            return None
        if not fine:  # the first stage knew that it is: a mistake of ours
            self._runtime.lose_trust("a page is not what the first pipeline stage took it for")
        return load or QueuedLoad(host_pages)

    def _depths(self, host_pages: Ids) -> Ids:
        """Depths of ``host_pages`` on this rank, int64 ``[p]`` each; 0 if prepared for a load."""
        if self._capture is not None:
            self._capture.ledger.settle(wait=False)
        depths = self._pool.depth(host_pages)
        if self.eager is not None:
            depths[self.eager.prepared(host_pages)] = 0
        return depths

    def _may_project(self, host_pages: Ids) -> bool:
        """True if all captured pages are of the present weights, and have positions of RoPE."""
        if self._capture is None or self._runtime.distrust is not None:
            return self._capture is None
        if self.eager is not None:
            host_pages = host_pages[~self.eager.prepared(host_pages)]
        namespaces, layout = self._runtime.page_namespaces(), self._pool.page_layout
        return all(
            layout.namespace_of(page) in namespaces and self._has_known_positions(page)
            for page in self._pool.arena.pages(host_pages, header=True)
        )

    def _queued(self, load: QueuedLoad, device_indices: torch.Tensor) -> None:
        if self._capture is not None:
            self._capture.ledger.loaded(device_indices, load.host_pages)
        self._loads.add(load, device_indices)

    # ---- host -> storage ----

    def write_storage(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._capture is not None:  # the backup is done, so its rows have arrived
            self._capture.ledger.settle(wait=False)
        self._stages.talk()
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
        """Seal the first pages of a node, up to one that must not be stored; returns how many."""
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
            if arena.depth(host_pages[i : i + 1])[0] <= 0:
                problem = self._finish_header(page, own, at)
            if problem is not None:
                metrics.PROBLEMS.count(problem)
                if "other" in problem:
                    logger.warning("hcache: %s: not stored", problem.replace("_", " "))
                return i
            layout.seal(page, key_bytes(key))
        return len(host_pages)

    def _finish_header(self, page: Bytes, token_ids: Ints, position: int | None) -> str | None:
        """Complete the header of a page (uint8 ``[page_bytes]``) except its seal. Returns the
        reason why the page must not be stored, or None. ``token_ids``: as in the radix tree, int32
        ``[page_size]``. ``position``: of the first token in its sequence."""
        if self._capture is not None:  # it was written when the page's rows were proven
            return self._header_problem(page, token_ids)
        layout, weights = self._pool.page_layout.of(page), self._runtime.weights
        if layout is None:
            return "page_of_another_form"
        if weights is None or weights.suspended is not None:
            return "page_of_other_weights"
        if position is None:
            return "page_without_position"
        layout.begin(page, self._runtime.page_namespace(weights), self._runtime.writer)
        layout.positions(page)[:] = np.arange(position, position + self.page_size)
        layout.token_ids(page)[:] = token_ids
        return None

    def _header_problem(self, page: Bytes, token_ids: Ints) -> str | None:
        layout = self._pool.page_layout
        if self._runtime.distrust is not None:
            return "page_of_distrust"
        if not layout.is_stamped(page):
            return "page_with_lost_rows"
        if layout.namespace_of(page) != self._runtime.page_namespace():
            return "host_page_of_other_namespace"
        if not np.array_equal(layout.token_ids(page), token_ids):
            return "host_page_of_other_tokens"
        return None

    # ---- storage -> host ----

    def pages_per_report(self, pages: int) -> int:
        """Number of pages that are reported to SGLang together in a prefetch of ``pages``."""
        return min(pages, STORAGE_BATCH_SIZE) if self._batches is None else batch_pages(pages)

    def _report(self, ack: PrefetchAck) -> None:
        self.prefetch_sync_queue.put(ack)

    def prefetch(self, *args: Any, **kwargs: Any) -> Any:
        operation = super().prefetch(*args, **kwargs)
        # Before the scheduler hears of the hit: nothing is read earlier.
        if self.recomputing is not None:
            self._runtime.prefetches.of(operation).meeting = Meeting()
        return operation

    @property
    def recomputing(self) -> Recomputing | None:
        """Estimate of the time to recompute the front of a prefetch that begins now; None if it is
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
        if self._runtime.prefetches.of(operation).meeting is not None:
            return guarded(READ)(OwnPagesController.transfer_from_back, self, operation)
        return self._batches.transfer(operation, transfer)

    def transfer_from_back(self, operation: Any) -> None:
        """Read a prefetch from its last page to the front that is recomputed."""
        meeting = self._runtime.prefetches.of(operation).meeting
        assert meeting is not None and self._batches is not None and self.eager is not None
        self._read_drafts(operation)
        self._batches.transfer_from_back(self._read_pages, operation, meeting, self.eager.until_met)
        self._page_transfer_sidecar(operation, 0)  # SGLang's report of other pools

    def _read_drafts(self, operation: Any) -> None:
        """Read the draft model's pages of a whole hit: the recomputed front has no K and V of the
        draft. A missing page costs accepted drafts, and no token."""
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
        with metrics.harmless("read", "pages of L3 are a miss"):  # a thread of SGLang's
            host_pages = self._expect(host_indices)
            proven = self._proven_pages(operation, hash_values, host_pages, read())
            note_arrival(self, proven)
            return proven
        return 0

    def _expect(self, host_indices: torch.Tensor) -> Ids:
        """Host pages that L3 is about to fill, int64 ``[pages]``."""
        host_pages = self._pool.page_ids(host_indices)
        self._pool.arena.expect(host_pages)
        self._stages.brought(host_pages)
        return host_pages

    def _storage_verifies(self) -> bool:
        return getattr(self.storage_backend, "verifies_segments", False)

    def _proven_pages(
        self, operation: Any, hash_values: Sequence[str], host_pages: Ids, got: int
    ) -> int:
        """Number of the first ``got`` pages that are those the radix tree asked for."""
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
        """True if RoPE tables have the positions of ``page`` (uint8 ``[page_bytes]``). Kernels look
        them up there, and cannot check them without stalling the GPU."""
        positions = self._pool.page_layout.positions(page)
        limit = int(self._runtime.runner.model_config.context_len)
        return bool(0 <= positions.min() <= positions.max() < limit)


def _unknown() -> None:
    """:data:`Prefix` of loads without a known one."""
