"""What the GPU is at, as far as a decision about a hit has to know."""

from __future__ import annotations

from collections.abc import Callable


class Gpu:
    """Told by the scheduler's thread; any thread may ask.

    Attributes:
        wanted: Whether requests wait that could run but for the GPU.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wanted = False
        self._clock = clock
        self._number = 0
        # Since when it is at the first of these: number and seconds, one behind the other.
        self._at: tuple[float, tuple[tuple[int, float], ...]] = 0.0, ()

    def begins(self, seconds: float) -> int:
        """Work of so many seconds is launched, behind what was launched before; its number."""
        since, launched = self._at
        self._number += 1
        self._at = since if launched else self._clock(), (*launched, (self._number, seconds))
        return self._number

    def ended(self, number: int) -> None:
        """Work has ended, and all that was launched before."""
        _, launched = self._at
        self._at = self._clock(), tuple(one for one in launched if one[0] > number)

    def seconds_busy(self, now: float) -> float:
        """How long what was launched should still take; 0 where that is late."""
        since, launched = self._at
        return max(0.0, sum(seconds for _, seconds in launched) - (now - since))
