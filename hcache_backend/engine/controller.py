"""HiCache's controller, with the rules that hidden-state pages need.

A node is backed up only when every row of it is valid, by exchanging table entries of the arena; a
page counts as a hit only when its header proves it is the wanted one, whatever storage backend
brought it; and no page of other weights is ever projected. How many of the first layers are
recomputed is decided before pages are read, so that their segments are not, and again at the load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import streams
from hcache_backend.capture.arena import Ids
from hcache_backend.capture.staging import StagedCapture
from hcache_backend.engine import metrics
from hcache_backend.engine.eager_loads import EagerLoads
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.loads import LoadQueue, Prefix, QueuedLoad
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.read_batches import BatchedReads
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.service_check import ServiceChecks
from hcache_backend.engine.stage_pages import StagePages
from hcache_backend.page import key_bytes
from hcache_backend.streams import StreamFailed

logger = logging.getLogger("hcache")


class HiddenStateController(HybridCacheController):
    """Backup, load and storage transfers of hidden-state pages.

    ``write``, ``load`` and ``write_storage`` run on the scheduler thread; ``_page_*`` in HiCache's
    storage threads.
    """

    def use_hidden_states(
        self,
        runtime: Runtime,
        pool: HiddenStatePool,
        capture: StagedCapture,
        checks: ServiceChecks,
        loads: LoadQueue,
        stages: StagePages,
        eager: EagerLoads | None,
    ) -> None:
        """Give the controller what it works with; called once, before the first request."""
        self._runtime = runtime
        self._pool = pool
        self._capture = capture
        self._checks = checks
        self._loads = loads
        self._stages = stages
        self.eager = eager
        self._batches: BatchedReads | None = None
        if eager is not None:
            self._batches = BatchedReads(self.page_size, self._report)
        self._prefix: Prefix = _unknown
        self._writing = False

    def attach_storage_backend(self, storage_backend: str, *args: Any, **kwargs: Any) -> None:
        # SGLang's own zero-copy backends name two values a page, for K and V: they get halves.
        pool = self.mem_pool_host.anchor_entry.host_pool  # also while SGLang constructs us
        pool.pieces_per_page = 1 if storage_backend == "dynamic" else 2
        super().attach_storage_backend(storage_backend, *args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self._loads.forget()
        self._checks.forget_chosen()
        if self.eager is not None:
            self.eager.give_back()

    # ---- indices ----

    # Our tables are on the CPU: SGLang would send host indices to the device and we read them back.

    def _move_op_indices(self, op: Any) -> Any:
        return op.host_indices, op.device_indices, op.pool_transfers

    def _move_write_operation(self, op: Any) -> Any:
        return op.host_indices, op.device_indices, op.pool_transfers

    # ---- device -> host ----

    def write(self, device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Back up a node, or return None on every rank when a row of it is not valid.

        Pipeline stages cannot agree: they back it up whether its rows are valid or not.
        """
        self._checks.run_due()
        self._stages.talk()
        slots, problem = self._slots_to_write(device_indices)
        valid = self._agreed(problem is None)
        if not valid:
            self._not_backed_up(problem or "another rank", len(device_indices))
            if self._stages.alone:
                return None
        self._writing = True
        try:
            host_indices = super().write(device_indices, *args, **kwargs)
        finally:
            self._writing = False
        if host_indices is None:
            self._not_backed_up("host pool full", len(device_indices))
            return None
        host_pages = self._pool.page_ids(host_indices)
        if valid:
            self._capture.back_up(slots, host_pages)
            self._checks.choose(device_indices, slots, host_pages)
            metrics.TOKENS.count("backed_up", len(slots))
        self._stages.backed_up(host_pages, whole=valid)
        if kwargs.get("flush", True):
            self.start_writing()
        return host_indices

    def start_writing(self) -> None:
        if self._writing:
            return  # not within ``write``: K and V must go where the exchange puts them
        if self._pool.holds_kv:
            # HiCache backs a page up as soon as the step that fills its last slot is launched, and
            # waits only for what SGLang's read barrier lets through: with decode graphs that is
            # published before the step has written. (Plain HiCache copies in the same order.)
            self.after_forwards(streams.of(self.l2_transfer_engine.device_to_host_stream))
        super().start_writing()
        self._checks.backups_launched()

    def after_forwards(self, stream: streams.Stream) -> None:
        """Let a stream of transfers wait for the forward passes that were launched."""
        stream.wait(streams.current_stream(self._capture.device).record())
        if self.load_fence_stream is not None:  # the forward passes' own, once SGLang is set up
            stream.wait(streams.of(self.load_fence_stream).record())

    def _slots_to_write(self, device_indices: torch.Tensor) -> tuple[Ids, str | None]:
        """Slots of a node, and why it cannot be backed up."""
        if self._runtime.distrust is not None:
            return np.empty(0, np.int64), "self-check failed"
        try:
            slots = self._capture.ledger.slots_on_cpu(device_indices)
        except StreamFailed:
            return np.empty(0, np.int64), "capture broke"
        self._capture.ledger.settle()
        if self._capture.ledger.broken is not None:
            return slots, "capture broke"
        return slots, self._capture.arena.problem(slots)

    def _not_backed_up(self, problem: str, tokens: int) -> None:
        metrics.TOKENS.count(f"not_backed_up_{problem.replace(' ', '_')}", tokens)
        logger.debug("hcache: %d tokens not backed up: %s", tokens, problem)

    def _agreed(self, fine: bool) -> bool:
        """Whether all ranks say so; a rank that lost its trust takes the others with it."""
        fine, trusted = on_all_ranks(self.tp_group, fine, self._runtime.distrust is None)
        if not trusted:
            self._runtime.lose_trust("another tensor-parallel rank failed its self-check")
        return fine and trusted

    # ---- host -> device ----

    @contextmanager
    def loading_behind(self, prefix: Prefix) -> Iterator[None]:
        """What is loaded within the block follows the tokens in the slots that ``prefix`` gives."""
        self._prefix = prefix
        try:
            yield
        finally:
            self._prefix = _unknown

    def load(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Load nodes, or return None (a miss) when a page cannot be restored.

        It may be one of other weights, or lack segments of layers that cannot be recomputed.
        """
        host_pages = self._pool.page_ids(host_indices)
        load, problem = QueuedLoad(host_pages), None
        if not self._may_project(host_pages):
            problem = "stale_host_page"
            metrics.PROBLEMS.count(problem)
        elif len(host_pages):
            planned = self._loads.plan(host_pages, self._prefix)
            if planned is None:
                problem = "layers_not_recomputable"
                metrics.PROBLEMS.count(problem)
            load = planned or load
        self._stages.talk()
        if not self._stages.have(host_pages):
            problem = "another_stage"
        fine = self._agreed(problem is None)
        if not self._stages.decide(fine):
            metrics.TOKENS.count(f"not_restored_{problem or 'another_rank'}", len(host_indices))
            return None
        if not fine:  # the first stage knew that it is: a mistake of ours
            self._runtime.lose_trust("a page is not what the first pipeline stage took it for")
        ask = partial(super().load, host_indices, *args, **kwargs)
        if not len(host_pages):
            return ask()
        device_indices = ask() if self.eager is None else self.eager.load(load, ask)
        if device_indices is not None:
            self._capture.ledger.loaded(device_indices, host_pages)
            self._loads.add(load, device_indices)
        return device_indices

    def _may_project(self, host_pages: Ids) -> bool:
        self._capture.ledger.settle(wait=False)
        if self._runtime.distrust is not None:
            return False
        namespaces, layout = self._runtime.page_namespaces(), self._pool.page_layout
        return all(
            layout.namespace_of(page) in namespaces and self._has_known_positions(page)
            for page in self._pool.arena.pages(host_pages, header=True)
        )

    def _has_known_positions(self, page: np.ndarray) -> bool:
        """Whether RoPE tables have the positions of ``page`` (uint8 ``[page_bytes]``).

        Kernels look them up there, and cannot check them without stalling the GPU.
        """
        positions = self._pool.page_layout.positions(page)
        limit = int(self._runtime.runner.model_config.context_len)
        return bool(0 <= positions.min() <= positions.max() < limit)

    # ---- host -> storage ----

    def write_storage(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The backup is done, so its rows have arrived: check, and pass it on to L3."""
        self._capture.ledger.settle()
        self._checks.run_until(self._pool.page_ids(host_indices))
        self._stages.talk()
        return super().write_storage(host_indices, *args, **kwargs)

    def _page_backup(self, operation: Any) -> Any:
        """Seal the pages of a node; the first one that must not be stored ends the backup."""
        if self._runtime.distrust is not None:
            operation.hash_value = []
        arena, layout = self._pool.arena, self._pool.page_layout
        host_pages = self._pool.page_ids(operation.host_indices)
        tokens, size = _token_array(operation.token_ids), self.page_size
        namespace = self._runtime.page_namespace()
        incomplete = arena.first_layers(host_pages) > 0
        pages = zip(operation.hash_value, arena.pages(host_pages), strict=False)
        for i, (key, page) in enumerate(pages):
            wanted = tokens[i * size : (i + 1) * size]
            if incomplete[i]:
                problem = "page_with_lost_first_layers"
            elif not layout.is_stamped(page):
                problem = "page_with_lost_rows"
            elif layout.namespace_of(page) != namespace:
                problem = "host_page_of_other_namespace"
            elif not np.array_equal(layout.token_ids(page), wanted):
                problem = "host_page_of_other_tokens"
            else:
                layout.seal(page, key_bytes(key))
                continue
            metrics.PROBLEMS.count(problem)
            if "other" in problem:
                logger.warning("hcache: %s: not stored", problem.replace("_", " "))
            operation.hash_value = operation.hash_value[:i]
            break
        return super()._page_backup(operation)

    # ---- storage -> host ----

    def _report(self, ack: PrefetchAck) -> None:
        self.prefetch_sync_queue.put(ack)

    def _page_transfer(self, operation: Any) -> Any:
        transfer = partial(super()._page_transfer, operation)
        if self._batches is None or self.page_get_func != self._page_get_zero_copy:
            return transfer()
        return self._batches.transfer(operation, transfer)

    def _page_get_zero_copy(self, operation: Any, hash_values: Any, *args: Any) -> int:
        if self._batches is None:
            return self._read_pages(operation, hash_values, *args)
        return self._batches.read(self._read_pages, operation, hash_values, *args)

    def _read_pages(
        self, operation: Any, hash_values: Any, host_indices: torch.Tensor, *others: Any
    ) -> int:
        wanted = len(operation.hash_value) * self.page_size
        first = self._loads.first_to_read(wanted) if self._storage_verifies() else 0
        host_pages = self._expect(host_indices, first)
        got = super()._page_get_zero_copy(operation, hash_values, host_indices, *others)
        return self._proven_pages(operation, hash_values, host_pages, got)

    def _generic_page_get(
        self, operation: Any, hash_values: Any, host_indices: torch.Tensor, *others: Any
    ) -> int:
        host_pages = self._expect(host_indices, 0)
        got = super()._generic_page_get(operation, hash_values, host_indices, *others)
        return self._proven_pages(operation, hash_values, host_pages, got)

    def _expect(self, host_indices: torch.Tensor, first_layer: int) -> Ids:
        """L3 is about to fill these pages, from ``first_layer`` on; int64 ``[pages]``."""
        host_pages = self._pool.page_ids(host_indices)
        self._pool.arena.expect(host_pages, first_layer)
        self._stages.brought(host_pages)
        return host_pages

    def _storage_verifies(self) -> bool:
        """Whether L3 is our own store, which verifies each segment it reads, and reads parts."""
        return getattr(self.storage_backend, "verifies_segments", False)

    def _proven_pages(
        self, operation: Any, hash_values: Sequence[str], host_pages: Ids, got: int
    ) -> int:
        """How many of the first ``got`` pages are what the radix tree asked for."""
        namespace, layout = self._runtime.page_namespace(), self._pool.page_layout
        size = self.page_size
        tokens = _token_array(operation.token_ids)
        first = operation.hash_value.index(hash_values[0]) if hash_values else 0
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
                    "hcache: page %s from storage is not ours (%s): a miss", key[:12], problem
                )
                return i
        return got


def _token_array(token_ids: Any) -> np.ndarray:
    """Token ids of a storage operation (a key, a list or an array) as int32 ``[n]``."""
    return np.asarray(getattr(token_ids, "token_ids", token_ids), dtype=np.int64).astype(np.int32)


def _unknown() -> None:
    """:data:`Prefix` of loads that nothing is known of."""
