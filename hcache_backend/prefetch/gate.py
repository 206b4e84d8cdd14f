"""Decides which L3 hits are read, and which running prefetches end; does not know SGLang.

- With T(n) seconds to read n tokens of a hit of N and compute the rest, T is concave, because
  prefill grows faster than linearly: its minimum is at 0 or N. So a hit is read whole or refused.
- A prefetch that is slower than computing what is left ends with what has arrived.
- Computing a hit is behind the GPU's present work, and delays hits that are read: both count.
- While requests wait for the GPU, only its time counts, however long L3 takes.
- An L3 that was slow is tried: all of a hit is read, and judged after a small part of its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from hcache_backend import metrics
from hcache_backend.metrics import logger
from hcache_backend.prefetch.estimates import Estimate, L3Progress, Reading
from hcache_backend.prefetch.hit import Hit, Prefetch, Recomputing, State
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.prefetch.times import HitTimes
from hcache_backend.ranks import Proposal, Turn

_ENDING_MARGIN = 1.25  # going on must be slower by this factor to end a prefetch: not by noise
_JUDGED = 4  # prefetches that are judged in a turn: L3 is read for one after the other
_SILENCE_SECONDS = 60.0  # between two log lines about refused hits
_SHOWN_SECONDS = 1.0  # between two updates of the shown rates
TRIAL_SECONDS = 10.0  # from the last read to the next trial while hits are refused, ...
LONGEST_TRIAL_SECONDS = 320.0  # ...twice as long after each slow trial, up to this
TRIAL_SHARE = 0.05  # a trial is judged after this share of the time to compute its hit

catching = partial(metrics.catching, "hit_gate", "a decision about an L3 hit failed; it is read")


class Gpu:
    """The GPU's launched work, from the scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wanted = False  # requests wait for it
        self.last_end = 0.0  # of any batch
        self._clock = clock
        self._number = 0
        # When the first work began, and the number and expected seconds of all launched work, in
        # order. One tuple, because other threads read it.
        self._work: tuple[float, tuple[tuple[int, float], ...]] = 0.0, ()

    def add_work(self, seconds: float) -> int:
        """Work of ``seconds`` is launched behind all earlier work; returns its number."""
        since, launched = self._work
        self._number += 1
        self._work = since if launched else self._clock(), (*launched, (self._number, seconds))
        return self._number

    def end_work(self, number: int) -> None:
        """Work ``number`` has ended, and all that was launched before it."""
        _, launched = self._work
        self._work = self._clock(), tuple(work for work in launched if work[0] > number)

    def seconds_busy(self, now: float) -> float:
        """Expected time of all launched work; 0 if that is late."""
        since, launched = self._work
        return max(0.0, sum(seconds for _, seconds in launched) - (now - since))


@dataclass
class _Trials:
    """When a slow tier is read again."""

    last_read: float = -math.inf  # in the clock's seconds
    pause: float = TRIAL_SECONDS


