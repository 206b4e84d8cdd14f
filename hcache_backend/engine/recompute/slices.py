"""How many tokens are recomputed in one turn of the scheduler."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hcache_backend.engine.hits.estimates import Curve, Estimate
from hcache_backend.restore.report import RunningRestore

_UNFINISHED = 2
"""Slices that are launched and not done: one runs while the next one is being launched. A forward
pass waits for so many at most."""


class _Slice(NamedTuple):
    restore: RunningRestore
    tokens: int
    prefix: int
    layers: int


class SliceBudget:
    """Bounds a slice of a recomputation by the time that it takes, as far as that is known.

    Args:
        seconds: What a slice may take where nobody else wants the GPU.
        tokens: How many it may have at most.
        curve: Recomputing one layer.
        known: Whether the curve is in seconds; without it the first slice is as short as can be.

    Attributes:
        tokens: As above.
    """

    def __init__(self, seconds: float, tokens: int, curve: Curve, *, known: bool) -> None:
        self.tokens = tokens
        self._seconds = seconds
        self._layer = Estimate(curve, known=known)
        self._launched: deque[_Slice] = deque()

    def pages(self, most: int, page_size: int, prefix: int, layers: int, share: float = 1.0) -> int:
        """How many pages of at most ``most`` (at least 1) a slice may have now; 0: none.

        Each has ``page_size`` tokens, of which ``layers`` layers are recomputed behind ``prefix``
        tokens, in ``share`` of what a slice may take.
        """
        if not share or self.unfinished() >= _UNFINISHED:
            return 0
        least, too_many = 1, most + 1
        while too_many - least > 1:
            pages = (least + too_many) // 2
            seconds = self._layer.seconds(pages * page_size, prefix)
            if seconds is not None and seconds * layers <= share * self._seconds:
                least = pages
            else:
                too_many = pages
        return least

    def unfinished(self) -> int:
        """How many slices are launched and not done."""
        while self._launched and self._launched[0].restore.done():
            self._learn(self._launched.popleft())
        return len(self._launched)

    def launched(self, restore: RunningRestore, prefix: int, layers: int) -> None:
        """A slice was launched: ``restore``."""
        self._launched.append(_Slice(restore, restore.tokens, prefix, layers))

    def _learn(self, done: _Slice) -> None:
        seconds = done.restore.report().busy_ms("compute") / 1e3
        if done.restore.failed is None:
            self._layer.measured(done.tokens, done.prefix, max(seconds, 1e-9) / done.layers)
