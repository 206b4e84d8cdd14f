"""Backups of nodes, from HiCache's question to the copy: each waits here until it is ready.

- If layers are captured, a node is backed up only when all of its rows are valid, by exchanging
  table entries of the arena.
- The slots of a node are in device memory, and HiCache wants its answer at once. If no row of any
  token in the KV pool was lost, a node gets host pages before the CPU knows its slots, and the
  exchange follows a few passes later. Otherwise the scheduler thread waits for the slots.
- If layouts are chosen for each node, a backup waits for its layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from hcache_backend import metrics
from hcache_backend.arena import NOT_ENCODABLE, Ids
from hcache_backend.capture.ledger import Read
from hcache_backend.capture.staging import Capture, StagedCapture
from hcache_backend.format.page import PageLayout
from hcache_backend.host.ports import Controller, HostPool
from hcache_backend.metrics import logger
from hcache_backend.ranks import Turn

# the next forward pass copies a node's slots to the CPU; they are known when one more began
_PASSES = 2


class NodeLayouts(Protocol):
    """Chooses the layout of the pages of each node; its backup waits until then. Scheduler thread
    only."""

    @property
    def nodes(self) -> int:
        """Number of nodes that wait."""

    def add_node(self, tree: Any, node_ids: Sequence[int]) -> None:
        """Append the node of SGLang's ``tree`` with these ids; without a tree it need not wait."""

    def next_layout(self) -> PageLayout | None:
        """Remove the first node and return its layout; None if there is none, or it has to wait."""

    def propose_answer(self, turn: Turn) -> None:
        """Add what this rank knows."""

    def apply_answer(self) -> bool:
        """The ranks have agreed. True if the first node need not wait since now."""

    def drop_nodes(self) -> None:
        """Backups that wait were dropped, and the tree is empty."""


@dataclass(eq=False)
class Backup:
    slots: Read = field(default_factory=Read)  # of its tokens, int64 [n], if layers are captured
    valid: int = True  # all rows are there, as far as is known
    due: int = 0  # number of begun forward passes at which that, and the slots, are known
    host_pages: Ids = field(default_factory=lambda: np.empty(0, np.int64))  # int64 [n / page_size]


@dataclass(eq=False)
class NodeBackups:
    """Of nodes of K and V, which need nothing from the model. Scheduler thread only."""

    _pool: HostPool
    _capture: Capture
    _layouts: NodeLayouts | None  # chooses those of nodes; None: all have the pool's
    _alone: bool  # there are no pipeline stages, which cannot agree
    _controller: Controller
    _start: Callable[[], None]  # has HiCache launch the backups that are ready

    def __post_init__(self) -> None:
        self._waiting: deque[Backup] = deque()  # as HiCache's write queue
        self._tree: Any = None  # SGLang's, with the nodes whose layouts are chosen

    def propose_layouts(self, turn: Turn) -> None:
        """Add to this ``turn`` of the ranks what this rank knows of the layouts of nodes."""
        if self._layouts is not None:
            self._tree = turn.cache.tree_core
            self._layouts.propose_answer(turn)

    def apply_layouts(self) -> None:
        """The ranks have agreed: launch the backups that need not wait any more."""
        chosen = self._layouts is not None and self._layouts.apply_answer()
        if self.settle_when_idle() or chosen:
            self._start()

    def drop_waiting(self) -> None:
        self._waiting.clear()
        if self._layouts is not None:
            self._layouts.drop_nodes()

    def begin_backup(self, slots: torch.Tensor, *, may_wait: bool) -> Backup | None:
        """A backup of tokens in ``slots`` (int64 ``[n]``, on the device); None, on every rank, if
        nothing may be backed up. Pipeline stages back a node up in any case. ``may_wait``: the
        backup may be launched later. False: HiCache needs it at once, or weights have changed."""
        problem = self._ended()
        if problem is None or not self._alone:
            return Backup()
        _not_backed_up(problem, len(slots))
        return None

    def add_backup(self, backup: Backup, host_pages: Ids) -> None:
        """HiCache queued ``backup``, to ``host_pages`` (int64 ``[p]``), which are empty so far."""
        backup.host_pages = host_pages
        self._pool.arena.expect(host_pages)
        self._waiting.append(backup)

    def launch(self, queue: Sequence[Any], *, may_wait: bool) -> list[Ids]:
        """Let HiCache copy the backups that are ready; returns the host pages of each. ``queue`` is
        HiCache's, of nodes in its tree. Without ``may_wait`` no node waits for its own layout."""
        self._capture.settle()
        if self._layouts is not None:
            for operation in queue[self._layouts.nodes :]:
                self._layouts.add_node(self._tree if may_wait else None, operation.node_ids)
        launched = []
        while self._waiting and (layout := self._ready(self._waiting[0])) is not None:
            backup = self._waiting.popleft()
            self._launch(backup, layout)
            launched.append(backup.host_pages)
        return launched

    def settle_when_idle(self) -> bool:
        """Make backups ready if no forward pass began since the last turn; True if some are."""
        return False  # these wait for no pass

    def _ended(self) -> str | None:
        """Reason why no node is backed up any more, or None."""
        return None if self._controller.trusts() else "self-check failed"

    def _ready(self, backup: Backup) -> PageLayout | None:
        """The layout of the pages of ``backup``; None if it has to wait."""
        return self._layouts.next_layout() if self._layouts is not None else self._pool.page_layout

    def _launch(self, backup: Backup, layout: PageLayout) -> None:
        self._pool.divide(backup.host_pages, layout)
        metrics.TOKENS.count("backed_up", len(backup.host_pages) * layout.page_size)


