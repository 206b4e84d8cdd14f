"""What hidden states add to HiCache's controller over own pages.

A node is backed up only when every row of it is valid, by exchanging table entries of the arena;
and no page of other weights is ever projected. How many of the first layers are recomputed is
decided before pages are read, so that their segments are not, and again at the load.

Which slots a node has stands in device memory, and HiCache wants its answer at once. Where no row
of any token in the KV pool was lost, a node gets host pages before anybody knows its slots; the
exchange follows a few passes later. Else the scheduler thread waits until the slots are known,
which stands behind the beginning of the last pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hcache_backend.arena import Ids
from hcache_backend.capture.ledger import Read
from hcache_backend.capture.staging import StagedCapture
from hcache_backend.engine import metrics
from hcache_backend.engine.controller import OwnPagesController
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.loads import QueuedLoad
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.service_check import KVChecks, ServiceChecks
from hcache_backend.engine.stage_pages import StagePages
from hcache_backend.page import Bytes, Ints

_PASSES = 2
"""The next forward pass copies a node's slots to the CPU; they are known when one more began."""

_STAGED_PASSES = 16
"""As many as are under way between pipeline stages, or more."""


@dataclass(eq=False)
class _Backup:
    """A node in HiCache's queue of backups.

    Attributes:
        slots: Slots of its tokens, int64 ``[n]``.
        host_pages: Where they go, int64 ``[n / page_size]``.
        valid: Whether all rows are there, as far as is known.
        due: How many forward passes have begun when it is known, and the slots are.
    """

    slots: Read
    host_pages: Ids
    valid: bool
    due: int


