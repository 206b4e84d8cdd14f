"""Requests that wait for L3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hcache_backend.prefetch.costs import Hit, Recomputing


@dataclass
class Asked:
    """A request for whose prefix L3 is asked."""

    prefix: int  # tokens before the prefix
    recomputing: Recomputing | None = None  # as in Hit
    # tokens not yet arrived that slices can still reach
    reachable: float = math.inf
    hit: Hit | None = None  # is being read, or will be
    arrived: int = 0  # tokens of the hit
    # The whole hit, if it, or a small part of it, is read to measure the present speed of L3.
    tried: Hit | None = None

    @property
    def rest(self) -> Hit | None:
        """The part of the hit that has not arrived; None if there is none."""
        if not self.left or self.hit is None:
            return None
        return self.hit.without(self.arrived)._replace(reachable=self.reachable)

    @property
    def left(self) -> int:
        return self.hit.tokens - self.arrived if self.hit is not None else 0


def delays(asked: Iterable[Asked], seconds: float, until_there: Callable[[Hit], float]) -> float:
    """Total extra wait, summed over pending requests, while the GPU is busy for ``seconds``. Hits
    come one after the other; ``until_there`` gives the time for the rest of one."""
    there, late = 0.0, 0.0
    for rest in (one.rest for one in asked):
        if rest is not None:
            there += until_there(rest)
            late += max(0.0, seconds - there)
    return late
