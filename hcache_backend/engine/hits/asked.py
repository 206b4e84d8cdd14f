"""What requests wait for L3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hcache_backend.engine.hits.costs import Costs, Hit, Recomputing


@dataclass
class Asked:
    """A request whose prefix L3 is asked for.

    Attributes:
        prefix: Tokens before that.
        recomputing: See :class:`Hit`.
        hit: What is being read, or will be; None: nothing yet.
        arrived: Tokens of it that have arrived.
        tried: Where it is read to see how fast L3 is by now: all of the hit, of which it may be a
            small part.
    """

    prefix: int
    recomputing: Recomputing | None = None
    hit: Hit | None = None
    arrived: int = 0
    tried: Hit | None = None

    @property
    def left(self) -> int:
        return self.hit.tokens - self.arrived if self.hit is not None else 0

    @property
    def left_behind(self) -> int:
        return min(self.hit.behind, self.left) if self.hit is not None else 0


def left(asked: Iterable[Asked]) -> tuple[int, int]:
    """How many tokens are still to be read, and how many of them from behind the page store."""
    each = list(asked)
    return sum(one.left for one in each), sum(one.left_behind for one in each)


def delays(asked: Iterable[Asked], seconds: float, costs: Costs, slowdown: float) -> float:
    """Seconds that requests wait together if the GPU has time for none of them for ``seconds``.

    Hits come one after the other, ``slowdown`` times slower than L3 was.
    """
    queued, behind, late = 0, 0, 0.0
    for one in asked:
        if one.left:
            queued, behind = queued + one.left, behind + one.left_behind
            late += max(0.0, seconds - slowdown * costs.least_reading(queued, behind))
    return late
