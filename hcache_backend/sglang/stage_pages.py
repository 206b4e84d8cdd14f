"""Which host pages may be loaded where the model is divided into pipeline stages.

No stage may wait for a later one on the scheduler thread: that one may be waiting for what the
first does next. So every stage backs up every node, if need be with pages that are marked as lost,
and says of each backup, once it knows, whether its rows are whole. The first stage alone decides
about loads, by what it has heard so far.
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

_BROUGHT = 0
"""In place of a backup's number: L3 brought the page, to all stages or none."""
_LOST = np.iinfo(np.int64).max


class _Said(NamedTuple):
    """What a stage says of one backup."""

    whole: bool
    trusted: bool


class StagePages:
    """What is known of the host pages of all stages. All stages must construct it at one point.

    Only the scheduler thread may use it, but for :meth:`brought`.

    Args:
        host_pages: How many HiCache may allocate; the same on every stage.
        whole: Whether the rows of pages are there on this stage; None: nobody knows yet.
        trusted: Whether this stage trusts its pages.
        lose_trust: Called when another stage does not.
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
        """Whether this stage is the only one."""
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
        """Say what is known by now, and listen; nothing is waited for."""
        while self._unsaid and (whole := self._whole(self._unsaid[0])) is not None:
            number = self._backups - len(self._unsaid) + 1
            self._unsaid.popleft()
            self._unheard.append((number, self._stages.say(_Said(whole, self._trusted()))))
        while self._unheard and self._unheard[0][1].done():
            number, heard = self._unheard.popleft()
            self._hear(number, heard)

    def have(self, host_pages: Ids) -> bool:
        """Whether the first stage has heard that all stages have ``host_pages``; others: True."""
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
