"""HiCache's controller over own pages: backup, load and storage transfers. Loads become restores.
A page of L3 is a hit only if its header proves that it is the wanted one, from any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import metrics, streams
from hcache_backend.arena import Ids
from hcache_backend.capture.staging import Capture
from hcache_backend.checks.service import KVChecks, ServiceChecks
from hcache_backend.config import ConfigError
from hcache_backend.host.loads import LoadQueue, Prefix, QueuedLoad
from hcache_backend.host.node_backups import NodeBackups
from hcache_backend.host.page_headers import PageHeaders
from hcache_backend.host.ports import Controller
from hcache_backend.host.stages import StagePages
from hcache_backend.prefetch.eager_loads import EagerLoads
from hcache_backend.prefetch.hit import Recomputing
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.reader import BatchedReads
from hcache_backend.ranks import smallest
from hcache_backend.sglang.hook_registry import guarded
from hcache_backend.sglang.host_pool import OwnPagesPool
from hcache_backend.sglang.reads import BackAck, Read, as_prefetch_read
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.sglang.storage_threads import READ
from hcache_backend.sglang.tree import token_array


@dataclass(frozen=True)
class Stack:
    """Parts of ours that a controller puts to work."""

    runtime: Runtime
    pool: OwnPagesPool
    loads: LoadQueue
    eager: EagerLoads | None
    stages: StagePages
    kv_checks: KVChecks
    judge: Callable[[str], None]  # on all ranks, with the name of an L3 other than our store
    capture: Capture
    headers: PageHeaders
    backups: Callable[[Controller, Callable[[], None]], NodeBackups]
    trusts: Callable[[], bool]  # True: this rank believes its pages
    checks: ServiceChecks | None  # of hidden states; None: pages have none


class OwnPagesController(HybridCacheController, Controller):
    """``_page_*`` run in HiCache's storage threads, all else on the scheduler thread."""

    def __init__(self, stack: Stack, *hicache: Any, **arguments: Any) -> None:
        """``stack`` has our parts, which do the work; the other arguments are SGLang's."""
        self._runtime, self._weights = stack.runtime, stack.runtime.weights
        self._pool, self._loads = stack.pool, stack.loads
        self.eager, self.stages, self._kv_checks = stack.eager, stack.stages, stack.kv_checks
        self._judge, self._capture, self._headers = stack.judge, stack.capture, stack.headers
        self.node_backups = stack.backups(self, self.start_writing)
        self.trusts = stack.trusts
        self.checks = [each for each in (stack.checks, stack.kv_checks) if each is not None]
        self._batches: BatchedReads | None = None
        if self.eager is not None:
            self._batches = BatchedReads(self._pool.page_size, self._runtime.l3)
        self.prefix: Prefix = lambda: None  # slots of the tokens before a load; None: unknown
        self._never_loaded = False  # True: host pages that no load can use are to be evicted
        super().__init__(*hicache, **arguments)

    def attach_storage_backend(self, storage_backend: str, *args: Any, **kwargs: Any) -> None:
        """SGLang's, then judge hits of other backends. Raises ConfigError on all ranks or none."""
        # SGLang's own zero-copy backends name two values a page, for K and V: they get halves.
        self._pool.pieces_per_page = 1 if storage_backend == "dynamic" else 2
        super().attach_storage_backend(storage_backend, *args, **kwargs)
        if self._storage_verifies:  # our store, which is attached elsewhere
            return
        try:
            self._judge(storage_backend)
        except ConfigError:  # on every rank
            self.detach_storage_backend()
            raise

    def _generate_storage_config(self, *args: Any, **kwargs: Any) -> Any:
        # Each rank has latents of tokens of its own: SGLang would store those of the first alone.
        return replace(super()._generate_storage_config(*args, **kwargs), is_mla_model=False)

    def detach_storage_backend(self) -> None:
        super().detach_storage_backend()
        self._runtime.stop_judging()

    def reset(self) -> None:
        """SGLang empties its caches: also drop what waits here, and free all reserved pages."""
        super().reset()
        self._loads.drop_queued()
        if self.eager is not None:
            self.eager.restores.give_all_back()
        self.node_backups.drop_waiting()
        for checks in self.checks:
            checks.drop_waiting()

    def evict_unloadable(self, cache: Any) -> None:
        """If a load was refused for good, evict all nodes that only host memory has. A refused node
        would stay a hit, and hide its copy in L3, and HiCache cannot remove a single node."""
        if self._never_loaded or (self._kv_checks.failed and self.stages.alone):
            cache.evict_host(self._pool.size)
            self._never_loaded = False

    def _move_pool_indices(
        self, host_pool: Any, host_indices: Any, device_indices: Any, **kwargs: Any
    ) -> Any:
        if host_pool is self._pool:  # its tables are on the CPU, where host indices are needed
            return host_indices, device_indices
        return super()._move_pool_indices(host_pool, host_indices, device_indices, **kwargs)

    def write(self, device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queue a backup: host indices, or None on every rank if a row is not valid, or L2 full."""
        self.stages.exchange_messages()
        weights = self._weights.present
        flushed = weights is not None and weights.suspended is None
        may_wait = flushed and self.write_policy != "write_back"  # for rows that are on their way
        backup = self.node_backups.begin_backup(device_indices, may_wait=may_wait)
        if backup is None:
            return None
        # K and V go to the pages of an exchange, so not before the backup is queued.
        host_indices = super().write(device_indices, *args, **kwargs | {"flush": False})
        if host_indices is None:
            return None
        self.node_backups.add_backup(backup, self._pool.page_ids(host_indices))
        if kwargs.get("flush", True):
            self.start_writing()
        return host_indices

    def start_writing(self) -> None:
        """Launch the queued backups that are ready; HiCache's queue keeps the others."""
        may_wait = self.write_policy != "write_back"  # HiCache waits for that on the spot
        launched = self.node_backups.launch(self.write_queue, may_wait=may_wait)
        for host_pages in launched:
            self.stages.backed_up(host_pages)
        not_ready = self.write_queue[len(launched) :]
        del self.write_queue[len(launched) :]
        if self.write_queue:
            # HiCache backs a page up as soon as the step that fills its last slot is launched, and
            # waits only for SGLang's read barrier: that of a decode graph may be too early.
            engine_stream = self.l2_transfer_engine.device_to_host_stream
            self.after_forwards(streams.wrap_engine_stream(engine_stream))
        super().start_writing()
        self.write_queue.extend(not_ready)

    def agreed(self, *fine: int) -> list[int]:
        """The smallest of each of ``fine`` on all ranks; at most 0 if a rank does not trust its own
        pages any more, and then L3 ends on this one, too."""
        *agreed, trusted = smallest(self.tp_group, *fine, self.trusts())
        if not trusted:
            self._weights.begin_quarantine("another tensor-parallel rank failed its self-check")
        return [one if trusted else min(one, 0) for one in agreed]

    def after_forwards(self, stream: streams.Stream) -> None:
        """Let a stream of transfers wait for the forward passes that were launched."""
        stream.wait(streams.current_stream(self.device).record())
        if self.load_fence_stream is not None:  # the forward passes' own, once SGLang is set up
            stream.wait(streams.wrap_engine_stream(self.load_fence_stream).record())

    def load(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Plan a load, and let HiCache queue it. None: a miss, or SGLang has no room."""
        host_pages = self._pool.page_ids(host_indices)
        queue_load = partial(super().load, host_indices, *args, **kwargs)
        if not len(host_pages):
            return queue_load()
        load = self._plan_load(host_pages)
        if load is None:
            return None
        device_indices = queue_load() if self.eager is None else self.eager.load(load, queue_load)
        if device_indices is not None:
            self._capture.load_begins(device_indices, host_pages)
            self._loads.add_load(load)
        return device_indices

    def _plan_load(self, host_pages: Ids) -> QueuedLoad | None:
        """A load of ``host_pages`` (int64 ``[pages]``), or None: a miss on every rank, counted."""
        problem, load, needed = None, None, host_pages
        self._capture.settle()
        if self.eager is not None and not self._loads.stored_from:
            needed = host_pages[~self.eager.restores.ready_pages(host_pages)]
        self.stages.exchange_messages()
        if self.eager is not None and self.eager.restores.any_failed(host_pages):
            problem = "restore_failed"
        elif (usable := self._pool.usable(needed)) is None:
            problem = "unsettled"
        elif self._pool.arena.unfit(needed).any():
            problem = "not_encodable"
        elif not usable or not self._headers.may_project(needed):
            problem = "stale_host_page"
        elif not self.stages.have(host_pages):
            problem = "another_stage"
        never = problem in ("restore_failed", "stale_host_page")
        fine, may_come = self.agreed(problem is None, not never)  # may_come: by a later load
        if fine:
            load = self._loads.plan(host_pages, self.prefix)
            if self._loads.stored_from:
                # Which tokens are recomputed stands in the headers of each rank.
                [fine] = smallest(self.tp_group, load is not None)
                may_come = fine
            if not fine:
                problem = "layers_not_recomputable"
        if problem in ("stale_host_page", "layers_not_recomputable"):
            metrics.PROBLEMS.count(problem)
        if not self.stages.decide(bool(fine)):
            tokens = len(host_pages) * self.page_size
            metrics.TOKENS.count(f"not_restored_{problem or 'another_rank'}", tokens)
            if self.stages.alone:  # stages could not do it at one point
                self._never_loaded |= not may_come
            return None
        if not fine:  # the first stage knew that it is: a mistake of ours
            mistaken = "a page is not what the first pipeline stage took it for"
            self._weights.begin_quarantine(mistaken)
        return load or QueuedLoad(host_pages)

    def write_storage(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Queue a node for L3, whose thread reads its host pages: all of them must have arrived."""
        self._capture.settle()  # the backup is done, so its rows have arrived
        self.stages.exchange_messages()
        if self.eager is not None:
            self.eager.wait_until_saved(self._pool.page_ids(host_indices))
        self._pool.mark_arrived()
        return super().write_storage(host_indices, *args, **kwargs)

    def _page_backup(self, operation: Any) -> Any:
        """Write the headers of the pages, then give L3 those before the first that is unusable."""
        sealed, before = 0, operation.prefix_keys
        with metrics.catching("backup", "pages of a node are not stored"):  # a thread of SGLang's
            pages, keys = self._pool.page_ids(operation.host_indices), operation.hash_value
            first = None if before is None else len(before) * self.page_size
            sealed = self._headers.seal(pages, keys, token_array(operation.token_ids), first)
        if sealed < len(operation.hash_value):
            operation.hash_value = operation.hash_value[:sealed]
            operation.host_indices = operation.host_indices[: sealed * self.page_size]
            # A window or a state ends behind a page that is not stored: no hit would find it.
            others = operation.pool_transfers or ()
            operation.pool_transfers = [t for t in others if t.indices_from_pool == PoolName.KV]
        return super()._page_backup(operation)

    def _report(self, ack: PrefetchAck) -> None:
        self.prefetch_sync_queue.put(ack)

    def prefetch(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a prefetch, and if its front is recomputed while it is read, its meeting."""
        operation = super().prefetch(*args, **kwargs)
        # Before the scheduler sees the hit: nothing is read earlier.
        if self.recomputing is not None:
            prefetch = self._runtime.prefetches.prefetch_of(operation)
            prefetch.token_ids = token_array(operation.token_ids).astype(np.int64)
            prefetch.meeting = Meeting()
        return operation

    @property
    def recomputing(self) -> Recomputing | None:
        """Estimates the time to recompute the front of a prefetch that begins now. None if it is
        read in order, without recomputation: then it is None on all ranks."""
        store = self.page_get_func == self._page_get_zero_copy and self.storage_backend
        alike = getattr(store, "reads_any_page_alike", False)
        if not alike or not self._runtime.prefetches.plain or self.eager is None:
            return None
        fronts = self.eager.fronts
        return fronts.seconds_to_recompute if fronts.recomputes_pages else None

    def _page_transfer(self, operation: Any) -> Any:
        if self._batches is None or self.page_get_func != self._page_get_zero_copy:
            return super()._page_transfer(operation)
        return guarded(READ)(OwnPagesController.read_in_batches, self, operation)

    def read_in_batches(self, operation: Any) -> None:
        """Read a prefetch, in order or from its last page to the front that is recomputed."""
        assert self._batches is not None and self.eager is not None
        prefetch = self._runtime.prefetches.prefetch_of(operation)
        self._read_drafts(operation)
        meeting, trial = prefetch.meeting, prefetch.trial is not None
        read_pages, size = self._page_get_zero_copy, self._pool.page_size
        back = meeting is not None
        read = as_prefetch_read(operation, size, read_pages, self._report, from_back=back)
        seconds_until_met = self.eager.fronts.seconds_until_met
        pages_read = self._batches.transfer(read, meeting, seconds_until_met, trial=trial)
        self._page_transfer_sidecar(operation, pages_read)  # SGLang's report of other pools

    def _read_drafts(self, operation: Any) -> None:
        """Read the draft model's pages of a whole hit, because a recomputed front has none."""
        keys, before = operation.hash_value, list(operation.prefix_keys or ())
        transfers = operation.pool_transfers or ()
        pools = [t.name for t in transfers if t.indices_from_pool == PoolName.KV]
        for start in range(0, len(keys) if pools else 0, STORAGE_BATCH_SIZE):
            if operation.is_terminated():
                break
            batch = keys[start : start + STORAGE_BATCH_SIZE]
            tokens = slice(start * self.page_size, (start + len(batch)) * self.page_size)
            indices = operation.host_indices[tokens]
            self.storage_backend.batch_get_v2(
                [PoolTransfer(name=pool, host_indices=indices, keys=batch) for pool in pools],
                extra_info=HiCacheStorageExtraInfo(prefix_keys=before + keys[:start]),
            )

    def _reduce_prefetch_ack(self, ack: PrefetchAck) -> None:
        super()._reduce_prefetch_ack(ack)
        if isinstance(ack, BackAck):
            ack.reduce(partial(self._all_reduce, groups=self.prefetch_completion_sync_groups))

    def _page_get_zero_copy(self, *args: Any) -> int:
        return self._read_verified(super()._page_get_zero_copy, *args)

    def _generic_page_get(self, *args: Any) -> int:
        return self._read_verified(super()._generic_page_get, *args)

    def _read_verified(
        self, read: Read, operation: Any, keys: Sequence[str], indices: torch.Tensor, *others: Any
    ) -> int:
        """Number of pages that SGLang's ``read`` brings, and whose headers prove them: loadable."""
        with metrics.catching("read", "pages of L3 are a miss"):  # a thread of SGLang's
            host_pages = self._pool.page_ids(indices)
            arena = self._pool.arena
            ticket = arena.expect(host_pages, self._weights.page_namespace())
            arena.host_access(arena.physical(host_pages), write=True)
            self.stages.brought(host_pages)
            pages_read = read(operation, keys, indices, *others)
            # With buffer_only, `hash_value` loses pages that the device has got meanwhile.
            first = operation.all_hash_values.index(keys[0]) if keys else 0
            tokens = token_array(operation.token_ids)[first * self.page_size :]
            arrived, checked = host_pages[:pages_read], self._storage_verifies
            count = self._headers.verified_pages(arrived, keys, tokens, digests_checked=checked)
            arena.settle(host_pages[:count], ticket)
            self._runtime.l3.part_arrived(count * self.page_size)
            return count
        return 0

    @property
    def _storage_verifies(self) -> bool:
        return getattr(self.storage_backend, "verifies_segments", False)
