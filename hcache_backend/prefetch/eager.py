"""Eager restores: pages become K and V while the rest of their prefetch is still being read.

For the pages that a prefetch will bring, free device pages are reserved; whenever some have arrived
they are copied and projected. The engine's load of these host pages then gets the device pages that
were prepared for them. That they will be wanted is a guess: reserved pages count as free.

- A device page is either free, or reserved for one host page, or handed out, never two of these.
- It is launched for a host page once: after that page has arrived and was proven, or to be
  recomputed whole instead, and then the host page is made of it.
- First layers that it lacks are recomputed only behind pages that lack none.
- It is handed out for the host page that it was launched for, once, together with the restore that
  writes it: whoever reads it waits for that restore first.
- It is free for others only behind what writes it, and what recomputes from it.
- When the host page is freed, what was made of it is worth nothing and is given back. Whoever
  writes there next is a thread, which waits for no stream: the caller waits for the restore.

It depends on nothing that differs between tensor-parallel ranks, such as whether an event has
passed: they all decide the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.host.loads import HandOut
from hcache_backend.page import READ_BATCHES
from hcache_backend.prefetch.reservation import (
    Ids,
    Launched,
    LaunchRestore,
    Place,
    Recomputation,
    Reservation,
    by_reservation,
    runs,
    using,
)
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import StreamFailed

_LEAST_BATCH = 4
"""Pages that are read at a time at least, if there are so many: disks want company."""


_LAUNCH_SHARE = 4
_LAUNCH_BYTES = 64 << 20
"""A GPU is given a quarter of a hit at a time, or what its bus copies in two milliseconds: each
launch takes the scheduler thread a tenth of one."""


def launch_pages(device: torch.device | str, page_bytes: int) -> Callable[[int], int]:
    """How many pages of a prefetch of that many pages are restored at once, at least: nobody but
    the restore waits for those that have arrived. The same on all ranks."""
    if torch.device(device).type != "cuda":
        return lambda pages: 1
    enough = max(1, _LAUNCH_BYTES // page_bytes)
    return lambda pages: min(enough, -(-pages // _LAUNCH_SHARE))


def batch_pages(pages: int) -> int:
    """How many pages of a prefetch of ``pages`` pages are read at a time; at least one."""
    return min(max(1, pages), max(_LEAST_BATCH, -(-pages // READ_BATCHES)))


class FreePages(Protocol):
    """The device's free pages, without the reserved ones."""

    def count(self) -> int:
        """How many there are."""

    def make_room(self, pages: int) -> None:
        """Try to have ``pages`` of them, at the cost of what is cached on the device."""

    def take(self, pages: int) -> torch.Tensor:
        """Take ``pages`` of them, which are there: their slots, int64 ``[pages * page_size]``."""

    def give(self, slots: torch.Tensor) -> None:
        """Make the whole pages of ``slots`` free, for whoever comes next on the current stream."""


