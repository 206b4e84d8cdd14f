"""What is reserved for one prefetch on the device, and what was launched for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.restore.report import RunningRestore

Ids = npt.NDArray[np.int64]


class Launched(NamedTuple):
    """What was launched for some pages.

    Attributes:
        restore: Writes K and V of their layers.
        whole: All layers were launched. Otherwise the first ones have to be recomputed yet.
        reads_before: It reads K and V of the pages before these.
    """

    restore: RunningRestore
    whole: bool
    reads_before: bool


LaunchRestore = Callable[[Hashable, Ids, torch.Tensor, torch.Tensor | None], Launched]
"""Launches the restore of consecutive pages: ``launch(prefetch, host_pages, slots, before)`` with
int64 ``[p]`` and ``[p * page_size]``. ``before``: slots of all tokens of the prefetch before them,
int64 ``[n]``, where K and V of all layers are, or will be behind restores that were launched; None:
of some pages they are not there."""


@dataclass(eq=False)
class Reservation:
    """Device pages for consecutive pages of one prefetch.

    Attributes:
        host_pages: The host page of each.
        slots: Their slots, page by page.
        keys: The storage key of each.
        first: Number, in the prefetch, of the first one.
        held: Numbers, here, of those that are neither given back nor handed out: at first all.
        launches: What was launched, by number.
    """

    host_pages: list[int]
    slots: torch.Tensor
    keys: Sequence[Hashable]
    first: int
    held: set[int]
    launches: dict[int, Launched] = field(default_factory=dict)

    def waiting(self) -> list[int]:
        """Held pages that were not launched, in order."""
        return sorted(self.held - self.launches.keys())

    def launched(self) -> list[int]:
        """Held pages that were launched, in order."""
        return sorted(self.held & self.launches.keys())

    def using(self, numbers: set[int]) -> list[RunningRestore]:
        """What was launched that writes one of these pages, or reads it."""
        first = min(numbers)
        return [
            launched.restore
            for i, launched in self.launches.items()
            if i in numbers or (launched.reads_before and i > first)
        ]


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
