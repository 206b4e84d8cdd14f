"""What is reserved for one prefetch on the device, and what was launched for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.restore.report import RunningRestore

Ids = npt.NDArray[np.int64]


class Launched(NamedTuple):
    """What was launched for some pages when they had arrived.

    Attributes:
        restore: Writes K and V of the layers that they have.
        lacking: How many first layers they lack: these have to be recomputed yet.
    """

    restore: RunningRestore
    lacking: int


LaunchRestore = Callable[[Ids, torch.Tensor], Launched]
"""Launches the restore of consecutive pages: ``launch(host_pages, slots)`` with int64 ``[p]`` and
``[p * page_size]``."""


@dataclass(eq=False)
class Reservation:
    """Device pages for consecutive pages of one prefetch.

    Attributes:
        host_pages: The host page of each.
        slots: Their slots, page by page.
        keys: The storage key of each.
        first: Number, in the prefetch, of the first one.
        held: Numbers, here, of those that are neither given back nor handed out: at first all.
        unread: How many layers are recomputed of a page that has not arrived: all, or 0, none.
        launches: What was launched when they had arrived, or what recomputes them whole, by number.
        recomputed: Numbers of those that lacked layers and do not any more.
        last_slice: Up to which page layers were recomputed, and the last restore that did so. It
            ends behind those that did it before.
    """

    host_pages: list[int]
    slots: torch.Tensor
    keys: Sequence[Hashable]
    first: int
    held: set[int]
    unread: int = 0
    launches: dict[int, Launched] = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)
    last_slice: tuple[int, RunningRestore] | None = None
    _front: int = 0  # all pages before this one were whole, and held, when it got there
    _released: int | None = None  # the first page that is not held any more

    def waiting(self) -> list[int]:
        """Held pages that were not launched, in order."""
        return sorted(self.held - self.launches.keys())

    def launched(self) -> list[int]:
        """Held pages that were launched, in order."""
        return sorted(self.held & self.launches.keys())

    def is_whole(self, page: int) -> bool:
        """Whether all layers of a page were launched."""
        return page in self.recomputed or (
            page in self.launches and not self.launches[page].lacking
        )

    def release(self, page: int) -> None:
        """A page is given back or handed out."""
        self.held.remove(page)
        self._released = page if self._released is None else min(self._released, page)

    @property
    def reachable(self) -> int:
        """So many pages from the first one of the prefetch on can be recomputed, or were.

        0: the first ones are not reserved here, or are not held any more.
        """
        held = len(self.host_pages) if self._released is None else self._released
        return held if not self.first and held >= self._front else 0

    def to_recompute(self, most: int) -> range:
        """At most ``most`` pages that lack the same layers, behind pages that are held and whole.

        Of pages that have not arrived these are all layers, if they may be recomputed whole.

        None of them where the first pages of the prefetch are not reserved here.
        """
        if not self.reachable:
            return range(0)
        while self._front in self.held and self.is_whole(self._front):
            self._front += 1
        start = stop = self._front
        layers = self._lacks(start)
        while layers and stop - start < most and stop in self.held and self._lacks(stop) == layers:
            stop += 1
        return range(start, stop)

    def _lacks(self, page: int) -> int:
        """How many first layers of a page can be recomputed, but were not."""
        return self.launches[page].lacking if page in self.launches else self.unread

    def using(self, numbers: set[int]) -> list[RunningRestore]:
        """What was launched that writes one of these pages, or reads it."""
        first = min(numbers)
        using = [launched.restore for i, launched in self.launches.items() if i in numbers]
        if self.last_slice is not None and first < self.last_slice[0]:
            using.append(self.last_slice[1])
        return using


class Recomputation(NamedTuple):
    """Consecutive pages of a prefetch whose first layers can be recomputed now.

    Attributes:
        prefetch: Whose.
        reservation: What is reserved for it.
        pages: Their numbers in the reservation.
        layers: How many first layers each of them lacks.
        unread: Whether these are all: the pages have not arrived, and are not waited for.
    """

    prefetch: Any
    reservation: Reservation
    pages: range
    layers: int
    unread: bool

    @property
    def host_pages(self) -> Ids:
        """int64 ``[p]``."""
        return np.array(self.reservation.host_pages[self.pages.start : self.pages.stop], np.int64)

    @property
    def after(self) -> Sequence[RunningRestore] | None:
        """Restores of pages before these, other than recomputations, which run in order; None:
        these lack some layers only, and their own restore counts, too.
        """
        if not self.unread:
            return None
        launches, recomputed = self.reservation.launches, self.reservation.recomputed
        found = [launches[i].restore for i in range(self.pages.start) if i not in recomputed]
        return list(dict.fromkeys(found))

    def first(self, pages: int) -> Recomputation:
        """The first so many of them."""
        return self._replace(pages=self.pages[:pages])


Place = tuple[Reservation, int]
"""A page of a reservation, by number."""


def by_reservation(places: Iterable[Place]) -> Iterable[tuple[Reservation, set[int]]]:
    """Each reservation once, with the numbers of its pages."""
    numbers: dict[int, tuple[Reservation, set[int]]] = {}
    for reservation, i in places:
        numbers.setdefault(id(reservation), (reservation, set()))[1].add(i)
    return numbers.values()


def using(places: Iterable[Place]) -> Iterator[RunningRestore]:
    """Each restore that writes one of these pages, or reads it, once."""
    used = (one for reservation, i in by_reservation(places) for one in reservation.using(i))
    yield from {id(restore): restore for restore in used}.values()


def runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield range(numbers[start], numbers[stop - 1] + 1)
