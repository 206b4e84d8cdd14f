"""Host pages that may be loaded, on a model that is divided into pipeline stages.

- No stage may wait for a later one on the scheduler thread: that one may wait for the first.
- So every stage backs up every node, if necessary with pages that are marked as lost. Once it
  knows, it says for each backup if its rows are whole.
- The first stage alone decides about loads, by what it has heard so far.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hcache_backend.arena import Ids
from hcache_backend.sglang.groups import FirstStage, PipelineStages

logger = logging.getLogger("hcache")

_BROUGHT = 0  # instead of a backup's number: L3 brought the page, to all stages or none
_LOST = np.iinfo(np.int64).max


class _Said(NamedTuple):
    whole: bool
    trusted: bool


class StagePages:
    """State of the host pages of all stages. All stages must construct it at one point. Scheduler
    thread only, except :meth:`brought`.

    ``host_pages``: number of pages, the same on every stage. ``whole(pages)``: True if their rows
    are there on this stage, None if unknown yet. ``lose_trust`` is called when another stage is not
    ``trusted``.
    """

    def __init__(
        self,
        host_pages: int,
        whole: Callable[[Ids], bool | None],
        trusted: Callable[[], bool],
        lose_trust: Callable[[str], None],
    ) -> None:
        self._whole = whole
        self._trusted = trusted
        self._lose_trust = lose_trust
        self._first = FirstStage()
        self._stages = PipelineStages()
        self._backups = self._confirmed = 0
        self._backup_of: npt.NDArray[np.int64] = np.zeros(host_pages, np.int64)
        self._unsaid: deque[Ids] = deque()
        self._unheard: deque[tuple[int, Future[list[_Said]]]] = deque()

    @property
    def alone(self) -> bool:
        return self._stages.alone

    def backed_up(self, host_pages: Ids) -> None:
        """The next backup went to ``host_pages`` (int64 ``[pages]``), on every stage."""
        if self.alone:
            return
        self._backups += 1
        self._backup_of[host_pages] = self._backups
        self._unsaid.append(host_pages)

    def brought(self, host_pages: Ids) -> None:
        """L3 is about to fill ``host_pages``. Any thread that owns them."""
        self._backup_of[host_pages] = _BROUGHT

    def talk(self) -> None:
        """Send and receive without a wait: what this stage knows, and the others' messages."""
        while self._unsaid and (whole := self._whole(self._unsaid[0])) is not None:
            number = self._backups - len(self._unsaid) + 1
            self._unsaid.popleft()
            self._unheard.append((number, self._stages.say(_Said(whole, self._trusted()))))
        while self._unheard and self._unheard[0][1].done():
            number, heard = self._unheard.popleft()
            self._hear(number, heard)

    def have(self, host_pages: Ids) -> bool:
        """True if the first stage has heard that all stages have ``host_pages``; True on others."""
        if self.alone or not self._first.is_here:
            return True
        return bool((self._backup_of[host_pages] <= self._confirmed).all())

    def decide(self, verdict: bool) -> bool:
        """The first stage's ``verdict``, on every stage; each must ask at the same point."""
        return self._first.decide(verdict)

    def _hear(self, number: int, heard: Future[list[_Said]]) -> None:
        try:
            stages = heard.result()
        except Exception as error:
            logger.error("hcache: pipeline stages cannot exchange messages: %s", error)
            stages = [_Said(whole=False, trusted=True)]
        if not all(said.whole for said in stages):
            self._backup_of[self._backup_of == number] = _LOST
        self._confirmed = number
        if not all(said.trusted for said in stages):
            self._lose_trust("another pipeline stage failed its self-check")
