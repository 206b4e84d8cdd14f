"""How long an operation will take, from a model of it and from what was measured as it happened."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Curve = Callable[[int, float], float]
"""Seconds of an operation on ``tokens`` tokens behind ``prefix`` tokens. Where nobody knows the
machine, in any unit: then only how it grows counts."""

_KEPT = 32
_FADING = 0.65
"""Weight of a measurement relative to the next one: two in a row outweigh all before them, so one
that was disturbed does not count and a change is believed at once."""
_MODEL_WEIGHT = 0.1
"""So much as measurements of four times the size, or a quarter, together have: beyond, the model
counts, since small operations say little about the cost of large ones."""


class Estimate:
    """Seconds of an operation: its curve, times what measured ones took relative to the curve.

    Of these ratios the weighted median counts; newer ones, and those of about the size that is
    asked for, weigh more. Any thread.

    Args:
        curve: The model; positive for positive sizes.
        known: Whether the curve is in seconds; without it there is no estimate before the first
            measurement.
    """

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
        """What an operation on ``wanted`` tokens takes where one on ``tokens`` took ``seconds``."""
        return seconds * self._curve(wanted, 0.0) / self._curve(tokens, 0.0)

    def seconds(self, tokens: int, prefix: float = 0.0) -> float | None:
        """What an operation will take; None: nothing is known yet."""
        if tokens <= 0:
            return 0.0
        ratio = self._ratio(tokens)
        return None if ratio is None else self._curve(tokens, prefix) * ratio

    def slowdown(self, tokens: int) -> float:
        """How many times as long as its curve says an operation on ``tokens`` (at least 1) takes.

        1 where the curve is not in seconds.
        """
        return (self._ratio(tokens) or 1.0) if self._known else 1.0

    def _ratio(self, tokens: int) -> float | None:
        """What measured operations took relative to the curve; None: nothing is known yet."""
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
