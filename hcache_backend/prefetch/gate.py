"""Decides which L3 hits are read, and which running prefetches end; knows nothing of SGLang.

With T(n) seconds to read n tokens of a hit of N and compute the rest, T is concave, because prefill
grows faster than linearly: its minimum is at 0 or N. So a hit is read whole or refused. A prefetch
that turns out slower than computing what is left ends with what has arrived.

Computing a hit is behind what the GPU computes already, and delays hits that are read meanwhile:
both counts. While requests wait for the GPU, its time is all that counts: then a hit is read if its
load takes the GPU less time than computing it, however long L3 takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from hcache_backend import metrics
from hcache_backend.plan.restore import Restore
from hcache_backend.prefetch.asked import Asked, delays
from hcache_backend.prefetch.costs import Costs, Hit, Recomputing
from hcache_backend.prefetch.estimates import Estimate
from hcache_backend.prefetch.gpu import Gpu
from hcache_backend.prefetch.progress import L3Progress
from hcache_backend.prefetch.trials import TRIAL_SHARE, Trials, seconds_like

logger = logging.getLogger("hcache")

_ENDING_MARGIN = 1.25
"""A prefetch ends only if going on would be so many times slower: it is not ended for noise."""
_JUDGED = 4
"""Prefetches that are judged in a turn: L3 is read for one after the other."""
_REMEMBERED = 4096
_SILENCE_SECONDS = 60.0
"""Between two log lines about refused hits."""
_SHOWN_SECONDS = 1.0
"""Between two times that rates are shown."""


class Running(NamedTuple):
    """A prefetch in the scheduler's turn.

    Attributes:
        arrived: Tokens that all ranks have.
        step: Tokens of which arrivals are multiples.
        whole: Whether what has arrived is worth nothing without the rest.
        lost: How many of the tokens that have arrived are worth nothing without the rest.
        reachable: How many of those that have not arrived slices can reach; None: nobody knows yet.
    """

    request_id: str
    arrived: int
    step: int
    whole: bool
    lost: int = 0
    reachable: int | None = None


class HitGate:
    """Takes or refuses L3 hits, and ends prefetches. It never raises on purpose and never waits.

    Args:
        machine: What is known of the machine, or None.
        backend: The storage backend.
        min_gain: A hit is read if computing it takes at least so many times as long; 0: always.
        clock: Seconds.

    Attributes:
        costs: What it expects of operations.
        gpu: What it is at.
        l3: What HiCache's threads are at.
        unfinished: Prefetches that HiCache's threads are still at on some rank, also those that
            nobody waits for any more; the same on every rank.
        agreed_overdue: Whether L3 was overdue when the ranks last agreed.
    """

    def __init__(
        self,
        machine: Restore | None,
        backend: str,
        min_gain: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = Costs(machine)
        self.unfinished: set[Hashable] = set()
        self._backend = backend
        self._min_gain = min_gain
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[str, Asked] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()
        self.gpu = Gpu(clock)
        self.l3 = L3Progress(self.costs, clock)
        self._trials = (Trials(), Trials())  # of the page store, and of what is behind it
        self.agreed_overdue = False
        self._said: float | None = None
        self._shown: float | None = None
        self._show()

    def clear_metrics(self) -> None:
        """The backend is detached."""
        for operation in self.costs.rates():
            metrics.RATES.set(operation, self._backend, value=0)

    # ---- the scheduler thread ----

    def forget(self, request_id: str) -> None:
        """A new request comes, perhaps with the name of one that was refused."""
        with self._lock:
            self._refused.pop(request_id, None)

    def may_ask(self, request_id: str, prefix: int, recomputing: Recomputing | None = None) -> bool:
        """Whether L3 is to be asked for what follows ``prefix`` tokens of a request.

        Not while L3 is overdue, as all ranks have agreed: nobody would wait for the answer.
        ``recomputing``: as in :class:`Hit`.
        """
        if self.agreed_overdue:
            return False
        with self._lock:
            self._asked[request_id] = Asked(prefix, recomputing)
        return True

    def to_end(self, running: Sequence[Running]) -> list[bool]:
        """What this rank sees: for each prefetch whether it is to end; last, whether L3 is overdue.

        ``running`` are all, in the order in which they are read.
        """
        now = self._clock()
        verdicts, earlier = [], 0.0
        with self._lock:
            kept = {one.request_id for one in running}
            reading = self.l3.reading
            if reading is not None:  # perhaps for a request that does not wait any more
                kept.add(reading.request_id)
            self._asked = {name: asked for name, asked in self._asked.items() if name in kept}
            for one in running:
                asked = self._asked.get(one.request_id)
                if asked is not None:
                    asked.arrived = one.arrived
                    if one.reachable is not None:
                        asked.reachable = one.reachable
            overdue = self.l3.seems_overdue(now)
            for place, one in enumerate(running):
                asked = self._asked.get(one.request_id)
                ends = False
                if asked is not None and asked.rest is not None:
                    ends = place < _JUDGED and self._ends(asked, asked.rest, one, earlier, now)
                    earlier += self._until_there(asked.rest)
                verdicts.append(overdue or ends)
        return [*verdicts, overdue]

    def agreed(self, ended: Sequence[str], overdue: bool) -> None:
        """What every rank's :meth:`to_end` together say: whose prefetches end, and of L3."""
        before, self.agreed_overdue = self.agreed_overdue, overdue
        with self._lock:
            for request_id in ended:
                asked = self._asked.get(request_id)
                if asked is not None:
                    metrics.L3_TOKENS.count("ended", asked.left)
                    asked.hit = None
                self._refuse(request_id)
        if overdue and not before:
            metrics.PROBLEMS.count("l3_overdue")
            logger.warning(
                "hcache: L3 is not responding: prompts are computed instead until it does. "
                "Check the disks of `dirs`"
            )
        elif before and not overdue:
            logger.info("hcache: L3 responds again")

    def launched(self, tokens: int, prefix: float, loaded: int) -> int:
        """A batch is launched that computes this (see :meth:`prefilled`); its number."""
        computing = self.costs.prefill.seconds(tokens, prefix) or 0.0
        return self.gpu.begins(computing + self.costs.loaded(loaded))

    def prefilled(self, tokens: int, prefix: float, loaded: int, seconds: float) -> None:
        """A batch computed ``tokens`` behind ``prefix`` on average, and waited for a load.

        That was one of ``loaded`` tokens that L3 had brought.
        """
        costs = self.costs
        if not loaded:
            costs.prefill.measured(tokens, prefix, seconds)
            self._show()
            return
        computing = costs.prefill.seconds(tokens, prefix)
        if computing is not None:
            costs.load.measured(loaded, 0, max(seconds - computing, 1e-6))
            self._show()

    # ---- the thread that asks L3 ----

    def was_refused(self, request_id: str) -> bool:
        """Whether a hit of the request was refused, or its prefetch ended: that is final."""
        with self._lock:
            return request_id in self._refused

    def takes(
        self, request_id: str, tokens: int, wanted: int, behind: int = 0, page: int = 1
    ) -> int:
        """How many tokens of a hit this rank wants to be read: all, or none.

        Or those that the page store has, where what is behind it is slower than computing; or a
        few, to see whether L3 is as slow as it was.

        Args:
            tokens: Tokens of the hit.
            wanted: Tokens that L3 was asked for.
            behind: How many tokens of the hit, at its end, come from behind the page store.
            page: Parts of the hit are multiples of so many tokens; 0: a part is worth nothing.
        """
        now = self._clock()
        with self._lock:
            asked = self._asked.setdefault(request_id, Asked(0))
            hit = Hit(tokens, asked.prefix, wanted - tokens + 1, behind, asked.recomputing)
            asked.hit = asked.tried = None
            problem = self._too_slow(hit, now)
            taken = tokens if problem is None else self._part_of(hit, page, asked, now)
            if taken:
                asked.hit = hit.cut(taken)
            else:
                self._refuse(request_id)
        if taken < tokens:
            metrics.L3_TOKENS.count("slower", tokens - taken)
            if self._said is None or now - self._said > _SILENCE_SECONDS:
                self._said = now
                logger.info("hcache: %d tokens of a hit are computed: %s", tokens - taken, problem)
        return taken

    # ---- the thread that reads ----

    def read_begins(self, request_id: str, wanted: int, step: int) -> None:
        """L3 is going to be read: ``wanted`` tokens, ``step`` at a time."""
        with self._lock:
            asked, behind = self._asked.get(request_id), 0
            if asked is not None and asked.hit is not None:  # other ranks may have less of it
                asked.hit = asked.hit.cut(wanted)
                behind = asked.hit.behind
            self.l3.begin(request_id, wanted, step, behind)

    def read_ends(self) -> None:
        """What was begun is over, whatever came of it."""
        reading = self.l3.reading
        if reading is None:
            return
        now = self._clock()
        seconds = now - reading.start
        far = min(reading.from_behind, reading.tokens)  # after a missing page nothing counts
        near = reading.tokens - far
        wanted_far = max(reading.behind, far)
        seconds_near = seconds - reading.seconds_behind
        self._measured(self.costs.read, near, reading.wanted - wanted_far, seconds_near)
        if reading.gave_up and wanted_far:
            self._gave_up(wanted_far, reading.seconds_behind)
        else:
            self._measured(self.costs.behind, far, wanted_far, reading.seconds_behind)
        trials = self._trials[reading.behind > 0]
        trials.last_read = now
        with self._lock:
            self.l3.reading = None
            asked = self._asked.get(reading.request_id)
            if asked is None:
                return
            if asked.tried is None:
                trials.not_one()
            elif reading.gave_up or asked.hit is None:  # None: it was ended
                trials.ended(pays=False)
            elif 0 < reading.tokens == reading.wanted:
                whole = seconds_like(asked.tried, reading, seconds, self.costs)
                trials.ended(pays=self._pays(asked.tried, whole))
            elif reading.whole == asked.tried.tokens and not reading.wanted:
                # All of it was recomputed before the pages of a draft had come: these are read.
                trials.ended(pays=self._pays(asked.tried._replace(recomputing=None), seconds))
            # Else its client is gone, or pages are: that says nothing of the disk.

    def _measured(self, reads: Estimate, tokens: int, wanted: int, seconds: float) -> None:
        expected = reads.seconds(wanted)
        if not tokens and expected is not None and seconds > expected:
            tokens = wanted  # it failed, and that took longer than reading
        if tokens and wanted > 0:
            # What ended on the way counts as if the rest had come at the same pace.
            reads.measured(wanted, 0, max(seconds, 1e-6) * wanted / tokens)
            self._show()

    def _gave_up(self, wanted: int, seconds: float) -> None:
        """What is behind did not answer in time: nobody knows how long it would have taken."""
        behind, computing = self.costs.behind, self.costs.prefill.seconds(wanted) or 0.0
        expected = behind.seconds(wanted) or 0.0
        behind.measured(wanted, 0, max(expected, 2 * computing, 2 * seconds, 1e-6))
        self._show()

    # ---- estimates ----

    def _pays(self, hit: Hit, read: float) -> bool:
        """Whether to read a hit in so many seconds is worth it, if nothing else is under way."""
        saved, taken = self.costs.saved(hit), hit.until_there(read) + self.costs.loaded(hit.tokens)
        return saved is None or taken * self._min_gain <= saved

    def _computing(self, saved: float, others: list[Asked], now: float) -> float:
        """Seconds until what takes so long is computed, with those by which that delays others."""
        computing = self.gpu.seconds_busy(now) + saved
        until_there = partial(self._until_there, slowdown=self.l3.slowdown(now))
        return computing + delays(others, computing, until_there)

    def _too_slow(self, hit: Hit, now: float) -> str | None:
        """Why a hit is not to be read, or None. Under the lock."""
        if self.l3.seems_overdue(now):
            return "L3 is overdue"
        saved, others = self.costs.saved(hit), list(self._asked.values())
        if saved is None:
            return None
        computing = self._computing(saved, others, now)
        read = self._until_read(hit, now)
        taken = max(self.gpu.seconds_busy(now), read) + self.costs.loaded(hit.tokens)
        if taken * self._min_gain <= computing:
            return None
        return (
            f"to read and load {hit.tokens} tokens takes {taken:.3f} s, to compute them "
            f"{computing:.3f} s"
        )

    def _until_read(self, hit: Hit, now: float) -> float:
        """Seconds until a hit is there, behind those that are read already, one after the other.

        As far as they count and anybody knows. Under the lock.
        """
        if self.gpu.wanted:
            return 0.0
        slowdown = self.l3.slowdown(now)
        queued = [asked.rest for asked in self._asked.values() if asked.rest is not None]
        earlier = sum(self._until_there(rest, slowdown) for rest in queued)
        read = slowdown * self.costs.least_reading(hit.tokens, hit.behind)
        return earlier + hit.until_there(read)

    def _until_there(self, rest: Hit, slowdown: float = 1.0) -> float:
        """Seconds until what is left of a hit is there once L3 and slices are at it."""
        read = slowdown * self.costs.least_reading(rest.tokens, rest.behind)
        return rest.until_there(read, begun=True)

    def _ends(self, asked: Asked, rest: Hit, one: Running, earlier: float, now: float) -> bool:
        """Whether to end a prefetch whose ``rest`` is begun in so many (``earlier``) seconds."""
        if asked.hit is None or self.gpu.wanted or (one.whole and asked.tried is None):
            return False  # what is worth nothing in parts is read to its end, if not to try L3
        kept = 0 if one.whole else asked.arrived - one.lost
        saved = self.costs.saved(asked.hit.without(kept))
        if saved is None:
            return False
        reading, elapsed, going_on, in_time = self.l3.reading, 0.0, 0.0, None
        if reading is not None and reading.request_id == one.request_id:
            elapsed, in_time, earlier = now - reading.start, self.l3.left_in_time(now), 0.0
            going_on = elapsed * rest.tokens / (asked.arrived + one.step)  # at the pace so far
        if asked.tried is not None:
            rest = rest._replace(recomputing=None)  # L3 alone is tried
            if elapsed < TRIAL_SHARE * (self.costs.saved(asked.tried) or 0.0):
                return False
        elif in_time is not None and rest.recomputing is not None:
            going_on = self.l3.seconds_to_read(rest.tokens, rest.behind)
        elif in_time is not None:
            going_on = in_time
        else:
            going_on = max(going_on, self.costs.least_reading(rest.tokens, rest.behind))
        going_on = earlier + rest.until_there(going_on, begun=True)
        others = [other for other in self._asked.values() if other is not asked]
        computing = self._computing(saved, others, now)
        margin = 1.0 if one.whole else _ENDING_MARGIN
        return going_on * self._min_gain > margin * computing

    def _part_of(self, hit: Hit, page: int, asked: Asked, now: float) -> int:
        """Tokens of a hit to read although all of it is too slow. Under the lock."""
        near, kept = hit.cut(hit.tokens - hit.behind) if page else hit, 0
        if 0 < near.tokens < hit.tokens and self._too_slow(near, now) is None:
            kept = near.tokens
        tried = hit if kept or not near.tokens else near
        if not self._is_trial_due(tried, now):
            return kept
        asked.tried = tried
        return kept + self._trials[tried.behind > 0].part(tried, kept, page, self.costs)

    def _is_trial_due(self, hit: Hit, now: float) -> bool:
        if not self._pays(hit, 0.0):
            return False  # however fast L3 is
        busy = self.l3.reading is not None or any(asked.left for asked in self._asked.values())
        if busy or self.l3.seems_overdue(now):
            return False
        return self._trials[hit.behind > 0].replaces(now)

    # ---- what is remembered ----

    def _refuse(self, request_id: str) -> None:
        self._refused[request_id] = None
        if len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)

    def _show(self) -> None:
        now = self._clock()
        if self._shown is not None and now - self._shown < _SHOWN_SECONDS:
            return
        self._shown = now
        for operation, rate in self.costs.rates().items():
            metrics.RATES.set(operation, self._backend, value=rate)
