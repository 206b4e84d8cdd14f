"""The state of HiCache's L3 threads: one looks pages up, another one reads a prefetch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hcache_backend.prefetch.costs import Costs
from hcache_backend.prefetch.estimates import Estimate

# A look-up is overdue after this time; a read, if its next part comes later than this plus twice
# its expected time.
OVERDUE_SECONDS = 0.5
# A read that takes this many times its expected time is late. Its rest is then estimated by what
# has arrived, not by earlier reads.
LATE = 1.25
# Longest expected time of a part, after any earlier reads, because a read that hung must not teach
# patience. Or the time to compute the part, if that is more.
LONGEST_PART_SECONDS = 5.0


@dataclass
class Reading:
    """A prefetch that is being read; times are the clock's seconds."""

    request_id: str
    start: float
    whole: int  # tokens of it
    wanted: int  # tokens to read
    step: int  # tokens of a part, which are reported together
    last: float  # when the last part came, or the read began
    behind: int = 0  # wanted tokens, at the end, in the shared tier
    tokens: int = 0  # read so far, ...
    from_behind: int = 0  # ...those of them from the shared tier, ...
    seconds_behind: float = 0.0  # ...and the time of the requests to it
    gave_up: bool = False  # it failed, or did not answer in time


class L3Progress:
    """HiCache's threads report their work here; any thread may ask for the state of L3."""

    def __init__(self, costs: Costs, clock: Callable[[], float]) -> None:
        self.reading: Reading | None = None  # the prefetch that is being read
        self._costs = costs
        self._clock = clock
        self._looking_since: float | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """L3 looks up within the block."""
        self._looking_since = self._clock()
        try:
            yield
        finally:
            self._looking_since = None

    def may_take_longer(self, seconds: float) -> None:
        """Allow the present look-up ``seconds`` more."""
        if self._looking_since is not None:
            self._looking_since += seconds

    def begin(self, request_id: str, wanted: int, step: int, behind: int) -> None:
        """L3 will be read, ``step`` tokens at a time, the last ``behind`` from the shared tier."""
        now = self._clock()
        self.reading = Reading(request_id, now, wanted, wanted, step, now, behind)

    def arrived(self, tokens: int) -> None:
        if self.reading is not None:
            self.reading.tokens += tokens
            self.reading.last = self._clock()

    def spared(self, tokens: int) -> None:
        """``tokens`` need not be read: they were recomputed."""
        if self.reading is not None:
            self.reading.wanted -= tokens

    def waited(self, seconds: float) -> None:
        """L3 was not read for ``seconds``."""
        if self.reading is not None:
            self.reading.start += seconds
            self.reading.last += seconds

    def came_from_behind(self, tokens: int, seconds: float, *, gave_up: bool = False) -> None:
        """The shared tier took ``seconds`` for ``tokens``; ``gave_up``: it failed, or was too
        slow."""
        if self.reading is not None:
            self.reading.from_behind += tokens
            self.reading.seconds_behind += seconds
            self.reading.gave_up = self.reading.gave_up or gave_up

    def seems_overdue(self, now: float) -> bool:
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
        """Time of the present read relative to its expected time; at least 1."""
        reading = self.reading
        if reading is None:
            return 1.0
        tokens = reading.tokens + reading.step
        behind = min(reading.behind, max(0, tokens - reading.wanted + reading.behind))
        expected = self._expected(reading, tokens, behind)
        return max(1.0, (now - reading.start) / expected) if expected else 1.0

    def seconds_to_read(self, tokens: int, behind: int = 0) -> float:
        """Expected time of the next ``tokens``, ``behind`` of them from the shared tier."""
        reading = self.reading
        if reading is None:
            seconds = self._costs.reading(tokens, behind)
        else:
            seconds = self._expected(reading, tokens, behind)
        return math.inf if seconds is None else seconds * self.slowdown(self._clock())

    def left_in_time(self, now: float) -> float | None:
        """Expected rest of the present read, in seconds; None if it is late, or unknown."""
        reading = self.reading
        if reading is None or self.slowdown(now) > LATE:
            return None
        expected = self._expected(reading, reading.wanted, reading.behind)
        return None if expected is None else max(0.0, expected - (now - reading.start))

    def _expected(self, reading: Reading, tokens: int, behind: int) -> float | None:
        """Expected seconds of ``tokens`` of a read, or None: their share of the whole read, because
        small reads say little about a part of a large one."""
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
