"""Which backed-up pages are checked in service, which layers of them, and how often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

_LAYERS = 4
"""Layers of a page that are looked at."""

_SHARE = 1 / 10
"""Most of the scheduler thread's time that checks of one kind take."""

_BURST_SECONDS = 0.1
"""So much of it they may take at once."""

_Layer = TypeVar("_Layer")


class InTurn(Generic[_Layer]):
    """A few of ``layers``, and then the next few; all ranks get the same."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = deque(layers)

    def next(self) -> list[_Layer]:
        chosen = list(self._layers)[:_LAYERS]
        self._layers.rotate(-_LAYERS)
        return chosen


class Sample:
    """One of every so many pages; 0: none. The same on every rank."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._pages_before = 0

    def choose(self, pages: int) -> int | None:
        """Which of the next ``pages`` pages, if one."""
        if self._every == 0:
            return None
        if self._pages_before >= pages:
            self._pages_before -= pages
            return None
        chosen = self._pages_before
        self._pages_before = self._every - 1 - (pages - 1 - chosen) % self._every
        return chosen


class Pace:
    """Keeps checks to :data:`_SHARE` of the time, but for bursts of :data:`_BURST_SECONDS`."""

    def __init__(self) -> None:
        self._left = _BURST_SECONDS
        self._at = time.perf_counter()

    @property
    def rested(self) -> bool:
        """Whether there may be another check."""
        now = time.perf_counter()
        self._left = min(_BURST_SECONDS, self._left + (now - self._at) * _SHARE)
        self._at = now
        return self._left > 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """The block is a part of a check."""
        start = time.thread_time()  # others may have the processor meanwhile
        try:
            yield
        finally:
            self._left -= time.thread_time() - start
