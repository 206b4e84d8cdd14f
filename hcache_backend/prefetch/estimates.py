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

    def measured(self, tokens: int, prefix: float, seconds: float) -> None:
        """An operation on ``tokens`` (at least 1) took ``seconds``."""
        ratio = seconds / max(self._curve(tokens, prefix), 1e-12)
        with self._lock:
            self._measured.append((tokens, ratio))
            self._medians.clear()

    def part(self, tokens: int, of: int) -> float | None:
        """Expected seconds of ``tokens`` by those of the operation ``of`` so many; None if
        unknown."""
        of = max(of, tokens)
        seconds = self.seconds(of) if tokens else 0.0
        return seconds and seconds * self._curve(tokens, 0.0) / self._curve(of, 0.0)

    def seconds(self, tokens: int, prefix: float = 0.0) -> float | None:
        """Expected seconds; None if unknown."""
        if tokens <= 0:
            return 0.0
        ratio = self._ratio(tokens)
        return None if ratio is None else self._curve(tokens, prefix) * ratio

    def slowdown(self, tokens: int) -> float:
        """Expected time on ``tokens`` (at least 1) by the curve; 1 if that is not in seconds."""
        return (self._ratio(tokens) or 1.0) if self._in_seconds else 1.0

    def _ratio(self, tokens: int) -> float | None:
        """Measured times relative to the curve; None if unknown."""
        with self._lock:
            if tokens not in self._medians:
                weighted = [
                    (ratio, _FADING**age * min(size / tokens, tokens / size) ** 2)
                    for age, (size, ratio) in enumerate(reversed(self._measured))
                ]
                if self._in_seconds:
                    weighted.append((1.0, _MODEL_WEIGHT))
                self._medians[tokens] = _median(weighted) if weighted else None
            return self._medians[tokens]


class Estimates:
    """Of all operations of a hit. They always exist, and learn."""

    def __init__(self, machine: Restore | None = None) -> None:
        self.know(machine)

    def know(self, machine: Restore | None) -> None:
        """Begin anew, by the cost model of ``machine``, or by times in service alone: an L3 is
        attached or detached."""
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

    def loaded(self, tokens: int) -> float:
        """Seconds that a batch waits for a hit's load, at most a whole restore; 0 if unknown."""
        waits, restored = self.load.seconds(tokens) or 0.0, self.restored.seconds(tokens)
        return waits if restored is None else min(waits, restored)

    def measured_restore(self, tokens: int, seconds: float) -> None:
        """``tokens`` came from host memory to the device; 0: all were there, and first layers were
        recomputed."""
        if tokens:
            self.restored.measured(tokens, 0.0, seconds)

    def rates(self) -> dict[str, float]:
        """Known rates, in tokens per second, of operations on :data:`SHOWN_TOKENS` tokens."""
        by_name = {"l3_read": self.read, "shared_read": self.shared, "prefill": self.prefill}
        found = {name: each.seconds(SHOWN_TOKENS) for name, each in by_name.items()}
        found["load"] = self.loaded(SHOWN_TOKENS)
        return {name: SHOWN_TOKENS / seconds for name, seconds in found.items() if seconds}


def _linear(tokens: int, prefix: float) -> float:
    return float(tokens)


def _median(weighted: list[tuple[float, float]]) -> float:
    """The smallest value that at least half of the weight does not exceed."""
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
    last: float  # when the last part came, or the read began
    tier_start: float  # when the read of the present tier began
    shared: int = 0  # wanted tokens, at the end, in the shared tier
    tokens: int = 0  # read so far, ...
    from_shared: int = 0  # ...those of them from the shared tier, ...
    seconds_shared: float = 0.0  # ...and the time of the requests to it
    gave_up: bool = False  # it failed, or did not answer in time

    @property
    def before(self) -> int:
        """Tokens that were read before the present tier."""
        near = self.hit_tokens - self.shared
        return near if self.shared and self.tokens >= near else 0


def waited_for_core(thread: int) -> float:
    """Seconds in which a thread of this process could run and had no core; 0 if unknown."""
    try:
        _, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text("ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(waited) / 1e9


class L3Progress:
    """HiCache's threads report their work here; any thread may ask for the state of L3."""

    def __init__(
        self, estimates: Estimates | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.estimates = estimates or Estimates()
        self.clock, self.core_wait = clock, waited_for_core
        self.reading: Reading | None = None  # the prefetch that is being read
        self._looking: tuple[float, float, int] | None = None  # since when, core_wait then, thread

    @contextmanager
    def looking(self) -> Iterator[None]:
        """L3 looks up within the block."""
        thread = threading.get_native_id()
        self._looking = self.clock(), self.core_wait(thread), thread
        try:
            yield
        finally:
            self._looking = None

    def may_take_longer(self, seconds: float) -> None:
        """Allow the present look-up ``seconds`` more."""
        if self._looking is not None:
            start, waited, thread = self._looking
            self._looking = start + seconds, waited, thread

    def reads_next(self, tokens: int) -> None:
        """The next part has ``tokens``."""
        if self.reading is not None:
            self.reading.step = tokens

    def arrived(self, tokens: int) -> None:
        reading = self.reading
        if reading is not None:
            before = reading.before
            reading.tokens += tokens
            reading.last = self.clock()
            if reading.before != before:
                reading.tier_start = reading.last

    def spared(self, tokens: int) -> None:
        """``tokens`` need not be read: they were recomputed. In a trial they count as if they had
        come as fast as the others: otherwise a front that recomputes all hides the speed."""
        reading = self.reading
        if reading is not None and reading.prefetch.trial is not None and reading.tokens:
            reading.start -= (reading.last - reading.start) * tokens / reading.tokens
            reading.tokens += tokens
        elif reading is not None:
            reading.wanted -= tokens

    def waited(self, seconds: float) -> None:
        """L3 was not read for ``seconds``."""
        if self.reading is not None:
            self.reading.start += seconds
            self.reading.tier_start += seconds
            self.reading.last += seconds

    def came_from_shared(self, tokens: int, seconds: float, *, gave_up: bool = False) -> None:
        """The shared tier took ``seconds`` for ``tokens``; ``gave_up``: it failed or was late."""
        if self.reading is not None:
            self.reading.from_shared += tokens
            self.reading.seconds_shared += seconds
            self.reading.gave_up = self.reading.gave_up or gave_up

    def seems_stalled(self, now: float) -> bool:
        looking, reading = self._looking, self.reading
        if looking is not None and now - looking[0] > STALLED_SECONDS:
            start, waited, thread = looking  # a busy processor is not the disk's fault
            if now - start - (self.core_wait(thread) - waited) > STALLED_SECONDS:
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
            return (reading.last - reading.start) * tokens / reading.tokens
        return (now - reading.start) * tokens / (reading.tokens + reading.step)

    def left_in_time(self, now: float) -> float | None:
        """Expected rest of the present read, in seconds; None if it is late, or unknown."""
        reading = self.reading
        if reading is None or self.slowdown(now) > LATE:
            return None
        expected = self._expected(reading, reading.wanted, reading.shared)
        return None if expected is None else max(0.0, expected - (now - reading.start))

    def _expected(self, reading: Reading | None, tokens: int, shared: int) -> float | None:
        """Expected seconds of ``tokens``, of a read if there is one; None if unknown."""
        of, of_shared = (reading.hit_tokens, reading.shared) if reading is not None else (0, 0)
        near = self.estimates.read.part(tokens - shared, of - of_shared)
        far = self.estimates.shared.part(shared, of_shared)
        return None if near is None or far is None else near + far
