"""Trials: reads of hits after L3 was slow, to see if it still is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hcache_backend.prefetch.costs import Costs, Hit
from hcache_backend.prefetch.progress import Reading

TRIAL_SECONDS = 10.0  # from the last read to the next trial while hits are refused, ...
# ...twice as long after each trial that shows a slow L3, up to this, ...
LONGEST_TRIAL_SECONDS = 320.0
TRIAL_REFUSALS = 4  # ...and after this many refused hits: if requests are rare, not each is a trial
# A trial reads only the part of a hit that should take this share of the time to compute the hit.
# If that comes fast, the next hit is read whole, and judged like others after this share.
TRIAL_SHARE = 0.05


@dataclass
class Trials:
    """The time of the next trial of an L3."""

    last_read: float | None = None  # of L3, in the clock's seconds
    promising: bool = False  # the last trial came fast, so the next one reads a whole hit
    _pause: float = TRIAL_SECONDS
    _refusals: int = 0

    def replaces(self, now: float) -> bool:
        """Returns True if a trial is due instead of the refusal of a hit."""
        if self.last_read is None:
            return True
        if now - self.last_read >= self._pause and not self._refusals:
            return True
        self._refusals = max(0, self._refusals - 1)
        return False

    def part(self, hit: Hit, kept: int, page: int, costs: Costs) -> int:
        """Tokens of a hit that a trial reads behind the first ``kept``, which are read in any case:
        a multiple of ``page``; all if that is 0, because a part is worth nothing."""
        part = hit.tokens - kept
        if self.promising or not page:
            return part
        most = TRIAL_SHARE * (costs.saved(hit) or 0.0)
        while part > page and (costs.last_read(hit).seconds(part) or 0.0) > most:
            part = max(page, part // 2 // page * page)
        return part

    def not_one(self) -> None:
        """A hit was read because it seemed worth it: the pauses of trials begin anew."""
        self._pause, self._refusals, self.promising = TRIAL_SECONDS, 0, False

    def ended(self, *, pays: bool) -> None:
        """A trial is over; a good one is confirmed at once by the next."""
        longer = min(max(TRIAL_SECONDS, 2 * self._pause), LONGEST_TRIAL_SECONDS)
        self._pause, self.promising = (0.0 if pays else longer), pays
        self._refusals = 0 if pays else TRIAL_REFUSALS


def seconds_like(hit: Hit, reading: Reading, seconds: float, costs: Costs) -> float:
    """Seconds to read a hit at the speed of a part of it, which took ``seconds``."""
    tokens, wanted, near = reading.tokens, hit.tokens, 0.0
    if hit.behind:
        tokens, seconds, wanted = reading.from_behind, reading.seconds_behind, hit.behind
        near = costs.least_reading(hit.tokens - hit.behind, 0)
    return near + costs.last_read(hit).like(tokens, seconds, wanted) if tokens else math.inf
