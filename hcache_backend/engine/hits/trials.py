"""When a hit is read although L3 was slow, to see whether it still is."""

from __future__ import annotations

from dataclasses import dataclass

TRIAL_SECONDS = 10.0
"""When hits are refused because L3 is slow, one is read so long after the last read, ..."""
LONGEST_TRIAL_SECONDS = 320.0
"""...or after up to this time, twice as long after each trial that shows a slow L3, ..."""
TRIAL_SHARE = 0.1
"""...for this share of the time that it would save; then its prefetch is judged like others."""


@dataclass
class Trials:
    """When the next trial of an L3 is due.

    Attributes:
        last_read: When L3 was read last; the clock's seconds. None: never.
    """

    last_read: float | None = None
    _pause: float = TRIAL_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether the last read was long enough ago."""
        return self.last_read is None or now - self.last_read >= self._pause

    def not_one(self) -> None:
        """A hit was read since it seemed worth it: trials begin anew when that ends."""
        self._pause = TRIAL_SECONDS

    def ended(self, *, pays: bool) -> None:
        """A trial is over; the next one confirms at once what looks good."""
        longer = min(max(TRIAL_SECONDS, 2 * self._pause), LONGEST_TRIAL_SECONDS)
        self._pause = 0.0 if pays else longer