class EagerRestores:
    """Which free device pages are reserved, at most ``limit``, for what. Scheduler thread only.

    ``launch`` restores pages, as many of a prefetch at once as ``at_once`` says; see
    :func:`launch_pages`.
    """

    def __init__(
        self,
        page_size: int,
        free: FreePages,
        launch: LaunchRestore,
        limit: int,
        at_once: Callable[[int], int] = lambda pages: 1,
    ) -> None:
        self._at_once = at_once
        self._size = page_size
        self._free = free
        self._launch = launch
        self._limit = limit
        self._reservations: list[Reservation] = []  # in the order in which they were made
        self._running: dict[Hashable, Reservation] = {}  # by prefetch
        self._places: dict[int, Place] = {}  # by host page
        # Host pages, and what reads or writes them.
        self._reading: list[tuple[list[int], RunningRestore]] = []

    @property
    def pages(self) -> int:
        """Device pages that are reserved at present; nobody else's."""
        return len(self._places)

    # ---- prefetches ----

    def running(self) -> list[Hashable]:
        """The prefetches that :meth:`reserve` was called for and :meth:`end` was not, in order."""
        return list(self._running)

    def wanted(self, keys: Sequence[Hashable]) -> range:
        """Which pages of a prefetch :meth:`reserve` would have device pages for.

        Not those that a running prefetch brings already, and not more than the limit.
        """
        coming = {key for other in self._running.values() for key in other.keys}
        first = next((i for i, key in enumerate(keys) if key not in coming), len(keys))
        room = max(0, self._limit - self.pages + len(self._left_behind()))
        return range(first, min(len(keys), first + room))

    def reserve(
        self, prefetch: Hashable, keys: Sequence[Hashable], host_pages: Ids, unread: int = 0
    ) -> int:
        """A prefetch begins: reserve free device pages for as many of its pages as possible.

        What ended prefetches left is given back for it, the oldest first.

        Its pages, with these keys in storage, will arrive in ``host_pages`` (int64 ``[pages]``),
        which nobody else uses. Those that have not may be recomputed whole: ``unread`` layers
        (0: they may not). Returns how many device pages were reserved.
        """
        chosen = self.wanted(keys)
        spare = self._limit - self.pages
        if spare < len(chosen):
            self._give_back(self._left_behind()[: len(chosen) - spare])
        if self._free.count() < len(chosen):
            self._free.make_room(len(chosen))
        chosen = chosen[: self._free.count()]
        ids = host_pages[chosen.start : chosen.stop].tolist()
        slots = self._free.take(len(chosen)) if ids else torch.empty(0, dtype=torch.int64)
        wanted = keys[chosen.start : chosen.stop]
        reservation = Reservation(ids, slots, wanted, chosen.start, set(range(len(ids))), unread)
        self._running[prefetch] = reservation
        self._reservations.append(reservation)
        self._places.update({page: (reservation, i) for i, page in enumerate(ids)})
        return len(ids)

    def reachable(self, prefetch: Hashable) -> int:
        """How many of its first pages can be recomputed one after the other, or were."""
        return self._running[prefetch].reachable

    def arrived(self, prefetch: Hashable, pages: int, start: int = 0, *, last: bool = False) -> int:
        """Pages ``start`` to ``pages`` of a prefetch are there, and proven, on all ranks.

        Few of them wait for others, unless they are the ``last`` ones that are read. Returns how
        many pages are restored by what it launched, but for layers that they lack.
        """
        reservation = self._running[prefetch]
        self._reading = [one for one in self._reading if not one[1].copied.query()]
        there = range(start - reservation.first, pages - reservation.first)
        due = [i for i in reservation.waiting() if i in there]
        size = len(reservation.host_pages)
        last = last or (there.start <= 0 and size <= there.stop)
        if not last and len(due) < self._at_once(size):
            return 0
        for run in runs(due):
            ids = np.array(reservation.host_pages[run.start : run.stop], dtype=np.int64)
            launched = self._launch(ids, self._slots(reservation, run))
            reservation.launches.update(dict.fromkeys(run, launched))
            self._reading.append((ids.tolist(), launched.restore))
        return len(due)

    def to_recompute(self, most: int) -> Iterator[Recomputation]:
        """Pages of each running prefetch, at most ``most``, whose first layers can be recomputed.

        Behind all pages before them in the prefetch, which have those of all layers.
        """
        for prefetch, reservation in self._running.items():
            pages = reservation.to_recompute(most)
            if pages:
                unread = pages.start not in reservation.launches
                layers = reservation.unread if unread else reservation.launches[pages.start].lacking
                yield Recomputation(prefetch, reservation, pages, layers, unread)

    def slots(self, due: Recomputation) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the tokens of ``due``, and of all before them in the prefetch, int64 ``[n]``."""
        before = range(due.pages.start)
        return self._slots(due.reservation, due.pages), self._slots(due.reservation, before)

    def recomputed(self, done: Recomputation, restore: RunningRestore) -> None:
        """``restore`` was launched for all of ``done``; it reads K and V of all tokens before them.

        Behind all that was launched so before, on the same stream. Host pages of unread ones have
        been written behind its event ``copied``.
        """
        before = done.reservation.last_slice
        # One that failed may have written more pages than are tried again.
        stop = max(done.pages.stop, before[0] if before is not None else 0)
        done.reservation.last_slice = stop, restore
        if done.unread:
            self._reading.append((done.host_pages.tolist(), restore))
        if restore.failed is not None:
            return
        done.reservation.recomputed.update(done.pages)
        if done.unread:
            done.reservation.launches.update(dict.fromkeys(done.pages, Launched(restore, 0)))

    def end(self, prefetch: Hashable) -> int:
        """No more pages come: what none was launched into is given back.

        The others stay for a load, until somebody needs the room. Returns how many were given back.
        """
        reservation = self._running.pop(prefetch)
        waiting = [(reservation, i) for i in reservation.waiting()]
        self._give_back(waiting)
        return len(waiting)

    def host_freed(self, host_pages: Ids) -> None:
        """Host pages will hold something else: nothing is at them any more on return."""
        self.until_saved(host_pages)
        freed = dict.fromkeys(host_pages.tolist())
        self._give_back([self._places[page] for page in freed if page in self._places])

    def until_saved(self, host_pages: Ids) -> None:
        """The CPU wants host pages: nothing reads or writes them any more on return."""
        wanted = set(host_pages.tolist())
        for pages, restore in self._reading:
            if not wanted.isdisjoint(pages):
                _until_copied(restore)

    def prepared(self, host_pages: Ids) -> npt.NDArray[np.bool_]:
        """Which pages (int64 ``[pages]``) :meth:`hand_out` would give whole; bool ``[pages]``."""
        places = (self._places.get(page) for page in host_pages.tolist())
        whole = [place is not None and place[0].is_whole(place[1]) for place in places]
        return np.array(whole, dtype=np.bool_)

    # ---- allocation ----

    def make_free(self, pages: int) -> None:
        """See to it that ``pages`` device pages are free, if so many are free or reserved.

        Pages go first that were not launched, those of the newest prefetch and of its end before
        others; then launched ones, the oldest first.
        """
        short = pages - self._free.count()
        if short > 0:
            newest = reversed(self._reservations)
            waiting = [(one, i) for one in newest for i in reversed(one.waiting())]
            launched = [(one, i) for one in self._reservations for i in reversed(one.launched())]
            self._give_back([*waiting, *launched][:short])

    def hand_out(self, host_pages: Ids) -> HandOut | None:
        """Device pages for a load of ``host_pages`` (int64 ``[pages]``), each of them once.

        None, and nothing has changed, when there are not enough free and reserved pages.
        """
        if len(host_pages) > self._free.count() + self.pages:
            return None
        found = [self._places.get(page) for page in host_pages.tolist()]
        places = [place for place in found if place is not None]
        ready = np.array([place is not None and place[1] in place[0].launches for place in found])
        whole = self.prepared(host_pages)
        restores = tuple(using(places))
        self._forget(places)
        missing = len(found) - len(places)
        self.make_free(missing)
        fresh = iter(self._free.take(missing).split(self._size) if missing else ())
        parts = [
            next(fresh) if place is None else self._slots(place[0], range(place[1], place[1] + 1))
            for place in found
        ]
        return HandOut(torch.cat(parts), ready, whole, restores)

    # ---- the end ----

    def clear(self) -> None:
        """Give back everything: what was made of the pages is not wanted any more.

        Prefetches that run go on without device pages. Nothing reads host pages on return.
        """
        for _, restore in self._reading:
            _until_copied(restore)
        self._give_back(list(self._places.values()))

    def all_freed(self) -> None:
        """Somebody made every page of the device free: forget what was reserved."""
        self._wait(self._places.values())
        self._forget(list(self._places.values()))

    # ---- internals ----

    def _left_behind(self) -> list[Place]:
        running = {id(reservation) for reservation in self._running.values()}
        ended = (one for one in self._reservations if id(one) not in running)
        return [(one, i) for one in ended for i in reversed(one.launched())]

    def _slots(self, reservation: Reservation, pages: range) -> torch.Tensor:
        return reservation.slots[pages.start * self._size : pages.stop * self._size]

    def _give_back(self, places: Sequence[Place]) -> None:
        self._wait(places)
        self._forget(places)
        for reservation, numbers in by_reservation(places):
            for run in runs(sorted(numbers)):
                self._free.give(self._slots(reservation, run))

    def _wait(self, places: Iterable[Place]) -> None:
        """Let the current stream wait for whatever writes or reads these pages."""
        for restore in using(places):
            with contextlib.suppress(StreamFailed):  # then nothing is written any more
                restore.wait()

    def _forget(self, places: Iterable[Place]) -> None:
        for reservation, i in places:
            reservation.release(i)
            del self._places[reservation.host_pages[i]]
        running = {id(reservation) for reservation in self._running.values()}
        self._reservations = [one for one in self._reservations if one.held or id(one) in running]


def _until_copied(restore: RunningRestore) -> None:
    """Block the calling thread until a restore reads no host page any more."""
    with contextlib.suppress(StreamFailed):  # then nothing is read any more
        restore.wait_until_copied()
