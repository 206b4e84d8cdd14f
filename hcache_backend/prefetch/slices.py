"""How many tokens are recomputed in one turn of the scheduler."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from hcache_backend.prefetch.estimates import Curve, Estimate
from hcache_backend.restore.report import RunningRestore

_UNFINISHED = 2
"""Slices that are launched and not done: one runs while the next one is being launched. A forward
pass waits for so many at most."""
_LEAST_TOKENS = 256
"""Fewer take about as long, since all weights are read for them: a slice has so many where nobody
else wants the GPU."""


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

    def pages(
        self,
        most: int,
        page_size: int,
        prefix: int,
        layers: int,
        share: float = 1.0,
        within: float = math.inf,
        best: float = math.inf,
    ) -> int:
        """How many pages of at most ``most`` (at least 1) a slice may have now; 0: none.

        Each has ``page_size`` tokens, of which ``layers`` layers are recomputed behind ``prefix``
        tokens, in ``share`` of what a slice may take. No page is recomputed that takes longer than
        ``within`` seconds, and several only if they take at most ``best`` seconds.
        """
        if not share or self.full:
            return 0
        if (self._layer.seconds(page_size, prefix) or 0.0) * layers > within:
            return 0
        return self._slice(most, page_size, prefix, layers, share, min(within, best))

    def seconds(self, tokens: int, page_size: int, prefix: int, layers: int) -> float:
        """How long slices of ``tokens`` in all take, one after the other, without anybody else.

        Other arguments as in :meth:`pages`; infinite: nobody knows. Any thread.
        """
        middle, most = prefix + tokens // 2, max(1, tokens // page_size)
        pages = self._slice(most, page_size, middle, layers, 1.0, math.inf)
        layer = self._layer.seconds(pages * page_size, middle)
        return math.inf if layer is None else layer * layers * tokens / (pages * page_size)

    def _slice(
        self, most: int, page_size: int, prefix: int, layers: int, share: float, within: float
    ) -> int:
        """How many pages a slice has that may take ``within`` seconds."""
        longest = min(share * self._seconds, within)
        pages = self._longest(most, page_size, prefix, layers, longest)
        if share == 1.0:
            least = min(most, max(1, _LEAST_TOKENS // page_size))
            pages = max(pages, self._longest(least, page_size, prefix, layers, within))
        return pages

    def _longest(self, most: int, page_size: int, prefix: int, layers: int, seconds: float) -> int:
        """How many pages take at most ``seconds``, but at least one."""
        least, too_many = 1, most + 1
        while too_many - least > 1:
            pages = (least + too_many) // 2
            layer = self._layer.seconds(pages * page_size, prefix)
            if layer is not None and layer * layers <= seconds:
                least = pages
            else:
                too_many = pages
        return least

    @property
    def full(self) -> bool:
        """Whether no slice can be launched before another one is done."""
        return self.unfinished() >= _UNFINISHED

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
