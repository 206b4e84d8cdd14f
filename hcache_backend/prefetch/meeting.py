"""The two ends of a prefetch: its back is read, and its front is recomputed, until they meet.

A thread reads pages from the last one on; the scheduler has pages recomputed whole from the first
one on. No page is taken by both, so no thread writes to a page of the front. Tensor-parallel ranks
read on their own and recompute in step. So the front takes only pages that no rank reads, and pages
of the back count once all ranks have them.
"""

from __future__ import annotations

import threading
from typing import Any


class Meeting:
    """The two ends of one prefetch. Page numbers are those in the prefetch.

    ``reachable`` is the first page that recomputation cannot reach, as of the last scheduler turn.
    None, before the first turn, counts as "all reachable": otherwise the reader would claim the
    front's pages.
    """

    def __init__(self) -> None:
        self.front = 0  # pages whose recomputation was launched; the scheduler's
        self.here = range(0)  # pages that were read and proven on all ranks; the scheduler's
        self.reachable: int | None = None
        self._lock = threading.Lock()
        self._taken = 0  # by the front
        self._unread: int | None = None  # the reader takes pages before this one

    def begin(self, pages: int) -> None:
        """The prefetch has ``pages`` pages. Both sides call it, in any order."""
        with self._lock:
            if self._unread is None:
                self._unread = pages

    # ---- the thread that reads ----

    def next_batch(self, most: int) -> range:
        """The next pages to read, at most ``most`` (at least 1); empty if the ends have met."""
        with self._lock:
            assert self._unread is not None
            stop, self._unread = self._unread, max(self._taken, self._unread - most)
            return range(self._unread, stop)

    @property
    def spared(self) -> int:
        """Pages that need not be read. Any thread."""
        return self._taken

    # ---- the scheduler ----

    @property
    def unread(self) -> int:
        """Pages that are neither taken nor being read."""
        assert self._unread is not None
        return self._unread - self._taken

    @property
    def recomputable(self) -> float:
        """Share of the unread pages that recomputation can reach. Any thread."""
        unread, reachable = self.unread, self.reachable
        if reachable is None or not unread:
            return 1.0
        return min(1.0, max(0, reachable - self._taken) / unread)

    def offer(self) -> int:
        """Number of pages that the front may take next: those that are not read. Holds the lock
        until :meth:`take`: the reader takes none while the ranks agree on them."""
        self._lock.acquire()
        assert self._unread is not None
        # What was taken and not launched has failed: there is no way past it.
        return self._unread - self._taken if self._taken == self.front else 0

    def take(self, pages: int) -> range:
        """The front takes ``pages`` of the pages that were offered."""
        first, self._taken = self._taken, self._taken + pages
        self._lock.release()
        return range(first, self._taken)

    def launched(self, pages: range) -> None:
        """The recomputation of the front's next ``pages`` was launched."""
        assert pages.start == self.front
        self.front = pages.stop

    def arrived(self, start: int, end: int) -> None:
        """All ranks have read pages ``start`` to ``end``."""
        self.here = range(start, max(start, end))

    @property
    def pages(self) -> int:
        """Number of pages that count, from the first one on: recomputed or read."""
        met = bool(self.here) and self.front >= self.here.start
        return max(self.front, self.here.stop) if met else self.front


def meeting_of(operation: Any) -> Meeting | None:
    """The meeting of a prefetch, or None if it is read in order."""
    meeting: Meeting | None = getattr(operation, "hcache_meeting", None)
    return meeting
