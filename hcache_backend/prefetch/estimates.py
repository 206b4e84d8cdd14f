"""Expected time of an operation, from a model of it and from measurements in service."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# Seconds of an operation on ``tokens`` tokens behind ``prefix`` tokens; in any unit on an unknown
# machine: then only its growth counts.
Curve = Callable[[int, float], float]

_KEPT = 32
# Weight of a measurement relative to the next one. Two in a row outweigh all before them: one
# disturbed measurement does not count, and a change is believed at once.
_FADING = 0.65
# About that of all measurements of four times the size, or a quarter. Beyond, the model counts:
# small operations say little about the cost of large ones.
_MODEL_WEIGHT = 0.1


class Estimate:
    """Seconds of an operation: its curve, times a ratio of measurements to the curve. Any thread.
    The ratio is a weighted median: newer ones, and those of about the wanted size, weigh more.
    ``known``: the curve is in seconds, and serves without measurements."""

    def __init__(self, curve: Curve, *, known: bool) -> None:
        self._curve = curve
        self._known = known
        self._measured: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def measured(self, tokens: int, prefix: float, seconds: float) -> None:
        """An operation on ``tokens`` (at least 1) took ``seconds``."""
        ratio = seconds / self._curve(tokens, prefix)
        with self._lock:
            self._measured.append((tokens, ratio))

    def like(self, tokens: int, seconds: float, wanted: int) -> float:
        """Expected seconds for ``wanted`` tokens if ``tokens`` took ``seconds``."""
        return seconds * self._curve(wanted, 0.0) / self._curve(tokens, 0.0)

    def seconds(self, tokens: int, prefix: float = 0.0) -> float | None:
        """Expected seconds; None if unknown."""
        if tokens <= 0:
            return 0.0
        ratio = self._ratio(tokens)
        return None if ratio is None else self._curve(tokens, prefix) * ratio

    def slowdown(self, tokens: int) -> float:
        """Expected time on ``tokens`` (at least 1) by the curve; 1 if that is not in seconds."""
        return (self._ratio(tokens) or 1.0) if self._known else 1.0

    def _ratio(self, tokens: int) -> float | None:
        """Measured times relative to the curve; None if unknown."""
        with self._lock:
            measured = list(self._measured)
        weighted = [
            (ratio, _FADING**age * min(size / tokens, tokens / size) ** 2)
            for age, (size, ratio) in enumerate(reversed(measured))
        ]
        if self._known:
            weighted.append((1.0, _MODEL_WEIGHT))
        return _median(weighted) if weighted else None


def _median(weighted: list[tuple[float, float]]) -> float:
    """The smallest value that at least half of the weight does not exceed."""
    half, below = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        below += weight
        if below >= half:
            return value
    return max(weighted)[0]
