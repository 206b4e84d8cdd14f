"""Expected time of operations, from the cost model and from measurements in service; and of the
read that is under way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hcache_backend.plan.restore import Restore
from hcache_backend.prefetch.hit import Prefetch

SHOWN_TOKENS = 4096  # rates are shown for operations of this size
# time of an operation on ``tokens`` behind ``prefix``, in seconds; in any unit if unknown
Curve = Callable[[int, float], float]

# Weight of a measurement relative to the next one: two in a row outweigh all before them.
_FADING = 0.65
# About that of all measurements of four times the size, or a quarter; beyond, the model counts.
_MODEL_WEIGHT = 0.1


class Estimate:
    """Seconds of an operation: its curve, times a weighted median of the ratios of measurements to
    it. Any thread. ``in_seconds``: the curve is in seconds, and serves without measurements."""

    def __init__(self, curve: Curve, *, in_seconds: bool) -> None:
        self._curve = curve
        self._in_seconds = in_seconds
        self._measured: deque[tuple[int, float]] = deque(maxlen=32)
        self._medians: dict[int, float | None] = {}  # by tokens, until the next measurement
        self._lock = threading.Lock()

    def add_time(self, tokens: int, prefix: float, seconds: float) -> None:
        """Learn that an operation on ``tokens`` (at least 1) behind ``prefix`` took ``seconds``."""
        ratio = seconds / max(self._curve(tokens, prefix), 1e-12)
        with self._lock:
            self._measured.append((tokens, ratio))
            self._medians.clear()

    def seconds_of_part(self, tokens: int, all_tokens: int) -> float | None:
        """Expected seconds of ``tokens``, a part of an operation on ``all_tokens``: its share by
        the curve. None if unknown."""
        all_tokens = max(all_tokens, tokens)
        seconds = self.seconds(all_tokens) if tokens else 0.0
        return seconds and seconds * self._curve(tokens, 0.0) / self._curve(all_tokens, 0.0)

    def seconds(self, tokens: int, prefix: float = 0.0) -> float | None:
        """Expected seconds on ``tokens`` behind ``prefix`` others; None if unknown."""
        if tokens <= 0:
            return 0.0
        ratio = self._ratio(tokens)
        return None if ratio is None else self._curve(tokens, prefix) * ratio

    def slowdown(self, tokens: int) -> float:
        """Expected time on ``tokens`` (at least 1) over the curve's; 1 if that has no unit."""
        return (self._ratio(tokens) or 1.0) if self._in_seconds else 1.0

    def _ratio(self, tokens: int) -> float | None:
        """Measured times relative to the curve: the median, weighted by age and by how near their
        size is to ``tokens``. None without measurements, unless the curve is in seconds."""
        with self._lock:
            if tokens not in self._medians:
                weighted = [
                    (ratio, _FADING**age * min(size / tokens, tokens / size) ** 2)
                    for age, (size, ratio) in enumerate(reversed(self._measured))  # size: tokens
                ]
                if self._in_seconds:
                    weighted.append((1.0, _MODEL_WEIGHT))
                self._medians[tokens] = _median(weighted) if weighted else None
            return self._medians[tokens]


