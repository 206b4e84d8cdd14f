"""A trace of a scheduler process that is the same in every run, however busy the machine is.

- The scheduler's thread stops at given points until all other threads have done what they were
  asked (:meth:`Trace.until_quiet`). So what a thread does falls between the same two points.
- Time is virtual: it passes at these points, and by what operations are said to cost.
- What threads do between two points is grouped by thread; only the order within a thread counts.
- A turn of the scheduler in which nothing was said is no part of the trace, nor is one that only
  asks again what the turn before it asked: how often a server looks for work is no behaviour.

This module knows no names of the product: :mod:`.seams` does.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

THREADS = {
    "prefetch_thread_func": "look-up",
    "prefetch_io_aux_func": "read",
    "prefetch_sync_thread_func": "agree",
    "backup_thread_func": "write",
}
"""What HiCache's threads are called in traces, by the function that they run."""
WATCHED = ("/hcache_backend/", "cache_controller.py", "/concurrent/futures/")
"""Threads with such files on their stacks are waited for."""


@dataclass
class Settings:
    """How a server is traced, in virtual time."""

    folder: str  # for the trace of each rank, ``trace.<rank>``, and the marks that end its parts
    read_seconds: float = 1e-3  # that L3 takes for a page
    compute_seconds: float = 1e-4  # that a forward pass takes for a token


def count_what_waits() -> None:
    """Queues that are written in C do not show whether a thread waits for them: none is made."""
    original = queue.SimpleQueue
    for module in list(sys.modules.values()):
        if getattr(module, "SimpleQueue", None) is original:
            setattr(module, "SimpleQueue", queue.Queue)  # noqa: B010


class Clock:
    """Stands where modules have ``time``: virtual seconds.

    A thread that sleeps looks again at each point at which the scheduler stops.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def monotonic(self) -> float:
        return self._trace.now

    # Processor time, too: a slow machine would let checks in service rest.
    perf_counter = thread_time = monotonic

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self._trace.scheduler:
            self._trace.until_quiet()  # it waits for threads, which go on by turns
            self._trace.begin_turn()
            self._trace.until_quiet()
        else:
            self._trace.next_look()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Trace:
    """The trace of one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0  # virtual seconds
        self.scheduler = threading.get_ident()
        self.rank: int | None = None  # number of this process, once it serves
        self._start: list[str] = []  # what the scheduler's thread did before
        self.not_waited_for: set[str] = set()  # threads that wait for other processes
        self._lock = threading.Lock()
        self._said: dict[str, list[str]] = {}  # since the last point, by thread
        self._turn: list[str] = []
        self._last: list[str] = []
        self._polls: set[str] = set()
        self._looks = self._turns = 0
        self._looking = threading.Condition()

    # ---- what happens ----

    def say(self, text: str, *, polls: bool = False) -> None:
        """The calling thread does this; ``polls``: also in turns without anything to do."""
        if self.rank is None:
            if threading.get_ident() == self.scheduler:
                self._start.append(text)
            return
        if polls:
            self._polls.add(text)
        thread = threading.current_thread()
        name = ""
        if threading.get_ident() != self.scheduler:
            function = thread.name.partition("(")[2].rstrip(")")
            name = THREADS.get(function, function or thread.name)
        with self._lock:
            self._said.setdefault(name, []).append(text)

    def costs(self, seconds: float) -> None:
        """What the calling thread does takes so long."""
        with self._lock:
            self.now += seconds

    def serves(self, rank: int) -> None:
        """The start of process ``rank`` is over. Virtual time goes on from the real one, which the
        parts of a server have read while they were built."""
        self.rank, self.now = rank, time.monotonic()
        self._write(["== the start", *(f"  {line}" for line in self._start)])

    # ---- points of the scheduler ----

    def point(self) -> None:
        """The scheduler stops; what was said since the last point becomes a part of its turn."""
        if threading.get_ident() != self.scheduler:
            return
        self.until_quiet()
        with self._lock:
            said, self._said = self._said, {}
        self._turn += said.pop("", [])
        for name, lines in sorted(said.items()):
            self._turn += [f"[{name}] {line}" for line in lines]

    def turn(self, is_idle: Callable[[], bool]) -> None:
        self.point()
        turn, self._turn = self._turn, []
        if turn and not (turn == self._last and self._polls.issuperset(turn)):
            self._write([f"{'  ' if number else '* '}{line}" for number, line in enumerate(turn)])
        self._last = turn or self._last
        mark = self._path("mark")
        if mark.exists() and self._polls.issuperset(turn) and is_idle():
            if title := mark.read_text():
                self._write(["", f"== {title}"])
            mark.unlink()

    def asked(self, name: str) -> bool:
        return (Path(self.settings.folder) / name).exists()

    def _write(self, lines: Iterable[str]) -> None:
        with self._path("trace").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def _path(self, name: str) -> Path:
        return Path(self.settings.folder) / f"{name}.{self.rank}"

    # ---- waiting ----

    def next_look(self) -> None:
        """Return when the scheduler has stopped once more."""
        with self._looking:
            looks = self._looks
            self._looking.wait_for(lambda: self._looks > looks)

    def begin_turn(self) -> None:
        """Threads that do one thing in each turn go on."""
        with self._looking:
            self._turns += 1
            self._looking.notify_all()

    def next_turn(self) -> None:
        """Return when the scheduler has begun another turn: a thread does one thing in each."""
        with self._looking:
            turns = self._turns
            self._looking.wait_for(lambda: self._turns > turns)

    def until_quiet(self) -> None:
        """Return when no other thread has anything to do, and each has looked once.

        Only those look that waited before: a thread that comes meanwhile would look in one run and
        not in another, or in one rank and not in another, and ranks wait for each other.
        """
        self._until_all_wait()
        with self._looking:
            self._looks += 1
            self._looking.notify_all()
        self._until_all_wait()
        self.now += 1e-3

    def _until_all_wait(self) -> None:
        pause = 1e-4
        while True:
            waiting = self._what_waits()
            # The same locks twice: all threads waited at the moment between.
            if waiting is not None and waiting == self._what_waits():
                return
            time.sleep(pause)  # a busy machine has better things to do than to look
            pause = min(2 * pause, 5e-3)

    def _what_waits(self) -> dict[int, Any] | None:
        """What each thread waits for; None: one does not wait."""
        waiting = {}
        others = {t.ident for t in threading.enumerate() if t.name in self.not_waited_for}
        others.add(self.scheduler)
        for number, frame in sys._current_frames().items():
            if number not in others and _is_watched(frame):
                waiter = _waits_for(frame)
                if waiter is None:
                    return None
                waiting[number] = waiter
        return waiting


def _is_watched(frame: FrameType | None) -> bool:
    files = set()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    # A thread that has just been started does not show yet what it runs.
    return any(part in file for file in files for part in WATCHED) or files == {threading.__file__}


def _waits_for(frame: FrameType) -> Any:
    """The lock with which a thread waits until it is notified; None: it does something else."""
    code = frame.f_code
    if code.co_name != "wait" or not code.co_filename.endswith(f"{os.sep}threading.py"):
        return None
    caller = frame.f_back and frame.f_back.f_back  # of Event.wait
    if caller is not None and caller.f_code is threading.Thread.start.__code__:
        return None  # for a thread that does not show before it runs
    values = frame.f_locals
    waiter, condition = values.get("waiter"), values.get("self")
    waiters = getattr(condition, "_waiters", ())
    # Whoever notifies a thread takes its lock out.
    return waiter if waiter in waiters else None
