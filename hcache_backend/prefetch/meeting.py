"""The two ends of a prefetch that is read from the back while its front is recomputed."""

from __future__ import annotations

import threading


class Meeting:
    """The two ends of one prefetch. A thread reads pages from the last one on; the scheduler has
    pages recomputed whole from the first one on, until they meet. No page is taken by both.
    Tensor-parallel ranks read on their own and recompute in step: the front takes only pages that
    no rank reads, and pages of the back count once all ranks have them."""

    def __init__(self) -> None:
        self.front = 0  # pages whose recomputation was launched; the scheduler's
        self.back = range(0)  # pages that were read and verified on all ranks; the scheduler's
        # First page that recomputation cannot reach, as of the last turn. None, before the first
        # turn, counts as all reachable: otherwise the reader would claim the front's pages.
        self.reachable: int | None = None
        self._lock = threading.Condition()
        self._taken = 0  # by the front
        self._offered = 0  # to the front behind them, while the ranks agree
        self._unread: int | None = None  # the reader takes pages before this one

    def set_pages(self, pages: int) -> None:
        """The prefetch has ``pages`` pages. Both sides call it, in any order."""
        with self._lock:
            if self._unread is None:
                self._unread = pages

    def next_batch(self, most: int) -> range:
        """Claim the next pages to read, at most ``most`` (at least 1) and before those claimed
        last; empty if the ends have met. Called on the thread that reads. Waits only while all
        unread pages are offered to the front, until the ranks have agreed on these."""
        with self._lock:
            self._lock.wait_for(lambda: not self._offered or self._offered < self.unread)
            assert self._unread is not None
            first = max(self._taken + self._offered, self._unread - most)
            stop, self._unread = self._unread, first
            return range(first, stop)

    @property
    def taken_pages(self) -> int:
        """Number of pages that the front has taken: they need not be read. Any thread."""
        return self._taken

    @property
    def unread(self) -> int:
        """Number of pages that are neither taken by the front nor read, or being read."""
        assert self._unread is not None
        return self._unread - self._taken

    @property
    def reachable_share(self) -> float:
        """Share of the unread pages that recomputation can reach. Any thread."""
        unread, reachable = self.unread, self.reachable
        if reachable is None or not unread:
            return 1.0
        return min(1.0, max(0, reachable - self._taken) / unread)

    @property
    def next_front(self) -> range:
        """Pages that the front may take next, as far as all ranks know."""
        stop = self.reachable or 0
        return range(self.front, min(stop, self.back.start) if self.back else stop)

    def offer(self, most: int) -> int:
        """Offer at most ``most`` unread pages to the front, its next ones, and return their number.
        The reader leaves them alone until :meth:`take_offered`, and reads others meanwhile."""
        with self._lock:
            # Pages taken but not launched have failed: there is no way past them.
            self._offered = min(most, self.unread) if self._taken == self.front else 0
            return self._offered

    def take_offered(self, pages: int) -> range:
        """The front takes the first ``pages`` of those that were offered; the rest may be read."""
        with self._lock:
            first, self._taken, self._offered = self._taken, self._taken + pages, 0
            self._lock.notify_all()
            return range(first, self._taken)

    def front_launched(self, pages: range) -> None:
        """The recomputation of the front's next ``pages`` was launched."""
        assert pages.start == self.front
        self.front = pages.stop

    def set_back(self, start: int, end: int) -> None:
        """All ranks have read pages ``start`` to ``end``, so far."""
        self.back = range(start, max(start, end))

    @property
    def counted_pages(self) -> int:
        """Number of pages that HiCache may use, from the first one on: recomputed or read."""
        have_met = bool(self.back) and self.front >= self.back.start
        return max(self.front, self.back.stop) if have_met else self.front
