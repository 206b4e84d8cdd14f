"""Eager restores on a server: its prefetches, its allocator, its loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hcache_backend import metrics, streams
from hcache_backend.arena import Ids
from hcache_backend.capture.hooks import RecomputedRows
from hcache_backend.host.loads import LoadQueue, QueuedLoad
from hcache_backend.host.ports import Controller, DevicePages, HostPool
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.fronts import Fronts
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.prefetch.reader import batch_pages
from hcache_backend.prefetch.reservations import EagerRestores, launch_pages, wait_until_written
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.report import RunningRestore

_FIRST_PREFETCHES = 8  # that get device pages: L3 is read for one after the other


@dataclass(eq=False)
class EagerLoads:
    """Restores pages of running prefetches, which loads get; ``fronts`` recomputes others."""

    _pages: DevicePages
    _pool: HostPool
    _pipeline: RestorePipeline
    _loads: LoadQueue
    _limit: int  # most reserved pages
    _budget: SliceBudget  # of recomputed tokens in a turn
    _l3: L3Progress
    _prefetches: Prefetches
    _new_rows: Callable[[], RecomputedRows] | None = None  # None: pages hold K and V only

    def __post_init__(self) -> None:
        pages, pool = self._pages, self._pool
        # Not SGLang's stream of loads: that one waits for restores of other requests.
        self._stream = streams.new_stream(pages.device, "eager")
        at_once = launch_pages(pages.device, pool.page_layout.page_bytes)
        self.restores = EagerRestores(pool.page_size, pages, self._launch, self._limit, at_once)
        pages.eager = self.restores
        pool.on_freed.append(self._on_host_freed)
        others = self._pipeline, self._loads, self._budget, self._l3, self._prefetches
        self.fronts = Fronts(self.restores, pages, pool, *others, self._new_rows)

    def restore_arrived(self, cache: Any) -> list[Any]:
        """Reserve device pages for the first prefetches that are read, and restore their pages that
        have arrived. Called in each turn behind HiCache's part, after which all tensor-parallel
        ranks have the same arrived pages. Returns SGLang's operations of these prefetches."""
        restores, size = self.restores, self._pool.page_size
        self._pages.cache = cache
        reading = self._prefetches.reading
        for operation in restores.running_prefetches():
            if operation not in reading:
                restores.end(operation)
        first = list(islice(reading, _FIRST_PREFETCHES))
        for operation in first:
            prefetch = self._prefetches.prefetch_of(operation)
            prefetch.anchor = prefetch.info and prefetch.info.anchor_node_id
            if operation not in restores.running_prefetches():
                self._reserve(operation, cache.cache_controller)
            arrived = range(operation.completed_tokens // size)
            meeting, have_met = prefetch.meeting, False
            if meeting is not None:  # it is read from the back, and its front is recomputed
                arrived = meeting.back
                have_met = arrived.start <= meeting.front
            launched = restores.restore_arrived(operation, arrived, last=have_met)
            if launched:
                metrics.TOKENS.count("eager", launched * size)
                self._loads.count_finished()  # no load may come for a long time
        self._pool.mark_arrived()
        return first

    def _reserve(self, operation: Any, controller: Controller) -> None:
        """Reserve device pages for a prefetch whose host pages are known now. Its restores are
        launched behind the forward passes of this moment."""
        host_pages = self._pool.page_ids(operation.host_indices)
        keys = operation.hash_value[: len(host_pages)]
        if len(keys) <= batch_pages(len(keys)):
            keys = []  # all pages arrive at once: the load restores them
        meeting = self._prefetches.prefetch_of(operation).meeting
        if meeting is not None:
            meeting.set_pages(len(operation.hash_value))
        self.restores.reserve(operation, keys, host_pages[: len(keys)])
        # Forward passes that were launched may still use pages that are free already.
        controller.after_forwards(self._stream)

    def _launch(self, host_pages: Ids, slots: torch.Tensor) -> RunningRestore:
        """Launch the restore of arrived pages to ``slots``. If that raises, the result has
        ``failed``: a load of these pages is refused."""
        physical, first_layer = self._pool.arena.physical(host_pages), self._loads.stored_from
        caught = metrics.catching("restore", "pages that arrived cannot be restored: a miss")
        restore = None
        with self._stream.as_current(), metrics.timed("host_load"), caught:
            restore = self._pipeline.start(physical, slots, None, first_layer, ahead=True)
        return restore or self._pipeline.failed_restore(len(slots))

    def load(
        self, load: QueuedLoad, queue_load: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Let SGLang queue ``load`` (at least one page), by ``queue_load``, with the prepared
        device pages. Returns its result: device indices, or None if SGLang has no room."""
        self._pages.load = load
        try:
            device_indices = queue_load()
        finally:
            self._pages.load = None
        if load.prepared is not None and device_indices is None:
            # Another pool had no room: SGLang gives the pages to the next request.
            wait_until_written(load.prepared.restores)
        elif load.prepared is not None:
            size, ready = self._pool.page_size, int(load.prepared.ready.sum())
            metrics.TOKENS.count("ready_at_load", ready * size)
            metrics.TOKENS.count("not_ready_at_load", (len(load.prepared.ready) - ready) * size)
        return device_indices

    def wait_until_saved(self, host_pages: Ids) -> None:
        """Block until recomputed pages have been copied to these host pages, or are marked unfit:
        the CPU is going to read or write them."""
        self.restores.wait_until_saved(host_pages)
        self._pool.mark_arrived()

    def _on_host_freed(self, host_pages: Ids) -> None:
        self.wait_until_saved(host_pages)
        self.restores.host_freed(host_pages)
