"""How a prefetch is read: in smaller batches than SGLang's 128 pages, so that its first pages are
known earlier; from the back, if its front is recomputed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.meeting import Meeting

_READ_BATCHES = 16  # of a prefetch, about
_LEAST_BATCH = 4  # pages of a read at least, if there are as many: disks need parallel requests
_FOUND_TOGETHER = 128  # pages behind a missing one that are read all the same
_LOOKING_SECONDS = 1e-3  # between two looks at the progress of the front
_LEAST_SECONDS = 0.01  # of a read, about, because each one has a fixed cost of milliseconds
_MOST_STEPS = 4  # of a read

# Fronts.seconds_until_met: seconds until both ends meet, and until reading alone has all pages
UntilMet = Callable[..., tuple[float, float]]


def batch_pages(pages: int) -> int:
    """Pages of a prefetch of ``pages`` pages to read at a time; at least one."""
    return min(max(1, pages), max(_LEAST_BATCH, -(-pages // _READ_BATCHES)))


class _InOrder:
    """Pages of a prefetch that is read from its first one on. Pages behind a missing one are read,
    too: so the store finds all damaged pages of a batch at once, and they are written again."""

    def __init__(self, pages: int) -> None:
        self.leading_pages = 0  # that were read and are there
        self._next, self._end = 0, pages

    def next_batch(self, most: int) -> range:
        """The next pages to read, at most ``most``; empty if all were read that are of use."""
        start, self._next = self._next, min(self._next + most, self._end)
        return range(start, self._next)

    def add(self, pages: range, got: int) -> None:
        """A batch of ``pages`` was read; the first ``got`` of them are there."""
        if self.leading_pages == pages.start:
            self.leading_pages += got
        if got < len(pages):
            self._end = min(self._end, pages.start + _FOUND_TOGETHER)


@dataclass(frozen=True)
class PrefetchRead:
    """A prefetch, for the thread that reads it. Pages are its own, from 0 on."""

    pages: int
    before: int  # pages of the prompt before it
    read: Callable[[range], int]  # reads pages; returns the number of leading ones that are there
    # These pages are there. SGLang's sync thread reduces the reports of all ranks.
    report: Callable[[range], None]
    has_ended: Callable[[], bool]


@dataclass(eq=False)
class BatchedReads:
    """Reads prefetches in smaller batches, for the storage thread."""

    _size: int  # tokens of a page
    _l3: L3Progress
    _seconds_per_page: float = math.inf  # of the first read of the last prefetch

    def transfer(
        self,
        prefetch: PrefetchRead,
        meeting: Meeting | None = None,
        seconds_until_met: UntilMet | None = None,
        *,
        trial: bool = False,
    ) -> int:
        """Read a prefetch in order, or from its last page to the ``meeting`` with the pages that
        are recomputed at its front. Every rank makes the same number of reports, which are reduced
        together, even if it reads less. Pages that the front would reach sooner, by
        ``seconds_until_met``, are left to it. In a ``trial`` of L3 a page is read first, however
        slow L3 seems. Returns the number of leading pages that were read in order and are there."""
        all_pages = prefetch.pages
        step, order, back = batch_pages(all_pages), _InOrder(all_pages), range(all_pages, all_pages)
        is_first = True
        if meeting is not None:
            meeting.set_pages(all_pages)
        for _ in range(0, all_pages, step):
            remaining = step * self._steps(step)  # till the next report
            while remaining and not prefetch.has_ended():
                if meeting is None or seconds_until_met is None:
                    pages = order.next_batch(remaining)
                elif is_first and trial:
                    pages = meeting.next_batch(1)
                else:
                    pages = self._next_back(prefetch, meeting, seconds_until_met, remaining)
                if not pages:
                    break
                remaining -= len(pages)
                self._l3.part_begins(len(pages) * self._size)
                begin = time.monotonic()
                got = prefetch.read(pages)
                if is_first and got == len(pages):
                    self._seconds_per_page = max(time.monotonic() - begin, 1e-6) / got
                is_first = False
                if meeting is None:
                    order.add(pages, got)
                else:
                    # Pages behind a missing one do not count any more.
                    end = back.stop if got == len(pages) else pages.start + got
                    back = range(pages.start, end)
            prefetch.report(range(order.leading_pages) if meeting is None else back)
        return order.leading_pages

    def _steps(self, step: int) -> int:
        """Number of steps of ``step`` pages to read at once; each is reported all the same."""
        return min(math.ceil(_LEAST_SECONDS / (step * self._seconds_per_page)) or 1, _MOST_STEPS)

    def _next_back(
        self, prefetch: PrefetchRead, meeting: Meeting, seconds_until_met: UntilMet, most: int
    ) -> range:
        """Pages to read now, at most ``most``; none if the prefetch has ended, or its reader and
        the recomputation of its front (the two ends of ``meeting``) have met. If the front will
        have all unread pages sooner than one is read, wait for it, as long as it gets on."""
        prefix = prefetch.before * self._size
        start, now, least_unread = 0.0, time.monotonic(), math.inf
        while not prefetch.has_ended() and (unread := meeting.unread):
            if unread < least_unread:
                start, least_unread = now, unread
            both_ends, reading = seconds_until_met(meeting, prefix, longest=True)
            sooner = 0 < reading >= both_ends * (unread + 1)  # than one page is read
            if not sooner or now - start > reading:
                part = int(unread * both_ends / reading) if reading else 1  # which shows the speed
                return meeting.next_batch(min(most, max(1, part)))
            time.sleep(_LOOKING_SECONDS)
            earlier, now = now, time.monotonic()
            self._l3.paused(now - earlier)  # at once: otherwise L3 would seem overdue
        return range(0)
