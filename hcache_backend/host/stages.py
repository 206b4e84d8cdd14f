"""Pipeline stages: messages between them, and the host pages that all of them may load.

- No stage may wait for a later one on the scheduler thread: that one may wait for the first.
- So every stage backs up every node, if necessary with pages that stay free in the arena, and says
  later if they are usable. The first stage alone decides about loads, by what it has gathered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hcache_backend.arena import Arena, Ids
from hcache_backend.host.ports import ModelWeights
from hcache_backend.metrics import logger
from hcache_backend.ranks import Group

_Value = TypeVar("_Value")

_BROUGHT = 0  # instead of a backup's number: L3 brought the page, to all stages or none
_LOST = np.iinfo(np.int64).max


class PipelineStages(Generic[_Value]):
    """Gathers values of all pipeline stages. ``group``: of the stages, for this alone; None if
    there is one. A stage passes a request on only after it is done with it, so its scheduler thread
    cannot wait for an answer. Exchanges have their own thread, and end in their order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._queued: SimpleQueue[tuple[_Value, Future[list[_Value]]]] = SimpleQueue()
        if group is not None:  # otherwise there is one stage
            threading.Thread(target=self._exchange, name="hcache-stages", daemon=True).start()

    def gather(self, value: _Value) -> Future[list[_Value]]:
        """A future of the values of all stages, in their order; every stage must give one."""
        future: Future[list[_Value]] = Future()
        if self._group is None:
            future.set_result([value])
        else:
            self._queued.put((value, future))
        return future

    def _exchange(self) -> None:
        """The thread of exchanges: gather queued values from all stages, one after the other."""
        while True:
            value, future = self._queued.get()
            values: list[Any] = [None] * dist.get_world_size(group=self._group)
            try:
                dist.all_gather_object(values, value, group=self._group)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(values)


class _BackupState(NamedTuple):
    usable: bool
    trusted: bool


@dataclass(eq=False)
class StagePages:
    """State of the host pages of all stages. Scheduler thread only, except :meth:`brought`."""

    _weights: ModelWeights
    _arena: Arena
    _host_pages: int  # number of them, the same on every stage
    # Makes a group of the stages, on all of them; None if there is one.
    _new_group: Callable[[], Group]

    def __post_init__(self) -> None:
        self._group = self._new_group()
        self._stages = PipelineStages[_BackupState](self._new_group())
        self.alone = self._group is None
        self._is_first = self.alone or dist.get_rank(group=self._group) == 0
        self._decided: list[SimpleQueue[bool]] = []  # of each other stage, on the first one
        if self._is_first and not self.alone:
            # A thread for each: one stage may be waiting for another that waits for a decision.
            for stage in range(1, dist.get_world_size(group=self._group)):
                self._decided.append(SimpleQueue())
                name, send = f"hcache-stage-{stage}", partial(self._send_decisions, stage)
                threading.Thread(target=send, name=name, daemon=True).start()
        self._backups = self._confirmed = 0  # numbers of the last one, of the last known to all
        self._backup_of: Ids = np.zeros(self._host_pages, np.int64)  # its number, by host page
        self._unsent: deque[Ids] = deque()  # pages of backups whose state is not known here
        self._exchanged: deque[tuple[int, Future[list[_BackupState]]]] = deque()  # by number

    def backed_up(self, host_pages: Ids) -> None:
        """The next backup went to ``host_pages`` (int64 ``[pages]``), on every stage."""
        if self.alone:
            return
        self._backups += 1
        self._backup_of[host_pages] = self._backups
        self._unsent.append(host_pages)

    def brought(self, host_pages: Ids) -> None:
        """L3 is about to fill ``host_pages``. Any thread that owns them."""
        self._backup_of[host_pages] = _BROUGHT

    def exchange_messages(self) -> None:
        """Send states of backups that this stage knows; note states that all have sent; no wait."""
        while self._unsent and (usable := self._arena.usable(self._unsent[0])) is not None:
            number = self._backups - len(self._unsent) + 1
            self._unsent.popleft()
            state = _BackupState(usable, self._weights.quarantine is None)
            self._exchanged.append((number, self._stages.gather(state)))
        while self._exchanged and self._exchanged[0][1].done():
            number, gathered = self._exchanged.popleft()
            self._note_states(number, gathered)

    def have(self, host_pages: Ids) -> bool:
        """True if all stages have ``host_pages``, as far as the first knows; on others always."""
        if self.alone or not self._is_first:
            return True
        return bool((self._backup_of[host_pages] <= self._confirmed).all())

    def decide(self, verdict: bool) -> bool:
        """The first stage's ``verdict``, on every stage; each must call this for the same batch.
        The other stages wait for the verdict; the first stage never waits."""
        if not self._is_first:
            message = torch.empty((), dtype=torch.int32)
            dist.recv(message, group_src=0, group=self._group)
            return bool(message)
        for decided in self._decided:
            decided.put(verdict)
        return verdict

    def _send_decisions(self, stage: int) -> None:
        while True:
            message = torch.tensor(self._decided[stage - 1].get(), dtype=torch.int32)
            dist.send(message, group_dst=stage, group=self._group)

    def _note_states(self, number: int, gathered: Future[list[_BackupState]]) -> None:
        """All stages sent states of backup ``number``: its pages are lost if one lacks them."""
        try:
            stages = gathered.result()
        except Exception as error:
            logger.error("hcache: pipeline stages cannot exchange messages: %s", error)
            stages = [_BackupState(usable=False, trusted=True)]
        if not all(state.usable for state in stages):
            self._backup_of[self._backup_of == number] = _LOST
        self._confirmed = number
        if not all(state.trusted for state in stages):
            self._weights.begin_quarantine("another pipeline stage failed its self-check")