class HiddenStateController(OwnPagesController):
    """Backup, load and storage transfers of pages with hidden states."""

    _pool: HiddenStatePool

    def use_hidden_states(
        self,
        capture: StagedCapture,
        checks: ServiceChecks,
        kv_checks: KVChecks,
        stages: StagePages,
    ) -> None:
        """Give the controller what it works with besides; called once, before the first request."""
        self._capture = capture
        self._checks = checks
        self._kv_checks = kv_checks
        self._stages = stages
        self._writing = False
        self._backups: deque[_Backup] = deque()  # as write_queue
        self._passes = 0  # of the last turn
        if not stages.alone:
            capture.ledger.without_results = _STAGED_PASSES
        self._pool.frees_duplicates = lambda: self.write_policy == "write_back"

    def reset(self) -> None:
        super().reset()
        self._backups.clear()
        self._checks.forget()
        self._kv_checks.forget()

    def turn(self, cache: Any) -> None:
        super().turn(cache)
        if self._capture.ledger.passes == self._passes and self._backups:
            # No pass was launched since the last turn: nothing is late because of a wait.
            self._finish_when_idle()
        self._passes = self._capture.ledger.passes
        self._checks.read()
        self._kv_checks.run()

    # ---- device -> host ----

    def write(self, device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Back up a node, or return None on every rank when a row of it is not valid.

        Pipeline stages cannot agree: they back it up whether its rows are valid or not.
        """
        self._stages.talk()
        ledger, tokens, problem = self._capture.ledger, len(device_indices), self._ended()
        due, slots = ledger.passes + _PASSES, Read()
        valid, can_wait = self._agreed(problem is None, self._can_wait())
        if valid:
            slots = ledger.read(device_indices)
            if not can_wait:
                metrics.TOKENS.count("waited_for_rows", tokens)
                ledger.settle()
                problem, due = self._problem(slots), 0
                (valid,) = self._agreed(problem is None)
        if not valid:
            self._not_backed_up(problem or "another rank", tokens)
            if self._stages.alone:
                return None
        self._writing = True
        try:
            host_indices = super().write(device_indices, *args, **kwargs)
        finally:
            self._writing = False
        if host_indices is None:
            return None
        host_pages = self._pool.page_ids(host_indices)
        self._backups.append(_Backup(slots, host_pages, valid, due))
        if kwargs.get("flush", True):
            self.start_writing()
        return host_indices

    def start_writing(self) -> None:
        """Launch the backups that are due, with the exchange of each."""
        if self._writing:
            return  # not within ``write``: K and V must go where the exchange puts them
        ledger, due = self._capture.ledger, 0
        ledger.settle(wait=False)
        while self._backups and self._backups[0].due <= ledger.passes:
            self._exchange(self._backups.popleft())
            due += 1
        later = self.write_queue[due:]
        del self.write_queue[due:]
        super().start_writing()
        self.write_queue.extend(later)

    def _finish_when_idle(self) -> None:
        self._capture.ledger.settle()
        for backup in self._backups:
            backup.due = 0
        self.start_writing()

    def _exchange(self, backup: _Backup) -> None:
        slots, tokens = backup.slots, len(backup.host_pages) * self.page_size
        self._stages.backed_up(backup.host_pages)
        if backup.valid and slots.values is None:
            self._capture.ledger.settle()  # the pass that should have copied them could not
        problem = self._problem(slots)
        if backup.valid and problem is not None:
            self._not_backed_up(problem, tokens)
        if not backup.valid or problem is not None or slots.values is None:
            self._pool.arena.spoil(backup.host_pages)
            return
        metrics.TOKENS.count("backed_up", tokens)
        self._capture.back_up(slots.values, backup.host_pages)

    def _can_wait(self) -> bool:
        """Whether a node may get host pages before its rows are known to be valid.

        Not where HiCache needs a backup at once, nor between pipeline stages, whose passes begin at
        different times, nor while tokens of other weights, whose rows are void, may be cached.
        """
        weights = self._runtime.weights
        flushed = weights is not None and weights.suspended is None
        fine = flushed and self._capture.ledger.none_lost
        return fine and self._stages.alone and self.write_policy != "write_back"

    def _ended(self) -> str | None:
        """Why nothing is backed up any more, or None."""
        if self._runtime.distrust is not None:
            return "self-check failed"
        return "capture broke" if self._capture.ledger.broken is not None else None

    def _problem(self, slots: Read) -> str | None:
        """Why a node in ``slots`` cannot be backed up."""
        ended = self._ended()
        if ended is not None or slots.values is None:
            return ended or "capture broke"
        return self._capture.arena.problem(slots.values)

    def _agreed(self, *fine: bool) -> Sequence[bool]:
        """For each, whether all ranks say so: none, where a rank lost its trust; it takes the
        others with it."""
        *agreed, trusted = on_all_ranks(self.tp_group, *fine, self._runtime.distrust is None)
        if not trusted:
            self._runtime.lose_trust("another tensor-parallel rank failed its self-check")
        return [trusted and one for one in agreed]

    # ---- host -> device ----

    def _planned(self, host_pages: Ids) -> QueuedLoad | None:
        """None when a page cannot be restored.

        It may be one of other weights, or lack segments of layers that cannot be recomputed.
        """
        load, problem, for_ever = QueuedLoad(host_pages), None, False
        self._capture.ledger.settle(wait=False)
        depths = self._depths(host_pages)
        if not self._may_project(host_pages):
            problem = "stale_host_page"
            for_ever = not self._pool.arena.waits_for_proof(host_pages)
            metrics.PROBLEMS.count(problem)
        elif depths is None:
            problem = "unsettled"
        else:
            planned = self._loads.plan(host_pages, depths, self._prefix, self._token_ids)
            if planned is None:
                problem, for_ever = "layers_not_recomputable", True
                metrics.PROBLEMS.count(problem)
            load = planned or load
        self._stages.talk()
        if not self._stages.have(host_pages):
            problem = "another_stage"
        (fine,) = self._agreed(problem is None)
        if not self._stages.decide(fine):
            tokens = len(host_pages) * self.page_size
            metrics.TOKENS.count(f"not_restored_{problem or 'another_rank'}", tokens)
            if self._stages.alone:  # stages could not do it at one point
                (may_come,) = on_all_ranks(self.tp_group, not for_ever)
                self._never_loaded |= not may_come
            return None
        if not fine:  # the first stage knew that it is: a mistake of ours
            self._runtime.lose_trust("a page is not what the first pipeline stage took it for")
        return load

    def _queued(self, load: QueuedLoad, device_indices: torch.Tensor) -> None:
        self._capture.ledger.loaded(device_indices, load.host_pages)
        super()._queued(load, device_indices)

    def _may_project(self, host_pages: Ids) -> bool:
        if self.eager is not None:
            host_pages = host_pages[~self.eager.prepared(host_pages)]
        if self._runtime.distrust is not None:
            return False
        namespaces, layout = self._runtime.page_namespaces(), self._pool.page_layout
        return all(
            layout.namespace_of(page) in namespaces and self._has_known_positions(page)
            for page in self._pool.arena.pages(host_pages, header=True)
        )

    # ---- host <-> storage ----

    def write_storage(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The backup is done, so its rows have arrived: check, and pass it on to L3."""
        self._capture.ledger.settle(wait=False)
        self._checks.read()
        self._stages.talk()
        return super().write_storage(host_indices, *args, **kwargs)

    def _finish_header(self, page: Bytes, token_ids: Ints, position: int | None) -> str | None:
        """It was written when the page's rows were proven."""
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

    def _expect(self, host_indices: torch.Tensor) -> Ids:
        host_pages = super()._expect(host_indices)
        self._stages.brought(host_pages)
        return host_pages
