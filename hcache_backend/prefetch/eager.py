"""Eager restores: pages become K and V while the rest of their prefetch is still being read.

Free device pages are reserved for the pages of a prefetch. Those that have arrived are copied and
projected, and a load gets the prepared device pages. It may never come, so reserved pages count as
free.

- A device page is free, reserved for one host page, or handed out.
- It is launched for a host page once: after that page arrived and was proven, or to be recomputed
  whole, and then the host page is made of it.
- First layers that it lacks are recomputed only behind pages that lack none.
- It is handed out once, with the restore that writes it: the reader waits for that first.
- It becomes free only behind what writes it, and what recomputes from it.
- A freed host page gives its device page back. The next writer of the host page is a thread, which
  waits for no stream: the caller waits for the restore.
- Nothing depends on what differs between tensor-parallel ranks, such as whether an event has
  passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.host.loads import HandOut, runs
from hcache_backend.plan.restore import READ_BATCHES
from hcache_backend.prefetch.reservation import (
    Ids,
    Launched,
    LaunchRestore,
    Place,
    Recomputation,
    Reservation,
    by_reservation,
    using,
)
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import StreamFailed

_LEAST_BATCH = 4  # pages of a read at least, if there are as many: disks need parallel requests


_LAUNCH_SHARE = 4  # a GPU gets a quarter of a hit at a time, or what its bus copies
_LAUNCH_BYTES = 64 << 20  # in 2 ms: a launch takes the scheduler thread 0.1 ms


def launch_pages(device: torch.device | str, page_bytes: int) -> Callable[[int], int]:
    """The least number of pages to restore at once, as a function of a prefetch's pages; the same
    on all ranks. Arrived pages can wait for more, since only the restore wants them."""
    if torch.device(device).type != "cuda":
        return lambda pages: 1
    enough = max(1, _LAUNCH_BYTES // page_bytes)
    return lambda pages: min(enough, -(-pages // _LAUNCH_SHARE))


def batch_pages(pages: int) -> int:
    """Pages of a prefetch of ``pages`` pages to read at a time; at least one."""
    return min(max(1, pages), max(_LEAST_BATCH, -(-pages // READ_BATCHES)))


class FreePages(Protocol):
    """The device's free pages, without reserved ones; slots are int64 ``[pages * page_size]``."""

    def count(self) -> int:
        """Number of free pages."""

    def make_room(self, pages: int) -> None:
        """Try to free ``pages`` of them at the cost of what is cached on the device."""

    def take(self, pages: int) -> torch.Tensor:
        """Take ``pages`` of them, which are there; returns their slots."""

    def give(self, slots: torch.Tensor) -> None:
        """Free the whole pages of ``slots``, for the next user on the current stream."""


