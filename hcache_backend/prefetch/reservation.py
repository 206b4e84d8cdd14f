"""Device pages that are reserved for one prefetch, and what was launched for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.restore.report import RunningRestore

Ids = npt.NDArray[np.int64]


class Launched(NamedTuple):
    """A restore of pages that had arrived; ``lacking`` first layers must be recomputed yet."""

    restore: RunningRestore
    lacking: int


LaunchRestore = Callable[[Ids, torch.Tensor], Launched]
"""``launch(host_pages, slots)`` restores consecutive pages: ``[p]``, ``[p * page_size]``."""


@dataclass(eq=False)
class Reservation:
    """Device pages for consecutive pages of one prefetch, numbered here from 0. ``launches`` has
    recomputations of whole pages too. ``last_slice``: end and restore of the last recomputation,
    which ends behind the earlier ones."""

    host_pages: list[int]  # of each page
    slots: torch.Tensor  # page by page
    keys: Sequence[Hashable]  # of each page in storage
    first: int  # number of page 0 in the prefetch
    held: set[int]  # pages that are neither given back nor handed out
    unread: int = 0  # layers to recompute of a page that has not arrived; 0: not allowed
    launches: dict[int, Launched] = field(default_factory=dict)  # by page
    recomputed: set[int] = field(default_factory=set)  # lacked layers and do not any more
    last_slice: tuple[int, RunningRestore] | None = None
    _front: int = 0  # all pages before this one were held and whole when it came there
    _released: int | None = None  # the first page that is not held any more

    def waiting(self) -> list[int]:
        """Held pages that were not launched, in order."""
        return sorted(self.held - self.launches.keys())

    def launched(self) -> list[int]:
        """Held pages that were launched, in order."""
        return sorted(self.held & self.launches.keys())

    def is_whole(self, page: int) -> bool:
        """True if all layers of a page were launched."""
        return page in self.recomputed or (
            page in self.launches and not self.launches[page].lacking
        )

    def release(self, page: int) -> None:
        self.held.remove(page)
        self._released = page if self._released is None else min(self._released, page)

    @property
    def reachable(self) -> int:
        """Number of the prefetch's first pages that can be recomputed, or were; 0 if the first ones
        are not reserved here, or not held any more."""
        held = len(self.host_pages) if self._released is None else self._released
        return held if not self.first and held >= self._front else 0

    def to_recompute(self, most: int) -> range:
        """At most ``most`` pages that lack the same layers, behind pages that are held and whole.
        Pages that have not arrived lack all layers, if they may be recomputed whole."""
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
        """Number of first layers of a page that can be recomputed, but were not."""
        return self.launches[page].lacking if page in self.launches else self.unread

    def using(self, numbers: set[int]) -> list[RunningRestore]:
        """Launched restores that write one of these pages, or read it."""
        first = min(numbers)
        using = [launched.restore for i, launched in self.launches.items() if i in numbers]
        if self.last_slice is not None and first < self.last_slice[0]:
            using.append(self.last_slice[1])
        return using


class Recomputation(NamedTuple):
    """Consecutive pages of a prefetch whose first layers can be recomputed now."""

    prefetch: Any
    reservation: Reservation
    pages: range  # their numbers in the reservation
    layers: int  # first layers that each of them lacks
    unread: bool  # these are all: the pages have not arrived, and are not waited for

    @property
    def host_pages(self) -> Ids:
        return np.array(self.reservation.host_pages[self.pages.start : self.pages.stop], np.int64)

    @property
    def after(self) -> Sequence[RunningRestore] | None:
        """Restores of pages before these, without recomputations, which run in order. None: these
        lack only some layers, and their own restore counts too."""
        if not self.unread:
            return None
        launches, recomputed = self.reservation.launches, self.reservation.recomputed
        found = [launches[i].restore for i in range(self.pages.start) if i not in recomputed]
        return list(dict.fromkeys(found))

    def first(self, pages: int) -> Recomputation:
        return self._replace(pages=self.pages[:pages])


Place = tuple[Reservation, int]  # a page of a reservation, by number


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