class Estimates:
    """Expected times of all operations of a hit. They always exist, and learn."""

    def __init__(self, machine: Restore | None = None) -> None:
        self.begin_anew(machine)

    def begin_anew(self, machine: Restore | None) -> None:
        """Forget all times, and begin by the cost model of ``machine``, or by times in service
        alone: an L3 is attached or detached."""
        in_seconds = machine is not None
        # computing tokens
        self.prefill = Estimate(machine.prefill if machine else _linear, in_seconds=in_seconds)
        # wait of a batch for the load to the device
        self.load = Estimate(machine.load if machine else _linear, in_seconds=in_seconds)
        self.restored = Estimate(_linear, in_seconds=False)  # whole loads
        l3 = machine.profile.l3 if machine and machine.profile else None
        reads = machine.read if machine and l3 is not None else None
        # From L3 to host memory, and from the shared tier.
        self.read = Estimate(reads or _linear, in_seconds=reads is not None)
        self.shared = Estimate(_linear, in_seconds=False)

    def slowdown(self, tokens: int) -> float:
        """Recent prefill time of ``tokens`` relative to the profile; 1.0 without measurements."""
        return self.prefill.slowdown(tokens)

    def seconds_to_load(self, tokens: int) -> float:
        """Seconds that a batch waits for a hit's load, at most a whole restore; 0 if unknown."""
        waits, restored = self.load.seconds(tokens) or 0.0, self.restored.seconds(tokens)
        return waits if restored is None else min(waits, restored)

    def add_restore(self, tokens: int, seconds: float) -> None:
        """Learn that ``tokens`` came from host memory to the device in ``seconds``; 0: all were
        there, and first layers were recomputed."""
        if tokens:
            self.restored.add_time(tokens, 0.0, seconds)

    def rates(self) -> dict[str, float]:
        """Known rates, in tokens per second, of operations on :data:`SHOWN_TOKENS` tokens."""
        estimates = {"l3_read": self.read, "shared_read": self.shared, "prefill": self.prefill}
        seconds_of = {name: each.seconds(SHOWN_TOKENS) for name, each in estimates.items()}
        seconds_of["load"] = self.seconds_to_load(SHOWN_TOKENS)
        return {name: SHOWN_TOKENS / seconds for name, seconds in seconds_of.items() if seconds}


def _linear(tokens: int, prefix: float) -> float:
    """A curve for operations of which only measurements tell the time."""
    return float(tokens)


def _median(weighted: list[tuple[float, float]]) -> float:
    """Of (value, weight): the smallest value up to which the values have half of the weight."""
    half, below = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        below += weight
        if below >= half:
            return value
    return max(weighted)[0]


# until a look-up is stalled; a read is, this after twice the expected time of its next part
STALLED_SECONDS = 0.5
LATE = 1.25  # times its expected time: then the rest of a read is estimated by what has arrived
# Longest expected time of a part, or the time to compute it: a read that hung teaches no patience.
LONGEST_PART_SECONDS = 5.0


@dataclass
class Reading:
    """The read of a prefetch; times are the clock's seconds."""

    prefetch: Prefetch
    start: float
    hit_tokens: int  # all of the hit
    wanted: int  # tokens to read: those that are recomputed meanwhile are not
    step: int  # tokens of a part, which are reported together
    last_arrival: float  # when the last part came, or the read began
    tier_start: float  # when the read of the present tier began
    shared: int = 0  # wanted tokens, at the end, in the shared tier
    tokens: int = 0  # read so far, ...
    from_shared: int = 0  # ...those of them from the shared tier, ...
    seconds_shared: float = 0.0  # ...and the time of the requests to it
    gave_up: bool = False  # it failed, or did not answer in time

    @property
    def tokens_before_tier(self) -> int:
        """Tokens that were read before the present tier."""
        near = self.hit_tokens - self.shared
        return near if self.shared and self.tokens >= near else 0


