"""The counters of a store, and its lines in the log."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hcache_backend.format.envelope import PageName

logger = logging.getLogger("hcache.store")

QUIET_SECONDS = 60.0


@dataclass
class StoreStats:
    """Counters since the store was opened (the numbers)."""

    pages_written: int = 0
    bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    misses: int = 0
    bad_pages: int = 0
    write_errors: int = 0
    read_errors: int = 0
    index_errors: int = 0
    sync_errors: int = 0
    evict_errors: int = 0
    pages_already_stored: int = 0
    pages_dropped_full: int = 0
    pages_dropped_late: int = 0
    pages_dropped_offline: int = 0
    pages_evicted: int = 0
    bytes_evicted: int = 0
    bytes_copied: int = 0
    folders_lost: int = 0
    syncs: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    # called with the names of evicted pages
    on_evicted: Callable[[Sequence[PageName]], object] = len
    # called now and then with a folder and bytes: of its pages, its quota, free on its disk
    on_room: Callable[[str, dict[str, int]], object] = lambda folder, room: None

    def add(self, **increments: int) -> None:
        with self.lock:
            for name, increment in increments.items():
                setattr(self, name, getattr(self, name) + increment)

    def snapshot(self) -> dict[str, int]:
        with self.lock:
            return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class ProblemLog:
    """Logs the first problem of a kind at once, later ones at most once per minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._held_back: Counter[str] = Counter()

    def report(self, kind: str, message: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
                self._held_back[kind] += 1
                return
            self._last[kind] = now
            held_back = self._held_back.pop(kind, 0)
        more = f" ({held_back} similar problems since the last such line)" if held_back else ""
        logger.warning("hcache: %s%s", message, more)
