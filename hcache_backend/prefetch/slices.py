"""The number of tokens to recompute in one turn of the scheduler."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from hcache_backend.prefetch.estimates import Curve, Estimate
from hcache_backend.restore.report import RunningRestore

# Slices that are launched and not done: one runs while the next is launched. A forward pass waits
# for at most this many.
_UNFINISHED = 2
# of a slice that has the GPU alone: fewer take as long, because all weights are read
_LEAST_TOKENS = 256


class _Slice(NamedTuple):
    restore: RunningRestore
    tokens: int
    prefix: int
    layers: int


class SliceBudget:
    """Bounds a slice of a recomputation by its time, as far as that is known. A slice may take
    ``seconds`` if it has the GPU alone, and have ``tokens``. ``curve``: recomputing one layer.
    ``known``: it is in seconds; otherwise the first slice is as short as possible."""

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
        """Number of pages, up to ``most`` (at least 1), that a slice may have now; 0: none. Each
        has ``page_size`` tokens, of which ``layers`` layers are recomputed behind ``prefix``
        tokens, in ``share`` of the time of a slice. No page is recomputed that takes longer than
        ``within`` seconds, and several only if they take at most ``best`` seconds."""
        if not share or self.full:
            return 0
        if (self._layer.seconds(page_size, prefix) or 0.0) * layers > within:
            return 0
        return self._slice(most, page_size, prefix, layers, share, min(within, best))

    def seconds(self, tokens: int, page_size: int, prefix: int, layers: int) -> float:
        """Time of slices of ``tokens`` in all, one after the other, without other users of the GPU;
        infinite if unknown. Arguments as in :meth:`pages`. Any thread."""
        middle, most = prefix + tokens // 2, max(1, tokens // page_size)
        pages = self._slice(most, page_size, middle, layers, 1.0, math.inf)
        layer = self._layer.seconds(pages * page_size, middle)
        return math.inf if layer is None else layer * layers * tokens / (pages * page_size)

    def _slice(
        self, most: int, page_size: int, prefix: int, layers: int, share: float, within: float
    ) -> int:
        """Number of pages of a slice that may take ``within`` seconds."""
        longest = min(share * self._seconds, within)
        pages = self._longest(most, page_size, prefix, layers, longest)
        if share == 1.0:
            least = min(most, max(1, _LEAST_TOKENS // page_size))
            pages = max(pages, self._longest(least, page_size, prefix, layers, within))
        return pages

    def _longest(self, most: int, page_size: int, prefix: int, layers: int, seconds: float) -> int:
        """Number of pages that take at most ``seconds``, but at least one."""
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
        return self.unfinished() >= _UNFINISHED

    def unfinished(self) -> int:
        while self._launched and self._launched[0].restore.done():
            self._learn(self._launched.popleft())
        return len(self._launched)

    def launched(self, restore: RunningRestore, prefix: int, layers: int) -> None:
        self._launched.append(_Slice(restore, restore.tokens, prefix, layers))

    def _learn(self, done: _Slice) -> None:
        seconds = done.restore.report().busy_ms("compute") / 1e3
        if done.restore.failed is None:
            self._layer.measured(done.tokens, done.prefix, max(seconds, 1e-9) / done.layers)