def seconds_without_core(thread: int) -> float:
    """Seconds in which a thread of this process could run and had no core; 0 if unknown."""
    try:
        _, nanoseconds, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text("ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(nanoseconds) / 1e9


class _LookUp(NamedTuple):
    start: float  # in the clock's seconds
    core_wait: float  # seconds without a core, at its start
    thread: int


class L3Progress:
    """HiCache's threads report their work here; any thread may ask for the state of L3."""

    def __init__(
        self, estimates: Estimates | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.estimates = estimates or Estimates()
        self.clock, self.core_wait = clock, seconds_without_core
        self.reading: Reading | None = None  # the prefetch that is being read
        self._look_up: _LookUp | None = None

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """Within the block this thread asks L3 which pages it has."""
        thread = threading.get_native_id()
        self._look_up = _LookUp(self.clock(), self.core_wait(thread), thread)
        try:
            yield
        finally:
            self._look_up = None

    def may_take_longer(self, seconds: float) -> None:
        """Allow the present look-up ``seconds`` more."""
        if (look_up := self._look_up) is not None:
            self._look_up = look_up._replace(start=look_up.start + seconds)

    def part_begins(self, tokens: int) -> None:
        """The reader asks for the next ``tokens`` now."""
        if self.reading is not None:
            self.reading.step = tokens

    def part_arrived(self, tokens: int) -> None:
        """``tokens`` of the present read have arrived in host memory."""
        reading = self.reading
        if reading is not None:
            before = reading.tokens_before_tier  # the shared tier is read after the page store
            reading.tokens += tokens
            reading.last_arrival = self.clock()
            if reading.tokens_before_tier != before:
                reading.tier_start = reading.last_arrival

    def need_not_read(self, tokens: int) -> None:
        """``tokens`` need not be read: they were recomputed. In a trial they count as if they had
        come as fast as the others: otherwise a front that recomputes all hides the speed."""
        reading = self.reading
        if reading is not None and reading.prefetch.trial is not None and reading.tokens:
            reading.start -= (reading.last_arrival - reading.start) * tokens / reading.tokens
            reading.tokens += tokens
        elif reading is not None:
            reading.wanted -= tokens

    def paused(self, seconds: float) -> None:
        """The reader did not read for ``seconds``, on purpose: they do not count as L3's."""
        if self.reading is not None:
            self.reading.start += seconds
            self.reading.tier_start += seconds
            self.reading.last_arrival += seconds

    def add_shared_read(self, tokens: int, seconds: float, *, gave_up: bool = False) -> None:
        """The shared tier took ``seconds`` for ``tokens``; ``gave_up``: it failed or was late."""
        if self.reading is not None:
            self.reading.from_shared += tokens
            self.reading.seconds_shared += seconds
            self.reading.gave_up = self.reading.gave_up or gave_up

    def seems_stalled(self, now: float) -> bool:
        """True if the present look-up, or the next part of the present read, is long overdue."""
        look_up, reading = self._look_up, self.reading
        if look_up is not None and now - look_up.start > STALLED_SECONDS:
            # A busy processor is not the disk's fault.
            core_wait = self.core_wait(look_up.thread) - look_up.core_wait
            if now - look_up.start - core_wait > STALLED_SECONDS:
                return True
        if reading is None:
            return False
        computing = self.estimates.prefill.seconds(reading.step) or 0.0
        longest = max(LONGEST_PART_SECONDS, computing)
        expected = self._expected(reading, reading.step, min(reading.step, reading.shared))
        expected = longest if expected is None else min(expected, longest)
        return now - reading.last_arrival > 2 * expected + STALLED_SECONDS

    def slowdown(self, now: float) -> float:
        """Time of the present read relative to its expected time; at least 1, also if unknown."""
        reading = self.reading
        if reading is None:
            return 1.0
        tokens = reading.tokens + reading.step
        shared = min(reading.shared, max(0, tokens - reading.wanted + reading.shared))
        expected = self._expected(reading, tokens, shared)
        return max(1.0, (now - reading.start) / expected) if expected else 1.0

    def seconds_to_read(self, tokens: int, shared: int = 0, *, longest: bool = False) -> float:
        """Expected time of the next ``tokens``, ``shared`` of them from the shared tier. If it is
        unknown, the shortest that the present read allows, 0 when it begins; or the ``longest``,
        at the pace so far, with what each request costs besides."""
        reading, now = self.reading, self.clock()
        seconds = self._expected(reading, tokens, shared)
        if seconds is not None:
            return seconds * self.slowdown(now)
        if reading is None:
            return 0.0
        if longest and reading.tokens:
            return (reading.last_arrival - reading.start) * tokens / reading.tokens
        return (now - reading.start) * tokens / (reading.tokens + reading.step)

    def seconds_left_in_time(self, now: float) -> float | None:
        """Expected rest of the present read, in seconds; None if it is late, or unknown."""
        reading = self.reading
        if reading is None or self.slowdown(now) > LATE:
            return None
        expected = self._expected(reading, reading.wanted, reading.shared)
        return None if expected is None else max(0.0, expected - (now - reading.start))

    def _expected(self, reading: Reading | None, tokens: int, shared: int) -> float | None:
        """Expected seconds of ``tokens``, ``shared`` of them from the shared tier, as a part of
        ``reading`` if there is one; None if unknown."""
        whole, whole_shared = (reading.hit_tokens, reading.shared) if reading else (0, 0)
        near = self.estimates.read.seconds_of_part(tokens - shared, whole - whole_shared)
        far = self.estimates.shared.seconds_of_part(shared, whole_shared)
        return None if near is None or far is None else near + far
