"""One log line per kind of problem, instead of one per page."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("hcache.store")

QUIET_SECONDS = 60.0


class ProblemLog:
    """Logs the first problem of a kind at once, later ones at most once per minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def report(self, kind: str, message: str) -> None:
        """Log ``message`` unless one of its ``kind`` was logged in the last minute."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._last[kind] = now
            held_back = self._held_back.pop(kind, 0)
        more = f" ({held_back} more like it since the last such line)" if held_back else ""
        logger.warning("hcache: %s%s", message, more)