class EagerRestores:
    """Reserves free device pages for prefetches, at most ``limit``. Scheduler thread only.
    ``launch`` restores pages, at least ``at_once(pages)`` of a prefetch at once."""

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
        # Host pages, and the restore that reads or writes them.
        self._reading: list[tuple[list[int], RunningRestore]] = []

    @property
    def pages(self) -> int:
        return len(self._places)

    # ---- prefetches ----

    def running(self) -> list[Hashable]:
        """The prefetches after :meth:`reserve` and before :meth:`end`, in order."""
        return list(self._running)

    def wanted(self, keys: Sequence[Hashable]) -> range:
        """Pages of a prefetch for which :meth:`reserve` would have device pages: within the limit,
        and not those that a running prefetch brings."""
        coming = {key for other in self._running.values() for key in other.keys}
        first = next((i for i, key in enumerate(keys) if key not in coming), len(keys))
        room = max(0, self._limit - self.pages + len(self._left_behind()))
        return range(first, min(len(keys), first + room))

    def reserve(
        self, prefetch: Hashable, keys: Sequence[Hashable], host_pages: Ids, unread: int = 0
    ) -> int:
        """A prefetch begins: reserve device pages for as many of its pages as possible.

        Returns their number. Device pages of ended prefetches are given back for it, the oldest
        first. ``keys`` will arrive in ``host_pages``, which nothing else uses. ``unread``: layers
        to recompute of a page that has not arrived; 0 if that is not allowed.
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
        """Number of its first pages that can be recomputed one after the other, or were."""
        return self._running[prefetch].reachable

    def arrived(self, prefetch: Hashable, pages: int, start: int = 0, *, last: bool = False) -> int:
        """Pages ``start`` to ``pages`` are there and proven on all ranks. Few pages wait for more,
        unless they are the ``last`` ones that are read. Returns the number of launched pages."""
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
        """At most ``most`` pages of each running prefetch whose first layers can be recomputed. All
        pages before them in the prefetch have these layers."""
        for prefetch, reservation in self._running.items():
            pages = reservation.to_recompute(most)
            if pages:
                unread = pages.start not in reservation.launches
                layers = reservation.unread if unread else reservation.launches[pages.start].lacking
                yield Recomputation(prefetch, reservation, pages, layers, unread)

    def slots(self, due: Recomputation) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the tokens of ``due``, and of all tokens before them in the prefetch."""
        before = range(due.pages.start)
        return self._slots(due.reservation, due.pages), self._slots(due.reservation, before)

    def recomputed(self, done: Recomputation, restore: RunningRestore) -> None:
        """``restore`` was launched for ``done``, behind earlier ones on the same stream. It reads K
        and V of all tokens before; unread ones are in host pages behind its event ``copied``."""
        before = done.reservation.last_slice
        # A failed slice may have written more pages than are tried again.
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
        """No more pages come. Gives back the pages that were not launched and returns their number;
        the others wait for a load until the room is needed."""
        reservation = self._running.pop(prefetch)
        waiting = [(reservation, i) for i in reservation.waiting()]
        self._give_back(waiting)
        return len(waiting)

    def host_freed(self, host_pages: Ids) -> None:
        """Host pages will hold something else. Blocks until nothing accesses them."""
        self.until_saved(host_pages)
        freed = dict.fromkeys(host_pages.tolist())
        self._give_back([self._places[page] for page in freed if page in self._places])

    def until_saved(self, host_pages: Ids) -> None:
        """Blocks until nothing reads or writes the host pages: the CPU wants them."""
        wanted = set(host_pages.tolist())
        for pages, restore in self._reading:
            if not wanted.isdisjoint(pages):
                _until_copied(restore)

    def prepared(self, host_pages: Ids) -> npt.NDArray[np.bool_]:
        """Mask of the pages that :meth:`hand_out` would give whole."""
        places = (self._places.get(page) for page in host_pages.tolist())
        whole = [place is not None and place[0].is_whole(place[1]) for place in places]
        return np.array(whole, dtype=np.bool_)

    # ---- allocation ----

    def make_free(self, pages: int) -> None:
        """Give back reserved pages until ``pages`` device pages are free, if there are as many:
        first those not launched, from the end of the newest prefetch on, then the oldest."""
        short = pages - self._free.count()
        if short > 0:
            newest = reversed(self._reservations)
            waiting = [(one, i) for one in newest for i in reversed(one.waiting())]
            launched = [(one, i) for one in self._reservations for i in reversed(one.launched())]
            self._give_back([*waiting, *launched][:short])

    def hand_out(self, host_pages: Ids) -> HandOut | None:
        """Device pages for a load of ``host_pages``, each used once. None, with nothing changed, if
        there are not enough free and reserved pages."""
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
        """Give back everything and block until nothing reads host pages; prefetches go on."""
        for _, restore in self._reading:
            _until_copied(restore)
        self._give_back(list(self._places.values()))

    def all_freed(self) -> None:
        """Every page of the device was freed elsewhere: forget the reservations."""
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
    with contextlib.suppress(StreamFailed):  # then nothing is read any more
        restore.wait_until_copied()