@dataclass(eq=False)
class CapturedBackups(NodeBackups):
    """Of nodes with hidden states: each has a backup if all of its rows are valid. Rows of other
    weights are void."""

    _capture: StagedCapture
    _passes: int = field(default=0, init=False)  # that had begun at the last turn

    def begin_backup(self, slots: torch.Tensor, *, may_wait: bool) -> Backup | None:
        """A backup of tokens in ``slots`` (int64 ``[n]``, on the device); None, on every rank, if
        nothing may be backed up or a row is not valid. Without ``may_wait``, or if rows were lost,
        this waits for the slots; otherwise rows are judged ``_PASSES`` passes later."""
        problem, tokens, ledger = self._ended(), len(slots), self._capture.ledger
        backup = Backup(due=ledger.passes + _PASSES)
        # Passes of pipeline stages begin at different times.
        may_wait = may_wait and self._alone and ledger.none_lost
        backup.valid, waits = self._controller.agreed(problem is None, may_wait)
        if backup.valid:
            backup.slots = ledger.read(slots)
            if not waits:
                metrics.TOKENS.count("waited_for_rows", tokens)
                ledger.settle()
                problem, backup.due = self._problem(backup.slots), 0
                (backup.valid,) = self._controller.agreed(problem is None)
        if not backup.valid:
            _not_backed_up(problem or "another rank", tokens)
            if self._alone:
                return None
            backup.due = 0  # nothing is waited for: another stage may have launched its own
        return backup

    def settle_when_idle(self) -> bool:
        """If no forward pass began since the last turn, wait for the slots of all backups, which no
        pass will bring, and make the backups ready. True if there are some."""
        ledger = self._capture.ledger
        idle, self._passes = ledger.passes == self._passes, ledger.passes
        if not idle or not self._waiting:
            return False
        ledger.settle()
        for backup in self._waiting:
            backup.due = 0
        return True

    def _ended(self) -> str | None:
        return super()._ended() or (self._capture.ledger.broken and "capture broke")

    def _ready(self, backup: Backup) -> PageLayout | None:
        return self._pool.page_layout if backup.due <= self._capture.ledger.passes else None

    def _launch(self, backup: Backup, layout: PageLayout) -> None:
        """Copy the captured rows of a backup; free its host pages if rows are lost or unfit."""
        slots, tokens = backup.slots, len(backup.host_pages) * layout.page_size
        if backup.valid and slots.values is None:
            self._capture.ledger.settle()  # the pass that should have copied them could not
        problem = self._problem(slots)
        if backup.valid and problem is not None:
            _not_backed_up(problem, tokens)
        if not backup.valid or problem is not None or slots.values is None:
            arena = self._pool.arena
            nothing_comes = arena.mark_unfit if problem == NOT_ENCODABLE else arena.free
            nothing_comes(backup.host_pages)
            return
        metrics.TOKENS.count("backed_up", tokens)
        self._capture.back_up(slots.values, backup.host_pages)

    def _problem(self, slots: Read) -> str | None:
        """Reason why a node, whose tokens are in ``slots``, cannot be backed up, or None."""
        if slots.values is None:
            return self._ended() or "capture broke"
        return self._ended() or self._pool.arena.problem(slots.values)


def _not_backed_up(problem: str, tokens: int) -> None:
    metrics.TOKENS.count(f"not_backed_up_{problem.replace(' ', '_')}", tokens)
    logger.debug("hcache: %d tokens not backed up: %s", tokens, problem)
