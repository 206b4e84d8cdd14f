"""Fronts of prefetches: their first pages are recomputed in slices while the others are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hcache_backend import metrics, streams
from hcache_backend.capture.hooks import RecomputedRows
from hcache_backend.host.loads import LoadQueue
from hcache_backend.host.ports import DevicePages, HostPool
from hcache_backend.metrics import logger
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.prefetch.reservations import EagerRestores
from hcache_backend.prefetch.slices import Governor, SliceBudget
from hcache_backend.prefetch.times import HitTimes
from hcache_backend.ranks import Proposal, Turn
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import TokenSpan


@dataclass(eq=False)
class Fronts:
    """Decides in each turn which pages are recomputed, with all tensor-parallel ranks, and launches
    their slice."""

    _restores: EagerRestores
    _pages: DevicePages
    _pool: HostPool
    _pipeline: RestorePipeline
    _loads: LoadQueue
    _budget: SliceBudget  # of recomputed tokens in a turn
    _l3: L3Progress
    _prefetches: Prefetches
    _new_rows: Callable[[], RecomputedRows] | None = None  # None: pages hold K and V only

    def __post_init__(self) -> None:
        self.governor, self._times = Governor(), HitTimes(self._l3)
        self._saving = streams.new_stream(self._pages.device, "saves")
        self._recomputed = False  # since the last take_recomputed
        # By SGLang's operation: meetings whose next pages were offered to a slice in this turn.
        self._offers: dict[Any, Meeting] = {}
        self._proposal: Proposal | None = None  # number of offered pages of each

    @property
    def recomputes_pages(self) -> bool:
        """True if front pages of a prefetch are recomputed whole while it is read from the back.
        False if SGLang may end prefetches at any time (best_effort): then the front counts."""
        cache = self._pages.cache
        waits = cache is not None and cache.prefetch_stop_policy != "best_effort"
        return waits and self._loads.recomputes_pages

    def seconds_to_recompute(self, tokens: int, prefix: int) -> float:
        """Time of all layers of tokens in slices; infinite if put off or unknown. Any thread."""
        share = self.governor.pace.share
        seconds = self._budget.seconds(tokens, self._pool.page_size, prefix)
        if seconds == math.inf:  # no slice has run yet: as a prefill, then
            seconds = self._l3.estimates.prefill.seconds(tokens, prefix) or math.inf
        return seconds / share if share else math.inf

    def seconds_until_met(
        self, meeting: Meeting, prefix: int, *, longest: bool = False
    ) -> tuple[float, float]:
        """Two estimates of the seconds to finish the unread pages of ``meeting``, which are behind
        ``prefix`` tokens: reading and recomputing in parallel; and reading only. Infinite if
        unknown. ``longest``: as in :meth:`.L3Progress.seconds_to_read`. Any thread."""
        tokens, share = meeting.unread * self._pool.page_size, meeting.reachable_share
        recomputing = self.seconds_to_recompute(tokens, prefix)
        return self._times.seconds_to_finish(tokens, recomputing, share, longest=longest)

    def propose_slices(self, turn: Turn, operations: Sequence[Any]) -> None:
        """Offer pages of these prefetches to a slice, as many as one turn has time for, and propose
        their numbers: ranks must recompute the same. Readers leave offered pages alone."""
        self.governor.update_pace(self._prefetches)
        # Slices that ended long ago are in front of no batch any more.
        self._recomputed = self._recomputed and self._budget.count_unfinished() > 0
        size, budget, pace = self._pool.page_size, self._budget, self.governor.pace
        for offered in self._offers.values():  # an error came between: they were not taken
            offered.take_offered(0)
        self._offers, self._proposal, offered_pages = {}, None, list[int]()
        for operation in operations:
            prefetch = self._prefetches.prefetch_of(operation)
            if (meeting := prefetch.meeting) is None:
                continue
            can_recompute = self._pages.holds(prefetch.anchor) and self.recomputes_pages
            front = meeting.front
            meeting.reachable = self._restores.reachable(operation, front) if can_recompute else 0
            if not meeting.next_front or not self._can_recompute(operation):
                continue
            prefix = operation.storage_start + front * size
            both_ends, reading = self.seconds_until_met(meeting, prefix)
            most_pages = min(len(meeting.next_front), max(1, budget.tokens // size))
            first = self.seconds_to_recompute(size, prefix)
            # Pages that take longer than that are read sooner than recomputed, some or all.
            limits = {"share": pace.share, "within": reading, "best": both_ends, "first": first}
            pages = meeting.offer(budget.pages_of_slice(most_pages, size, prefix, **limits))
            self._offers[operation] = meeting
            offered_pages.append(0 if self._restores.launch_failed(operation) else pages)
        self._proposal = turn.propose(*offered_pages)
        if offered_pages and not pace.share:
            metrics.SLICES.count(pace.decision)

    def apply_slices(self) -> None:
        """The ranks have agreed on the smallest number of pages of each offer. Recompute those of
        the first offer with any; the reader may have all others again."""
        if self._proposal is None:
            return
        decision, launched = self.governor.pace.decision, False
        for (operation, meeting), pages in zip(
            self._offers.items(), self._proposal.least, strict=True
        ):
            # The turn may have ended the prefetch, on all ranks.
            ended = operation.is_terminated()
            taken = meeting.take_offered(0 if launched or ended else pages)
            if taken:
                launched = self._recompute_slice(operation, meeting, taken)
        self._offers = {}
        if launched:
            metrics.SLICES.count(decision)

    def _can_recompute(self, operation: Any) -> bool:
        """True if pages of a prefetch can be recomputed: the device has all tokens before it."""
        earlier_slots = self._slots_before(operation)
        if earlier_slots is None or operation.is_terminated() or not self.recomputes_pages:
            return False
        return len(earlier_slots) == operation.storage_start  # or its pages follow other tokens

    def _recompute_slice(self, operation: Any, meeting: Meeting, pages: range) -> bool:
        """Launch the recomputation of ``pages``, the next ones of a prefetch, and their copies to
        host memory: HiCache counts them as read. Returns False if nothing was launched."""
        earlier_slots = self._slots_before(operation)
        if earlier_slots is None:
            return False
        slots = self._restores.slots(operation, pages)
        prefix = torch.cat((earlier_slots, self._restores.slots(operation, range(pages.start))))
        hit_ids, size = self._prefetches.prefetch_of(operation).token_ids, self._pool.page_size
        assert hit_ids is not None
        token_ids = hit_ids[pages.start * size : pages.stop * size]
        recompute = self._loads.recompute_pages(TokenSpan(token_ids, prefix), slots)
        if recompute is None:
            return False
        rows = None if self._new_rows is None else self._new_rows()  # of hidden states
        if rows is not None:
            recompute = rows.with_rows_taken(recompute)
        # These pages are behind others that were loaded, or recomputed on the same stream.
        restore = self._pipeline.start_recomputation(recompute)
        if restore.failed is None:
            # As a backup would: for HiCache these pages are in host memory now.
            host_pages = self._restores.host_pages(operation, pages)
            positions = np.arange(len(prefix), len(prefix) + len(slots))
            self._pool.arena.expect_recomputed(host_pages, positions, token_ids)
            save = partial(self._pool.save_recomputed, host_pages, slots, rows)
            problem = restore.save_recomputed(self._saving, slots, save)
            if problem is not None:  # the device's copy is as good as other ranks'
                self._pool.arena.mark_unfit(host_pages)
                metrics.PROBLEMS.count("recomputed_not_saved")
                logger.warning("hcache: recomputed pages could not be stored: %r", problem)
        self._budget.add_slice(restore, len(prefix))
        self._recomputed = True
        self._restores.mark_recomputed(operation, pages, restore)
        if restore.failed is not None:
            self._loads.recomputation_failed(restore.failed)
            return True
        metrics.L3_TOKENS.count("recomputed", len(slots))
        meeting.front_launched(pages)
        operation.completed_tokens = meeting.counted_pages * size
        return True

    def _slots_before(self, prefetch: Hashable) -> torch.Tensor | None:
        """Slots of all tokens before a prefetch; None if they have left the device."""
        anchor = self._prefetches.prefetch_of(prefetch).anchor
        return self._pages.slots_to(anchor) if self._pages.holds(anchor) else None

    def take_recomputed(self) -> bool:
        """True if a slice was launched since the last call, in front of the next forward pass."""
        recomputed, self._recomputed = self._recomputed, False
        return recomputed
