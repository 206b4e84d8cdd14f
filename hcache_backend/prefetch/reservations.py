"""Eager restores: pages become K and V while the rest of their prefetch is still being read.

Free device pages are reserved for the pages of a prefetch. Arrived pages are copied and projected,
and a load gets the prepared device pages. It may never come, so reserved pages count as free.

- A device page is free, reserved for one host page, or handed out. A restore is launched for it
  once: of the host page that arrived and was proven, or to recompute it, behind other pages.
- It is handed out once, with that restore. It becomes free only behind what writes or reads it.
- A freed host page gives its device page back, and the CPU waits: the next writer is a thread.
- All tensor-parallel ranks do the same. A launch that fails on one counts as launched there, too,
  and all ranks refuse a load of its pages.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.arena import Ids
from hcache_backend.host.loads import Prepared
from hcache_backend.host.ports import DevicePages
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import StreamFailed

_LAUNCH_SHARE = 4  # a GPU gets a quarter of a hit at a time, or the bytes that its bus copies
_LAUNCH_BYTES = 64 << 20  # in 2 ms: a launch takes the scheduler thread 0.1 ms


@dataclass(eq=False)
class Reserved:
    """A device page that is reserved for one host page."""

    reservation: Reservation
    number: int  # in the reservation
    host_page: int
    is_held: bool = True  # neither given back nor handed out
    restore: RunningRestore | None = None  # was launched for it, or recomputes it whole


@dataclass(eq=False)
class Reservation:
    """Device pages for consecutive pages of one prefetch."""

    slots: torch.Tensor  # page by page
    keys: Sequence[Hashable]  # of each page in storage
    first: int  # number of page 0 in the prefetch
    pages: list[Reserved] = field(default_factory=list)
    # End and restore of the last recomputation, which ends behind the earlier ones.
    last_slice: tuple[int, RunningRestore] | None = None
    failed: bool = False  # a launch failed on this rank: its pages have any content
    released: float = math.inf  # number of the first page that is not held any more

    def waiting_pages(self) -> list[Reserved]:
        """The held pages for which nothing was launched yet."""
        return [page for page in self.pages if page.is_held and page.restore is None]

    def launched_pages(self) -> list[Reserved]:
        """The held pages with K and V, or those of a restore that was launched."""
        return [page for page in self.pages if page.is_held and page.restore is not None]

    def pages_at(self, numbers: range) -> list[Reserved]:
        return self.pages[numbers.start : numbers.stop]


def launch_pages(device: torch.device | str, page_bytes: int) -> Callable[[int], int]:
    """Least number of pages to restore at once, by the pages of a prefetch."""
    if torch.device(device).type != "cuda":
        return lambda pages: 1
    enough = max(1, _LAUNCH_BYTES // page_bytes)
    return lambda pages: min(enough, -(-pages // _LAUNCH_SHARE))


@dataclass(eq=False)
class EagerRestores:
    """Reserves device pages for prefetches. Scheduler thread only."""

    _size: int  # tokens of a page
    _free: DevicePages
    # _launch(host_pages, slots) restores consecutive pages that have arrived: [p], [p * page_size].
    _launch: Callable[[Ids, torch.Tensor], RunningRestore]
    limit: int  # most reserved pages
    _at_once: Callable[[int], int] = lambda pages: 1  # from :func:`launch_pages`

    def __post_init__(self) -> None:
        self._reservations: list[Reservation] = []  # in the order in which they were made
        self._running: dict[Hashable, Reservation] = {}  # by prefetch
        self._reserved: dict[int, Reserved] = {}  # held pages, by host page
        self._reading: list[tuple[list[int], RunningRestore]] = []  # or writing: host pages

    @property
    def pages(self) -> int:
        return len(self._reserved)

    def running_prefetches(self) -> list[Hashable]:
        """The prefetches after :meth:`reserve` and before :meth:`end`, in order."""
        return list(self._running)

    def reserve(self, prefetch: Hashable, keys: Sequence[Hashable], host_pages: Ids) -> int:
        """A prefetch begins, which brings ``keys`` to ``host_pages``: reserve device pages for as
        many as possible, from the first one on that no other prefetch brings; returns their number.
        Device pages of ended prefetches are given back for it, the oldest first."""
        coming_keys = {key for other in self._running.values() for key in other.keys}
        first = next((i for i, key in enumerate(keys) if key not in coming_keys), len(keys))
        ended = (one for one in self._reservations if one not in self._running.values())
        unused = [page for one in ended for page in reversed(one.launched_pages())]
        spare = self.limit - self.pages
        chosen = range(first, min(len(keys), first + max(0, spare + len(unused))))
        if spare < len(chosen):
            self._give_back(unused[: len(chosen) - spare])
        if self._free.count() < len(chosen):
            self._free.make_room(len(chosen))
        chosen = chosen[: self._free.count()]
        ids = host_pages[chosen.start : chosen.stop].tolist()
        slots = self._free.take(len(chosen)) if ids else torch.empty(0, dtype=torch.int64)
        reservation = Reservation(slots, keys[chosen.start : chosen.stop], chosen.start)
        reservation.pages = [Reserved(reservation, i, page) for i, page in enumerate(ids)]
        self._running[prefetch] = reservation
        self._reservations.append(reservation)
        self._reserved.update(zip(ids, reservation.pages, strict=True))
        return len(ids)

    def reachable(self, prefetch: Hashable, front: int) -> int:
        """Number of leading pages of ``prefetch`` that have a reserved device page, so that they
        can be recomputed, behind the first ``front`` ones, which were. 0 if one of these has lost
        its device page: later pages cannot be recomputed without it."""
        reservation = self._running[prefetch]
        held_pages = int(min(reservation.released, len(reservation.pages)))
        return held_pages if not reservation.first and held_pages >= front else 0

    def launch_failed(self, prefetch: Hashable) -> bool:
        """True if a launch of its pages failed on this rank."""
        return self._running[prefetch].failed

    def restore_arrived(self, prefetch: Hashable, arrived: range, *, last: bool = False) -> int:
        """Restore the ``arrived`` pages of a prefetch, which all ranks have read and verified, if
        no restore was launched for them. Returns the number of launched pages: a few wait for more,
        unless they are the ``last`` ones that are read."""
        reservation = self._running[prefetch]
        self._reading = [one for one in self._reading if not one[1].copied.query()]
        start, stop = arrived.start - reservation.first, arrived.stop - reservation.first
        pages = reservation.pages_at(range(max(0, start), max(0, stop)))
        due = [page.number for page in pages if page.is_held and page.restore is None]
        size = len(reservation.pages)
        all_arrived = start <= 0 and size <= stop
        if not (last or all_arrived) and len(due) < self._at_once(size):
            return 0
        for run in consecutive_runs(due):
            run_pages = reservation.pages_at(run)
            ids = np.array([page.host_page for page in run_pages], dtype=np.int64)
            restore = self._launch(ids, self._slots(reservation, run))
            reservation.failed |= restore.failed is not None
            for page in run_pages:
                page.restore = restore
            self._reading.append((ids.tolist(), restore))
        return len(due)

    def host_pages(self, prefetch: Hashable, pages: range) -> Ids:
        """Host pages of reachable ``pages`` of a running prefetch, by their numbers."""
        return np.array(
            [page.host_page for page in self._running[prefetch].pages_at(pages)], np.int64
        )

    def slots(self, prefetch: Hashable, pages: range) -> torch.Tensor:
        """Slots of the tokens of these pages of a running prefetch, int64 ``[n]``."""
        return self._slots(self._running[prefetch], pages)

    def mark_recomputed(self, prefetch: Hashable, pages: range, restore: RunningRestore) -> None:
        """``restore`` was launched to recompute ``pages`` (see :meth:`reachable`), behind earlier
        ones on the same stream. It reads K and V of all tokens before; the pages are in host memory
        behind its event ``copied``. If it failed, they may be tried again."""
        reservation = self._running[prefetch]
        before = reservation.last_slice
        # A failed slice may have written more pages than are tried again.
        stop = max(pages.stop, before[0] if before is not None else 0)
        reservation.last_slice = stop, restore
        self._reading.append((self.host_pages(prefetch, pages).tolist(), restore))
        if restore.failed is None:
            for page in reservation.pages_at(pages):
                page.restore = restore

    def end(self, prefetch: Hashable) -> int:
        """A prefetch is over. Gives back its pages that were not launched, and returns their
        number; launched pages wait for a load until their room is needed."""
        waiting = self._running.pop(prefetch).waiting_pages()
        self._give_back(waiting)
        return len(waiting)

    def host_freed(self, host_pages: Ids) -> None:
        """Host pages get other content. Blocks until nothing accesses them."""
        self.wait_until_saved(host_pages)
        freed = self._reserved_for(np.unique(host_pages))
        self._give_back([page for page in freed if page is not None])

    def wait_until_saved(self, host_pages: Ids) -> None:
        """Block until no restore reads or writes these host pages, because the CPU is going to."""
        waited_for = set(host_pages.tolist())
        for pages, restore in self._reading:
            if not waited_for.isdisjoint(pages):
                _wait_until_copied(restore)

    def ready_pages(self, host_pages: Ids) -> npt.NDArray[np.bool_]:
        """Mask of the pages that :meth:`hand_out` would give with K and V of stored layers."""
        reserved = self._reserved_for(host_pages)
        ready = [page is not None and page.restore is not None for page in reserved]
        return np.array(ready, np.bool_)

    def any_failed(self, host_pages: Ids) -> bool:
        """True if no load may get the device pages for these: a launch failed on this rank."""
        reserved = self._reserved_for(host_pages)
        return any(page is not None and page.reservation.failed for page in reserved)

    def _reserved_for(self, host_pages: Ids) -> list[Reserved | None]:
        """The device page that is reserved for each host page; None if there is none."""
        return [self._reserved.get(page) for page in host_pages.tolist()]

    def make_free(self, pages: int) -> None:
        """Give back reserved pages until ``pages`` device pages are free, if there are as many:
        first those not launched, from the end of the newest prefetch on, then the oldest."""
        short = pages - self._free.count()
        if short > 0:
            oldest, newest = self._reservations, reversed(self._reservations)
            waiting = [page for one in newest for page in reversed(one.waiting_pages())]
            launched = [page for one in oldest for page in reversed(one.launched_pages())]
            self._give_back([*waiting, *launched][:short])

    def hand_out(self, host_pages: Ids) -> Prepared | None:
        """Device pages for a load of ``host_pages``, in their order: those that are reserved for
        them, and free ones for others. None, without a change, if too few are free or reserved."""
        if len(host_pages) > self._free.count() + self.pages:
            return None
        reserved = self._reserved_for(host_pages)
        handed_out = [page for page in reserved if page is not None]
        ready = self.ready_pages(host_pages)
        restores = tuple(_restores_using(handed_out))
        # A slice that failed may still write pages that the load is going to write.
        wait_until_written(_restores_using([page for page in handed_out if page.restore is None]))
        self._forget(handed_out)
        missing = len(reserved) - len(handed_out)
        self.make_free(missing)
        taken, parts = (self._free.take(missing) if missing else None), list[torch.Tensor]()

        def run_of(item: tuple[int, Reserved | None]) -> tuple[Reservation | None, int]:
            """Equal for neighbours in one tensor, which then need one slice instead of many."""
            index, page = item
            return (None, 0) if page is None else (page.reservation, page.number - index)

        for (reservation, _), neighbours in groupby(enumerate(reserved), run_of):
            pages = [page for _, page in neighbours]
            if reservation is not None and pages[0] is not None:
                first = pages[0].number
                parts.append(self._slots(reservation, range(first, first + len(pages))))
            elif taken is not None:
                part, taken = taken.tensor_split([len(pages) * self._size])
                parts.append(part)
        return Prepared(torch.cat(parts), ready, restores)

    def give_all_back(self) -> None:
        """Give back everything and block until nothing reads host pages; prefetches go on."""
        for _, restore in self._reading:
            _wait_until_copied(restore)
        self._give_back([*self._reserved.values()])

    def all_freed(self) -> None:
        """Every page of the device was freed elsewhere: forget the reservations."""
        wait_until_written(_restores_using([*self._reserved.values()]))
        self._forget([*self._reserved.values()])

    def _slots(self, reservation: Reservation, pages: range) -> torch.Tensor:
        """Slots of the tokens of ``pages``, by their numbers in the reservation."""
        return reservation.slots[pages.start * self._size : pages.stop * self._size]

    def _give_back(self, pages: Sequence[Reserved]) -> None:
        """Make device pages free, for a stream that waits for what writes them or reads them."""
        wait_until_written(_restores_using(pages))
        self._forget(pages)
        numbers: dict[Reservation, list[int]] = {}
        for page in pages:
            numbers.setdefault(page.reservation, []).append(page.number)
        for reservation, page_numbers in numbers.items():
            for run in consecutive_runs(sorted(page_numbers)):
                self._free.give(self._slots(reservation, run))

    def _forget(self, pages: Iterable[Reserved]) -> None:
        """Forget these pages, and the reservations of ended prefetches that have no other ones."""
        for page in pages:
            reservation, page.is_held = page.reservation, False
            reservation.released = min(page.number, reservation.released)
            del self._reserved[page.host_page]
        in_use = {page.reservation for page in self._reserved.values()}
        in_use |= set(self._running.values())
        self._reservations = [one for one in self._reservations if one in in_use]


def wait_until_written(restores: Iterable[RunningRestore]) -> None:
    """Let the current stream wait until these restores have written: it may write there now."""
    for restore in restores:
        with contextlib.suppress(StreamFailed):  # then nothing is written any more
            restore.wait()


def _restores_using(pages: Sequence[Reserved]) -> Iterable[RunningRestore]:
    """Each restore that writes one of these pages, or reads it, once."""
    using = [page.restore for page in pages if page.restore]
    slices = ((page.number, page.reservation.last_slice) for page in pages)
    using += [last[1] for number, last in slices if last is not None and number < last[0]]
    return {id(restore): restore for restore in using}.values()


def _wait_until_copied(restore: RunningRestore) -> None:
    """Block until ``restore`` accesses no host page any more."""
    with contextlib.suppress(StreamFailed):  # then nothing is read any more
        restore.wait_until_copied()


def consecutive_runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield range(numbers[start], numbers[stop - 1] + 1)
