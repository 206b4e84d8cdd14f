"""What requests wait for L3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hcache_backend.prefetch.costs import Hit, Recomputing


@dataclass
class Asked:
    """A request whose prefix L3 is asked for.

    Attributes:
        prefix: Tokens before that.
        recomputing: See :class:`Hit`.
        reachable: How many of its tokens that have not arrived slices can still reach.
        hit: What is being read, or will be; None: nothing yet.
        arrived: Tokens of it that have arrived.
        tried: Where it is read to see how fast L3 is by now: all of the hit, of which it may be a
            small part.
    """

    prefix: int
    recomputing: Recomputing | None = None
    reachable: float = math.inf
    hit: Hit | None = None
    arrived: int = 0
    tried: Hit | None = None

    @property
    def rest(self) -> Hit | None:
        """What of it has not arrived; None: nothing."""
        if not self.left or self.hit is None:
            return None
        return self.hit.without(self.arrived)._replace(reachable=self.reachable)

    @property
    def left(self) -> int:
        return self.hit.tokens - self.arrived if self.hit is not None else 0


def delays(asked: Iterable[Asked], seconds: float, until_there: Callable[[Hit], float]) -> float:
    """Seconds that requests wait together if the GPU has time for none of them for ``seconds``.

    Hits come one after the other; ``until_there`` says how long what is left of one takes.
    """
    there, late = 0.0, 0.0
    for rest in (one.rest for one in asked):
        if rest is not None:
            there += until_there(rest)
            late += max(0.0, seconds - there)
    return late
