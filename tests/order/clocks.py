"""Vector clocks of the host and of streams."""

import random
import sys
import threading
from collections import Counter
from enum import Enum
from types import CodeType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.order import rules

ACTORS = 64
HOST = 0
POLLS, LATE_POLLS = 3, 30
"""Queries of an event that are answered no, where the host could not know better."""

Clock = npt.NDArray[np.int64]
"""``[ACTORS]``: for each actor, its last step that is done."""


class Frame(NamedTuple):
    """One line of a program."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{rules.short(self.code.co_filename)}:{self.line} ({self.code.co_name})"


Site = tuple[Frame, ...]
"""Who called, innermost first, without torch and the checker."""


def site(depth: int = 12) -> Site:
    """The place in the program that this runs for."""
    frame, found = sys._getframe(1), list[Frame]()
    while frame is not None and len(found) < depth:
        if not rules.is_machinery(frame.f_code.co_filename):
            found.append(Frame(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


class Query(Enum):
    """What an event's ``query`` says of a point that the device may or may not have passed."""

    LAZY = "lazy"  # no, ``POLLS`` times
    LATE = "late"  # no, ``LATE_POLLS`` times: passes behind, and only who waits knows more
    RANDOM = "random"  # yes or no, by seed, but not for ever


class HostWait(NamedTuple):
    """A place where the host waits for a stream."""

    thread: str
    how: str
    where: str
    idle: bool  # the host knew that all forward passes were done


class Point:
    """What an event stands for: everything that its stream was given before."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.polls = 0


class Clocks:
    """What every actor is ordered behind. Actor 0 is the host, whatever thread; others are streams.

    A stream is always behind all that the host knew when it gave the stream something to do.
    """

    def __init__(self, query: Query = Query.LAZY, seed: int = 0) -> None:
        self.names = ["host"]
        self.host_waits: Counter[HostWait] = Counter()
        self.last_pass: Point | None = None  # behind the forward pass that was launched last
        self._clocks: list[Clock] = [np.zeros(ACTORS, np.int64)]
        self._sites: list[list[Site]] = [[()]]
        self._query, self._random = query, random.Random(seed)
        self._local = threading.local()
        self.default = self.new_stream("default")

    # ---- streams ----

    def new_stream(self, name: str) -> int:
        assert len(self._clocks) < ACTORS, f"more than {ACTORS} streams: {self.names}"
        self._clocks.append(np.zeros(ACTORS, np.int64))
        self._sites.append([()])
        self.names.append(name)
        return len(self._clocks) - 1

    @property
    def current(self) -> int:
        """The stream that the calling thread gives its work to."""
        return int(getattr(self._local, "current", self.default))

    @current.setter
    def current(self, stream: int) -> None:
        self._local.current = stream

    # ---- order ----

    def step(self, actor: int, where: Site) -> int:
        """``actor`` is given something to do; the number of that step."""
        clock = self._clocks[actor]
        np.maximum(clock, self._clocks[HOST], out=clock)
        clock[actor] += 1
        self._sites[actor].append(where)
        return int(clock[actor])

    def behind(self, actor: int, other: int, step: int) -> bool:
        """Whether the last step of ``actor`` is ordered behind a step of ``other``."""
        return bool(self._clocks[actor][other] >= step)

    def seen_of(self, actor: int, other: int) -> int:
        """The last step of ``other`` that ``actor`` (and the host) is ordered behind."""
        return int(max(self._clocks[actor][other], self._clocks[HOST][other]))

    def site_of(self, actor: int, step: int) -> Site:
        return self._sites[actor][step]

    def record(self, actor: int) -> Point:
        self.step(actor, site())
        return Point(self._clocks[actor].copy())

    def wait(self, actor: int, point: Point) -> None:
        mine = self._clocks[actor]
        np.maximum(mine, self._clocks[HOST], out=mine)
        np.maximum(mine, point.clock, out=mine)

    # ---- the host ----

    def host_waits_for(self, point: Point, how: str) -> None:
        """The host waits until an event has passed; counted by place if it could have to wait."""
        where = site()
        if rules.is_kernel_reference(where):
            return
        if not self._known(point):
            thread = threading.current_thread().name
            idle = self.last_pass is None or self._known(self.last_pass)
            self.host_waits[HostWait(thread, how, " < ".join(map(str, where[:4])), idle)] += 1
        self._learn(point.clock)

    def host_waits_for_stream(self, actor: int, how: str) -> None:
        self.host_waits_for(Point(self._clocks[actor].copy()), how)

    def query(self, point: Point) -> bool:
        """What the event answers; after a yes the host is ordered behind it."""
        if self._known(point):
            return True
        point.polls += 1
        if self._query is Query.RANDOM:
            says_no = point.polls < 20 and self._random.random() < 0.5
        else:
            says_no = point.polls <= (POLLS if self._query is Query.LAZY else LATE_POLLS)
        if not says_no:
            self._learn(point.clock)
        return not says_no

    def join_all(self) -> None:
        """The host and every stream know of everything so far: set-up is over."""
        host = self._clocks[HOST]
        for clock in self._clocks:
            np.maximum(host, clock, out=host)

    def _known(self, point: Point) -> bool:
        return bool((point.clock <= self._clocks[HOST]).all())

    def _learn(self, clock: Clock) -> None:
        np.maximum(self._clocks[HOST], clock, out=self._clocks[HOST])
