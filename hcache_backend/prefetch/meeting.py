"""Where the two ends of a prefetch meet: its back, which is read, and its front, which is
recomputed meanwhile.

Pages are read from the last one on, by a thread; the scheduler has pages recomputed whole from the
first one on. No page is taken by both: whoever frees a page of the front knows that no thread
writes there. The reader ends where the front begins.

Tensor-parallel ranks read on their own and recompute in step. So the front goes on by as many
pages as nobody reads on any rank, and what counts of the back is what all ranks have.
"""

from __future__ import annotations

import threading
from typing import Any


class Meeting:
    """The two ends of one prefetch. Page numbers are those in the prefetch.

    Attributes:
        front: So many pages are recomputed, or will be: that was launched. The scheduler's.
        here: Pages that were read and proven on all ranks. The scheduler's.
        reachable: Recomputation can come so far, by what the scheduler saw last: the number of the
            page that it cannot recompute any more. None: it has not looked yet. It will in a
            moment: until then all of them count, or the reader would take what the front reaches.
    """

    def __init__(self) -> None:
        self.front = 0
        self.here = range(0)
        self.reachable: int | None = None
        self._lock = threading.Lock()
        self._taken = 0  # by the front
        self._unread: int | None = None  # the reader takes those before this one next

    def begin(self, pages: int) -> None:
        """The prefetch has so many pages; both sides say so, in any order."""
        with self._lock:
            if self._unread is None:
                self._unread = pages

    # ---- the thread that reads ----

    def next_batch(self, most: int) -> range:
        """At most ``most`` pages (at least 1) to be read next; none: the two have met."""
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
        """Which share of the unread pages recomputation can reach. Any thread."""
        unread, reachable = self.unread, self.reachable
        if reachable is None or not unread:
            return 1.0
        return min(1.0, max(0, reachable - self._taken) / unread)

    def offer(self) -> int:
        """How many pages the front may take next: those that nobody reads.

        The ranks have to agree on them, so the reader takes none until :meth:`take`.
        """
        self._lock.acquire()
        assert self._unread is not None
        # What was taken and not launched has failed: there is no way past it.
        return self._unread - self._taken if self._taken == self.front else 0

    def take(self, pages: int) -> range:
        """The front takes so many of the pages that were offered."""
        first, self._taken = self._taken, self._taken + pages
        self._lock.release()
        return range(first, self._taken)

    def launched(self, pages: range) -> None:
        """The next ``pages`` of the front will be there for whoever waits for their restore."""
        assert pages.start == self.front
        self.front = pages.stop

    def arrived(self, start: int, end: int) -> None:
        """All ranks have read pages ``start`` to ``end``."""
        self.here = range(start, max(start, end))

    @property
    def pages(self) -> int:
        """How many pages count, from the first one on: they are recomputed or were read."""
        met = bool(self.here) and self.front >= self.here.start
        return max(self.front, self.here.stop) if met else self.front


def meeting_of(operation: Any) -> Meeting | None:
    """Where a prefetch that is read from the back meets its front; None: it is read in order."""
    meeting: Meeting | None = getattr(operation, "hcache_meeting", None)
    return meeting