@dataclass(eq=False)
class HitGate:
    """Takes or refuses L3 hits, and ends prefetches. It never raises on purpose and never waits.
    If it takes all hits, it measures them all the same: slices need the estimates."""

    l3: L3Progress
    prefetches: Prefetches
    _backend: str  # the storage backend's name
    _min_gain: float  # a hit is read if computing takes as many times as long; 0: always

    def __post_init__(self) -> None:
        self.estimates, self.gpu = self.l3.estimates, Gpu(self.l3.clock)
        self.times = HitTimes(self.l3)
        self.agreed_stalled = False  # when the ranks last agreed
        self._trials = (_Trials(), _Trials())  # of the page store, and of the shared tier
        self._running: list[Any] = []  # SGLang's operations, in the order in which they are read
        self._proposal: Proposal | None = None
        self._logged = self._shown = -math.inf  # when a refused hit was logged, and rates shown
        self._show_rates()

    def propose_ends(self, turn: Turn) -> None:
        """Propose for each of the first prefetches whether it goes on (1) or should end (0), and
        last 0 if L3 is stalled, by :meth:`verdicts_on`. Nothing is proposed if there is nothing to
        end. Every rank has the same prefetches in the same turns. Scheduler thread."""
        cache, self._proposal = turn.cache, None
        first = [info.operation for info in islice(cache.ongoing_prefetch.values(), _JUDGED)]
        self._running, verdicts = first, [False] * (len(first) + 1)
        with catching():
            running = {operation: self.prefetches.prefetch_of(operation) for operation in first}
            changed = (self.prefetches.changed | running).items()
            ongoing = {operation: one for operation, one in changed if one.info is not None}
            for operation, prefetch in ongoing.items():
                prefetch.set_arrived(operation.completed_tokens, cache.page_size)
            if cache.pp_size == 1:
                self.prefetches.unfinished.update(ongoing)
            verdicts = self.verdicts_on([*running.values()])
        if cache.pp_size > 1:
            return  # pipeline stages are not at one point
        # No rank acts on its own verdict alone.
        if self._min_gain and (first or self.agreed_stalled):
            self._proposal = turn.propose(*(not ends for ends in verdicts))

    def apply_ends(self) -> None:
        """The ranks have agreed: end each prefetch that a rank wants to end, and all prefetches if
        L3 is stalled on a rank. Scheduler thread."""
        if self._proposal is None:
            return
        *going_on, in_time = self._proposal.least
        pairs = zip(self._running, going_on, strict=True)
        ended = [operation for operation, goes_on in pairs if not goes_on]
        if not in_time:  # L3 is stalled: all of them
            ended = [info.operation for info in self.prefetches.ongoing.values()]
        for operation in ended:
            operation.mark_terminate()
        with catching():
            self.apply_verdicts([*map(self.prefetches.prefetch_of, ended)], not in_time)

    def may_ask(self, request_id: str, prefix: int, recomputing: Recomputing | None = None) -> bool:
        """Returns True if L3 is to be asked for tokens of a request behind ``prefix`` others, and
        notes the prefetch; False while L3 is stalled: no request would wait for the answer."""
        if not self.agreed_stalled:
            self.prefetches.add_request(request_id, prefix, recomputing)
        return not self.agreed_stalled

    def verdicts_on(self, running: Sequence[Prefetch]) -> list[bool]:
        """This rank's verdicts: for each prefetch True if it should end; last, True if L3 is
        stalled. ``running`` are the first prefetches, in the order in which they are read."""
        now = self.l3.clock()
        with self.prefetches.lock:
            stalled = self._seems_stalled(now)
            verdicts = [stalled] * len(running)
            rests = [prefetch.rest for prefetch in running]
            begins = self.times.seconds_until_read(rests)
            for i, (prefetch, rest, begin) in enumerate(zip(running, rests, begins, strict=True)):
                if rest is not None:
                    verdicts[i] |= self._should_end(prefetch, rest, begin, now)
        return [*verdicts, stalled]

    def apply_verdicts(self, ended: Sequence[Prefetch], stalled: bool) -> None:
        """All ranks have agreed on these: note the ended prefetches, and the state of L3."""
        before, self.agreed_stalled = self.agreed_stalled, stalled
        for prefetch in ended:
            metrics.L3_TOKENS.count("ended", prefetch.remaining)
            self.prefetches.refuse(prefetch, State.ENDED)
        if stalled and not before:
            metrics.PROBLEMS.count("l3_stalled")
            meanwhile = "prompts are computed instead until it does. Check the disks of `dirs`"
            logger.warning("hcache: L3 is not responding: %s", meanwhile)
        elif before and not stalled:
            logger.info("hcache: L3 responds again")

    def batch_launched(self, tokens: int, prefix: float, loaded: int) -> int:
        """A batch with this work (see :meth:`batch_ended`) is launched. Returns its number."""
        computing = self.estimates.prefill.seconds(tokens, prefix) or 0.0
        return self.gpu.add_work(computing + self.estimates.seconds_to_load(loaded))

    def batch_ended(self, tokens: int, prefix: float, loaded: int, seconds: float) -> None:
        """Learn from a batch that computed ``tokens``, on average behind ``prefix``, and waited for
        the load of ``loaded`` tokens; all in ``seconds``."""
        estimates = self.estimates
        if not loaded:
            estimates.prefill.add_time(tokens, prefix, seconds)
        elif (computing := estimates.prefill.seconds(tokens, prefix)) is not None:
            estimates.load.add_time(loaded, 0, max(seconds - computing, 1e-6))
        self._show_rates()

    def tokens_to_read(
        self, prefetch: Prefetch, tokens: int, wanted: int, shared: int = 0, *, parts: bool = True
    ) -> int:
        """Number of tokens that this rank wants to read of a hit, the first ``tokens`` of
        ``wanted``: all, none, or those in the page store; the last ``shared`` are in the shared
        tier. ``parts``: a first part of it is worth something without the rest. On the thread that
        asks L3."""
        now = self.l3.clock()
        with self.prefetches.lock:
            hit = Hit(tokens, prefetch.prefix, wanted - tokens + 1, shared, prefetch.recomputing)
            prefetch.hit, prefetch.trial, prefetch.all_or_nothing = None, None, not parts
            reason = self._reason_to_compute(hit, now)
            taken = tokens if reason is None else self._tokens_of_part(hit, parts, prefetch, now)
            if taken:
                prefetch.hit = hit.cut_to(taken)
                if prefetch.state is State.ASKED:  # otherwise it is over already
                    self.prefetches.hits[prefetch] = None
            else:
                self.prefetches.refuse(prefetch, State.REFUSED)
        if taken < tokens:
            metrics.L3_TOKENS.count("slower", tokens - taken)
            if now - self._logged > _SILENCE_SECONDS:
                self._logged = now
                logger.info("hcache: %d tokens of a hit are computed: %s", tokens - taken, reason)
        return taken

    def read_begins(self, prefetch: Prefetch, wanted: int, step: int) -> None:
        """Thread that reads: L3 is going to be read, ``wanted`` tokens, ``step`` at a time."""
        with self.prefetches.lock:
            shared, prefetch.step = 0, step
            if prefetch.hit is not None:  # other ranks may have less of it
                prefetch.hit = prefetch.hit.cut_to(wanted)
                shared = prefetch.hit.shared  # tokens in the shared tier
            if not prefetch.refused:
                prefetch.state = State.READING if prefetch.meeting is None else State.MEETING
            now = self.l3.clock()
            self.l3.reading = Reading(prefetch, now, wanted, wanted, step, now, now, shared)

    def read_ends(self) -> None:
        """The read that was begun is over, in any way: learn how long each tier takes, and decide
        when it is tried again if hits are refused. On the thread that reads."""
        reading = self.l3.reading
        if reading is None:
            return
        now, seconds_far = self.l3.clock(), reading.seconds_shared  # ``far``: of the shared tier
        seconds = now - reading.start
        far = min(reading.from_shared, reading.tokens)  # after a missing page nothing counts
        wanted_far = max(reading.shared, far)
        wanted, near = reading.wanted - wanted_far, reading.tokens - far
        self._learn_read(self.estimates.read, near, wanted, seconds - seconds_far)
        if reading.gave_up and wanted_far:
            # The shared tier did not answer in time, so its real time is unknown.
            shared, computing = self.estimates.shared, self.estimates.prefill.seconds(wanted_far)
            longest = max(shared.seconds(wanted_far) or 0.0, 2 * (computing or 0.0))
            shared.add_time(wanted_far, 0, max(longest, 2 * seconds_far, 1e-6))
        else:
            self._learn_read(self.estimates.shared, far, wanted_far, seconds_far)
        self._show_rates()
        with self.prefetches.lock:
            self.l3.reading = None
            self._schedule_trial(reading, seconds)
            self._trials[reading.shared > 0].last_read = now
            if not reading.prefetch.refused:
                reading.prefetch.state = State.DONE
            self.prefetches.hits.pop(reading.prefetch, None)

    def _schedule_trial(self, reading: Reading, seconds: float) -> None:
        """Decide by a read that has ended in ``seconds`` how long hits of its tier are refused
        until one is read as a trial. A good read ends trials; a slow trial doubles the pause."""
        trials, prefetch = self._trials[reading.shared > 0], reading.prefetch
        trial, failed = prefetch.trial, reading.gave_up or prefetch.refused
        if trial is None:
            if prefetch.hit is not None:  # it seemed worth it
                trials.pause = TRIAL_SECONDS
        elif failed or 0 < reading.tokens == reading.wanted:
            hit = trial.cut_to(reading.hit_tokens)._replace(recomputing=None)
            pays = not failed and self._pays(hit, seconds)
            longer = min(max(TRIAL_SECONDS, 2 * trials.pause), LONGEST_TRIAL_SECONDS)
            trials.pause = 0.0 if pays else longer  # the next one confirms a good one at once
        # Otherwise its client is gone, or pages are: no evidence about the disk.

    def _learn_read(self, estimate: Estimate, tokens: int, wanted: int, seconds: float) -> None:
        """Learn from a read of ``tokens``, of ``wanted``, in ``seconds``, from the tier of this
        ``estimate``. It teaches nothing if no token came, unless it took too long."""
        expected = estimate.seconds(wanted)
        if not tokens and expected is not None and seconds > expected:
            tokens = wanted  # it failed, and that took longer than reading
        if tokens and wanted > 0:
            # A read that ended early counts as if the rest had come at the same pace.
            estimate.add_time(wanted, 0, max(seconds, 1e-6) * wanted / tokens)

    def _pays(self, hit: Hit, read: float) -> bool:
        """True if reading a hit in ``read`` seconds is worth it with nothing else under way."""
        saved = self.times.seconds_saved(hit)
        return saved is None or self.times.seconds_alone(hit, read) * self._min_gain <= saved

    def _seems_stalled(self, now: float) -> bool:
        return self._min_gain > 0 and self.l3.seems_stalled(now)

    def _reason_to_compute(self, hit: Hit, now: float) -> str | None:
        """The reason why a hit is not to be read, or None. Under the lock."""
        if self._seems_stalled(now):
            return "L3 is stalled"
        busy, others = self.gpu.seconds_busy(now), self.prefetches.hits
        computing = self.times.seconds_to_compute(hit, busy, others, now)
        if computing is None:
            return None
        enough = computing / self._min_gain if self._min_gain else math.inf
        read = 0.0 if self.gpu.wanted else self.times.seconds_behind(others, hit, now, enough)
        taken = self.times.seconds_until_loaded(hit, max(busy, read))
        if taken * self._min_gain <= computing:
            return None
        reading = f"to read and load {hit.tokens} tokens takes at least {taken:.3f} s"
        return f"{reading}, to compute them {computing:.3f} s"

    def _should_end(self, prefetch: Prefetch, rest: Hit, begin: float, now: float) -> bool:
        """True if a prefetch should end: computing its ``rest`` takes less time than going on. Its
        read begins in ``begin`` seconds, or has begun."""
        hit, trial = prefetch.hit, prefetch.trial
        if hit is None or self.gpu.wanted or (prefetch.all_or_nothing and trial is None):
            return False  # without worth in parts it is read to its end, unless it is a trial
        # Tokens that have arrived and are worth something without the rest.
        worth = 0 if prefetch.all_or_nothing else prefetch.arrived - prefetch.lost
        others = (one for one in self.prefetches.hits if one is not prefetch)
        busy = self.gpu.seconds_busy(now)
        computing = self.times.seconds_to_compute(hit.without_first(worth), busy, others, now)
        if computing is None:
            return False
        if trial is not None:
            judged = TRIAL_SHARE * (self.times.seconds_saved(trial) or 0.0)
            if self.times.seconds_reading(prefetch, now) < judged:
                return False
        going_on = self.times.seconds_going_on(prefetch, rest, begin, now)
        margin = 1.0 if prefetch.all_or_nothing else _ENDING_MARGIN
        return going_on * self._min_gain > margin * computing

    def _tokens_of_part(self, hit: Hit, parts: bool, prefetch: Prefetch, now: float) -> int:
        """Number of tokens to read of a hit that as a whole is too slow: those in the page store,
        or all of a trial, which ``prefetch`` gets. Under the lock."""
        near, kept = hit.cut_to(hit.tokens - hit.shared) if parts else hit, 0
        if 0 < near.tokens < hit.tokens and self._reason_to_compute(near, now) is None:
            kept = near.tokens
        trial = hit if kept or not near.tokens else near
        if not self._is_trial_due(trial, now):
            return kept
        prefetch.trial = trial
        return trial.tokens

    def _is_trial_due(self, hit: Hit, now: float) -> bool:
        """True if ``hit`` is to be read as a trial of its tier, however slow that seems: a pause is
        over, nothing else is read, and it would be worth it on a fast L3."""
        others = any(one.remaining for one in self.prefetches.hits)
        busy = others or self.l3.reading is not None or self.l3.seems_stalled(now)
        trials = self._trials[hit.shared > 0]
        return not busy and self._pays(hit, 0.0) and now - trials.last_read >= trials.pause

    def _show_rates(self) -> None:
        """Update the metric of known rates, at most once a second."""
        now = self.l3.clock()
        if now - self._shown >= _SHOWN_SECONDS:
            self._shown = now
            for operation, rate in self.estimates.rates().items():
                metrics.RATES.set(operation, self._backend, value=rate)
