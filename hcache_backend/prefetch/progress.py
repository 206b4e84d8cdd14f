"""The state of HiCache's L3 threads: one looks pages up, another one reads a prefetch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hcache_backend.prefetch.estimates import Estimate, Estimates
from hcache_backend.prefetch.prefetch import Prefetch

# A look-up is stalled after this time; a read, if its next part comes later than this plus twice
# its expected time.
STALLED_SECONDS = 0.5
# A read that takes this many times its expected time is late. Its rest is then estimated by what
# has arrived, not by earlier reads.
LATE = 1.25
# Longest expected time of a part, after any earlier reads, because a read that hung must not teach
# patience. Or the time to compute the part, if that is more.
LONGEST_PART_SECONDS = 5.0


@dataclass
class Reading:
    """The read of a prefetch; times are the clock's seconds."""

    prefetch: Prefetch
    start: float
    whole: int  # tokens of it
    wanted: int  # tokens to read
    step: int  # tokens of a part, which are reported together
    last: float  # when the last part came, or the read began
    tier: float  # when the read of the present tier began
    shared: int = 0  # wanted tokens, at the end, in the shared tier
    tokens: int = 0  # read so far, ...
    from_shared: int = 0  # ...those of them from the shared tier, ...
    seconds_shared: float = 0.0  # ...and the time of the requests to it
    gave_up: bool = False  # it failed, or did not answer in time

    @property
    def before(self) -> int:
        """Tokens that were read before the present tier."""
        near = self.whole - self.shared
        return near if self.shared and self.tokens >= near else 0


class L3Progress:
    """HiCache's threads report their work here; any thread may ask for the state of L3."""

    def __init__(
        self, estimates: Estimates | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.estimates = estimates or Estimates()
        self.clock = clock
        self.reading: Reading | None = None  # the prefetch that is being read
        self._looking_since: float | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """L3 looks up within the block."""
        self._looking_since = self.clock()
        try:
            yield
        finally:
            self._looking_since = None

    def may_take_longer(self, seconds: float) -> None:
        """Allow the present look-up ``seconds`` more."""
        if self._looking_since is not None:
            self._looking_since += seconds

    def begin(self, prefetch: Prefetch, wanted: int, step: int, shared: int) -> None:
        """L3 will be read, ``step`` tokens at a time, the last ``shared`` from the shared tier."""
        now = self.clock()
        self.reading = Reading(prefetch, now, wanted, wanted, step, now, now, shared)

    def arrived(self, tokens: int) -> None:
        reading = self.reading
        if reading is not None:
            before = reading.before
            reading.tokens += tokens
            reading.last = self.clock()
            if reading.before != before:
                reading.tier = reading.last

    def spared(self, tokens: int) -> None:
        """``tokens`` need not be read: they were recomputed."""
        if self.reading is not None:
            self.reading.wanted -= tokens

    def waited(self, seconds: float) -> None:
        """L3 was not read for ``seconds``."""
        if self.reading is not None:
            self.reading.start += seconds
            self.reading.tier += seconds
            self.reading.last += seconds

    def came_from_shared(self, tokens: int, seconds: float, *, gave_up: bool = False) -> None:
        """The shared tier took ``seconds`` for ``tokens``; ``gave_up``: it failed, or was too
        slow."""
        if self.reading is not None:
            self.reading.from_shared += tokens
            self.reading.seconds_shared += seconds
            self.reading.gave_up = self.reading.gave_up or gave_up

    def seems_stalled(self, now: float) -> bool:
        looking, reading = self._looking_since, self.reading
        if looking is not None and now - looking > STALLED_SECONDS:
            return True
        if reading is None:
            return False
        computing = self.estimates.prefill.seconds(reading.step) or 0.0
        longest = max(LONGEST_PART_SECONDS, computing)
        expected = self._expected(reading, reading.step, min(reading.step, reading.shared))
        expected = longest if expected is None else min(expected, longest)
        return now - reading.last > 2 * expected + STALLED_SECONDS

    def slowdown(self, now: float) -> float:
        """Time of the present read relative to its expected time; at least 1."""
        reading = self.reading
        if reading is None:
            return 1.0
        tokens = reading.tokens + reading.step
        shared = min(reading.shared, max(0, tokens - reading.wanted + reading.shared))
        expected = self._expected(reading, tokens, shared)
        return max(1.0, (now - reading.start) / expected) if expected else 1.0

    def seconds_to_read(self, tokens: int, shared: int = 0) -> float:
        """Expected time of the next ``tokens``, ``shared`` of them from the shared tier; infinite
        if unknown."""
        reading = self.reading
        if reading is None:
            seconds = self.estimates.reading(tokens, shared)
        else:
            seconds = self._expected(reading, tokens, shared)
        return math.inf if seconds is None else seconds * self.slowdown(self.clock())

    def left_in_time(self, now: float) -> float | None:
        """Expected rest of the present read, in seconds; None if it is late, or unknown."""
        reading = self.reading
        if reading is None or self.slowdown(now) > LATE:
            return None
        expected = self._expected(reading, reading.wanted, reading.shared)
        return None if expected is None else max(0.0, expected - (now - reading.start))

    def _expected(self, reading: Reading, tokens: int, shared: int) -> float | None:
        """Expected seconds of ``tokens`` of a read, or None: their share of the whole read, because
        small reads say little about a part of a large one."""
        estimates = self.estimates
        near = self._share(estimates.read, reading.whole - reading.shared, tokens - shared)
        far = self._share(estimates.shared, reading.shared, shared)
        return None if near is None or far is None else near + far

    @staticmethod
    def _share(reads: Estimate, whole: int, part: int) -> float | None:
        if not part:
            return 0.0
        whole = max(whole, part)
        seconds = reads.seconds(whole)
        return None if seconds is None else reads.like(whole, seconds, part)
