"""Expected seconds of hits: to read and compute them, alone, together, and behind others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, takewhile

from hcache_backend.plan.restore import completion_seconds, side_by_side
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.hit import Hit, Prefetch


class HitTimes:
    """Expected seconds, by the estimates of ``l3``. Any thread."""

    def __init__(self, l3: L3Progress) -> None:
        self._l3, self._estimates = l3, l3.estimates

    def seconds_to_read(self, hit: Hit) -> float:
        """To read it from L3, alone; an unknown part counts as 0."""
        read, shared = self._estimates.read, self._estimates.shared
        near, far = read.seconds(hit.tokens - hit.shared), shared.seconds(hit.shared)
        return (near or 0.0) + (far or 0.0)

    def seconds_saved(self, hit: Hit) -> float | None:
        """Seconds of computing that the hit saves, before its ``rest``; None if unknown."""
        prefill = self._estimates.prefill
        all_of_it = prefill.seconds(hit.tokens + hit.rest, hit.prefix)
        rest = prefill.seconds(hit.rest, hit.prefix + hit.tokens)
        return None if all_of_it is None or rest is None else max(0.0, all_of_it - rest)

    def seconds_to_have(self, hit: Hit, reading: float, *, begun: bool = True) -> float:
        """Seconds until ``hit`` is in host memory, if L3 alone takes ``reading``. Slices recompute
        its front meanwhile if L3 has a worthwhile part in it. Once it has ``begun``, any part is
        worthwhile: a small change of the estimates must not throw away what was read and
        recomputed."""
        if hit.recomputing is None or not hit.tokens:
            return reading
        recomputing = hit.recomputing(hit.tokens, hit.prefix)
        share = min(hit.reachable, hit.tokens) / hit.tokens
        return (side_by_side if begun else completion_seconds)(reading, recomputing, share)

    def seconds_left(self, rest: Hit | None, slowdown: float = 1.0) -> float:
        """To have the rest of a hit, if any, from an L3 that is slower than estimated."""
        return self.seconds_to_have(rest, slowdown * self.seconds_to_read(rest)) if rest else 0.0

    def seconds_until_read(self, rests: Iterable[Hit | None]) -> list[float]:
        """Until each of these is read, one after the other."""
        return [0.0, *accumulate(map(self.seconds_left, rests))][:-1]

    def seconds_to_finish(
        self, tokens: int, recomputing: float, share: float, *, longest: bool = False
    ) -> tuple[float, float]:
        """Two estimates of the seconds to finish ``tokens`` of a prefetch that are neither read nor
        recomputed: reading and recomputing in parallel; and reading only. Recomputing all takes
        ``recomputing`` seconds, and can reach a ``share`` of them. ``longest``: as in
        :meth:`.L3Progress.seconds_to_read`."""
        reading = self._l3.seconds_to_read(tokens, longest=longest)
        return side_by_side(reading, recomputing, share), reading

    def seconds_behind(
        self, others: Iterable[Prefetch], hit: Hit, now: float, enough: float = math.inf
    ) -> float:
        """Seconds to have ``hit`` in host memory, if what ``others`` have not read is read before
        it. The sum stops at the first that makes it more than ``enough``. ``now``: by the clock."""
        earlier, slowdown = 0.0, self._l3.slowdown(now)
        for one in others:
            if earlier > enough:
                break
            earlier += self.seconds_left(one.rest, slowdown)
        return earlier + self.seconds_to_have(
            hit, slowdown * self.seconds_to_read(hit), begun=False
        )

    def seconds_until_loaded(self, hit: Hit, until_arrived: float) -> float:
        """To have it on the device, if it is in host memory in ``until_arrived`` seconds."""
        return until_arrived + self._estimates.seconds_to_load(hit.tokens)

    def seconds_alone(self, hit: Hit, reading: float) -> float:
        """To have it on the device, with nothing else under way; as :meth:`seconds_to_have`."""
        return self.seconds_until_loaded(hit, self.seconds_to_have(hit, reading, begun=False))

    def seconds_to_compute(
        self, hit: Hit, busy: float, others: Iterable[Prefetch], now: float
    ) -> float | None:
        """Cost in seconds of computing ``hit`` instead of reading it: until it is computed on a GPU
        that is ``busy`` so many seconds before; plus the delay of each of ``others`` (prefetches)
        that is read sooner than that, as it waits for the GPU. None if unknown."""
        if (saved := self.seconds_saved(hit)) is None:
            return None
        alone, slowdown = busy + saved, self._l3.slowdown(now)
        reads = (self.seconds_left(rest, slowdown) for one in others if (rest := one.rest))
        delayed = takewhile(alone.__gt__, accumulate(reads))
        return alone + sum(alone - read for read in delayed)

    def seconds_reading(self, prefetch: Prefetch, now: float) -> float:
        """Since the read of ``prefetch``, or the present tier of a trial, began; 0 if not read."""
        reading = self._l3.reading
        if reading is None or reading.prefetch is not prefetch:
            return 0.0
        return now - (reading.tier_start if prefetch.trial else reading.start)

    def seconds_going_on(self, prefetch: Prefetch, rest: Hit, begin: float, now: float) -> float:
        """Seconds to have the ``rest`` of a prefetch, whose read begins in ``begin`` seconds or has
        begun: then its pace so far counts, if it is late or a trial."""
        reading, trial = self._l3.reading, prefetch.trial is not None
        if reading is None or reading.prefetch is not prefetch:
            return begin if trial else begin + self.seconds_left(rest)
        arrived = max(0, prefetch.arrived - (reading.tokens_before_tier if trial else 0))
        pace = self.seconds_reading(prefetch, now) / (arrived + prefetch.step)
        if trial:  # L3 alone
            return pace * rest.tokens
        if (in_time := self._l3.seconds_left_in_time(now)) is None:
            return self.seconds_to_have(rest, max(pace * rest.tokens, self.seconds_to_read(rest)))
        if rest.recomputing is None:
            return in_time
        return self.seconds_to_have(rest, self._l3.seconds_to_read(rest.tokens, rest.shared))
