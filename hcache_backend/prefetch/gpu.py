"""The GPU's present work, for decisions about a hit."""

from __future__ import annotations

from collections.abc import Callable


class Gpu:
    """The GPU's launched work, from the scheduler's thread. ``wanted``: requests wait for the
    GPU."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wanted = False
        self._clock = clock
        self._number = 0
        # Start of the first work, and all launched work in order: number and seconds.
        self._at: tuple[float, tuple[tuple[int, float], ...]] = 0.0, ()

    def begins(self, seconds: float) -> int:
        """Work of ``seconds`` is launched behind all earlier work; returns its number."""
        since, launched = self._at
        self._number += 1
        self._at = since if launched else self._clock(), (*launched, (self._number, seconds))
        return self._number

    def ended(self, number: int) -> None:
        """Work ``number`` has ended, and all that was launched before it."""
        _, launched = self._at
        self._at = self._clock(), tuple(one for one in launched if one[0] > number)

    def seconds_busy(self, now: float) -> float:
        """Expected time of all launched work; 0 if that is late."""
        since, launched = self._at
        return max(0.0, sum(seconds for _, seconds in launched) - (now - since))
