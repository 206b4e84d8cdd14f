"""When a hit is read although L3 was slow, to see whether it still is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hcache_backend.prefetch.costs import Costs, Hit
from hcache_backend.prefetch.progress import Reading

TRIAL_SECONDS = 10.0
"""When hits are refused because L3 is slow, one is read so long after the last read, ..."""
LONGEST_TRIAL_SECONDS = 320.0
"""...or after up to this time, twice as long after each trial that shows a slow L3, ..."""
TRIAL_REFUSALS = 4
"""...and after so many refused hits then: where requests are rare, not each of them is a trial."""
TRIAL_SHARE = 0.05
"""Only as much of it is read as should take this share of the time that computing it takes.
When that comes fast, the next hit is read whole, and judged like others after this share."""


@dataclass
class Trials:
    """When the next trial of an L3 is due.

    Attributes:
        last_read: When L3 was read last; the clock's seconds. None: never.
        promising: Whether the last trial came fast, so that the next one reads a whole hit.
    """

    last_read: float | None = None
    promising: bool = False
    _pause: float = TRIAL_SECONDS
    _refusals: int = 0

    def replaces(self, now: float) -> bool:
        """Whether a trial is due instead of the refusal of a hit."""
        if self.last_read is None:
            return True
        if now - self.last_read >= self._pause and not self._refusals:
            return True
        self._refusals = max(0, self._refusals - 1)
        return False

    def part(self, hit: Hit, kept: int, page: int, costs: Costs) -> int:
        """Tokens of a hit that a trial reads behind the first ``kept``, which are read anyway.

        Args:
            page: That is a multiple of so many tokens; 0: a part is worth nothing.
        """
        part = hit.tokens - kept
        if self.promising or not page:
            return part
        most = TRIAL_SHARE * (costs.saved(hit) or 0.0)
        while part > page and (costs.last_read(hit).seconds(part) or 0.0) > most:
            part = max(page, part // 2 // page * page)
        return part

    def not_one(self) -> None:
        """A hit was read since it seemed worth it: trials begin anew when that ends."""
        self._pause, self._refusals, self.promising = TRIAL_SECONDS, 0, False

    def ended(self, *, pays: bool) -> None:
        """A trial is over; the next one confirms at once what looks good."""
        longer = min(max(TRIAL_SECONDS, 2 * self._pause), LONGEST_TRIAL_SECONDS)
        self._pause, self.promising = (0.0 if pays else longer), pays
        self._refusals = 0 if pays else TRIAL_REFUSALS


def seconds_like(hit: Hit, reading: Reading, seconds: float, costs: Costs) -> float:
    """Seconds to read a hit that comes as fast as a part of it did, which took ``seconds``."""
    tokens, wanted, near = reading.tokens, hit.tokens, 0.0
    if hit.behind:
        tokens, seconds, wanted = reading.from_behind, reading.seconds_behind, hit.behind
        near = costs.least_reading(hit.tokens - hit.behind, 0)
    return near + costs.last_read(hit).like(tokens, seconds, wanted) if tokens else math.inf
