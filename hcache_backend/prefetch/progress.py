"""What HiCache's L3 threads are at: one looks pages up, another one reads a prefetch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hcache_backend.prefetch.costs import Costs
from hcache_backend.prefetch.estimates import Estimate

OVERDUE_SECONDS = 0.5
"""A read is overdue when the next part of it comes so much later than after twice the time that it
should take, a look-up when it takes so long."""
LATE = 1.25
"""A read that takes so many times as long as it should is late: how long it still takes is then
told by what has arrived, not by what reads took before."""
LONGEST_PART_SECONDS = 5.0
"""No part should take longer, whatever reads took before: one that hung must not teach patience. Or
as long as computing it takes, if that is more."""


@dataclass
class Reading:
    """A prefetch that is being read.

    Attributes:
        start: When it began; the clock's seconds.
        whole: Tokens of it.
        wanted: Those of them that are to be read.
        step: Tokens of a part, which are reported together.
        last: When a part came last, or it began.
        behind: How many of the wanted tokens, at their end, are behind the page store.
        tokens: Tokens that were read.
        from_behind: How many of them came from behind, ...
        seconds_behind: ...and the time that what is behind was asked.
        gave_up: Whether it was not waited for any longer, or failed.
    """

    request_id: str
    start: float
    whole: int
    wanted: int
    step: int
    last: float
    behind: int = 0
    tokens: int = 0
    from_behind: int = 0
    seconds_behind: float = 0.0
    gave_up: bool = False


class L3Progress:
    """Told by HiCache's threads what they begin and end; any thread may ask whether L3 answers.

    Attributes:
        reading: The prefetch that is being read, or None.
    """

    def __init__(self, costs: Costs, clock: Callable[[], float]) -> None:
        self.reading: Reading | None = None
        self._costs = costs
        self._clock = clock
        self._looking_since: float | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """L3 is asked within the block."""
        self._looking_since = self._clock()
        try:
            yield
        finally:
            self._looking_since = None

    def may_take_longer(self, seconds: float) -> None:
        """The look-up goes on where it may take so long again."""
        if self._looking_since is not None:
            self._looking_since += seconds

    def begin(self, request_id: str, wanted: int, step: int, behind: int) -> None:
        """L3 is going to be read: ``wanted`` tokens, ``step`` at a time, the last from behind."""
        now = self._clock()
        self.reading = Reading(request_id, now, wanted, wanted, step, now, behind)

    def arrived(self, tokens: int) -> None:
        """So many more tokens were read."""
        if self.reading is not None:
            self.reading.tokens += tokens
            self.reading.last = self._clock()

    def spared(self, tokens: int) -> None:
        """So many tokens need not be read: they were recomputed meanwhile."""
        if self.reading is not None:
            self.reading.wanted -= tokens

    def waited(self, seconds: float) -> None:
        """L3 was not read for so long."""
        if self.reading is not None:
            self.reading.start += seconds
            self.reading.last += seconds

    def came_from_behind(self, tokens: int, seconds: float, *, gave_up: bool = False) -> None:
        """What is behind the page store was asked for so long, and gave so many tokens.

        ``gave_up``: it was not waited for any longer, or failed.
        """
        if self.reading is not None:
            self.reading.from_behind += tokens
            self.reading.seconds_behind += seconds
            self.reading.gave_up = self.reading.gave_up or gave_up

    def seems_overdue(self, now: float) -> bool:
        """Whether this rank's L3 does not answer."""
        looking, reading = self._looking_since, self.reading
        if looking is not None and now - looking > OVERDUE_SECONDS:
            return True
        if reading is None:
            return False
        longest = max(LONGEST_PART_SECONDS, self._costs.prefill.seconds(reading.step) or 0.0)
        expected = self._expected(reading, reading.step, min(reading.step, reading.behind))
        expected = longest if expected is None else min(expected, longest)
        return now - reading.last > 2 * expected + OVERDUE_SECONDS

    def slowdown(self, now: float) -> float:
        """How many times slower than it should be the read in progress is; at least 1."""
        reading = self.reading
        if reading is None:
            return 1.0
        tokens = reading.tokens + reading.step
        behind = min(reading.behind, max(0, tokens - reading.wanted + reading.behind))
        expected = self._expected(reading, tokens, behind)
        return max(1.0, (now - reading.start) / expected) if expected else 1.0

    def seconds_to_read(self, tokens: int, behind: int = 0) -> float:
        """How long the next ``tokens`` of what is being read take, so many of them from behind.

        Infinite: nobody knows.
        """
        reading = self.reading
        if reading is None:
            seconds = self._costs.reading(tokens, behind)
        else:
            seconds = self._expected(reading, tokens, behind)
        return math.inf if seconds is None else seconds * self.slowdown(self._clock())

    def left_in_time(self, now: float) -> float | None:
        """Seconds that the read in progress should still take; None: it is late, or who knows."""
        reading = self.reading
        if reading is None or self.slowdown(now) > LATE:
            return None
        expected = self._expected(reading, reading.wanted, reading.behind)
        return None if expected is None else max(0.0, expected - (now - reading.start))

    def _expected(self, reading: Reading, tokens: int, behind: int) -> float | None:
        """Seconds that some of its tokens, so many of them from behind, should take.

        That is their share of what all of it should take: what small reads took, or should take by
        the profile, says little of a part of a large one. None: nobody knows.
        """
        near = self._share(self._costs.read, reading.whole - reading.behind, tokens - behind)
        far = self._share(self._costs.behind, reading.behind, behind)
        return None if near is None or far is None else near + far

    @staticmethod
    def _share(reads: Estimate, whole: int, part: int) -> float | None:
        if not part:
            return 0.0
        whole = max(whole, part)
        seconds = reads.seconds(whole)
        return None if seconds is None else reads.like(whole, seconds, part)
