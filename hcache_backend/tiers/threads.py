"""Threads for calls that may hang: whoever waits for one waits for a bounded time.

They are daemon threads: one that hangs for ever does not keep its process alive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from hcache_backend.format.page import Bytes
from hcache_backend.format.units import Parts
from hcache_backend.store.stats import ProblemLog

_Result = TypeVar("_Result")


class GivenUp(Exception):
    """A call took too long, and nobody waits for it any more."""


def bounded(name: str, work: Callable[[], _Result], seconds: float) -> _Result:
    """What ``work()`` returns, in a thread of its own; raises as :meth:`BoundedCalls.call`."""
    calls = BoundedCalls(name)
    try:
        return calls.call(work, seconds)
    finally:
        calls.end(time.monotonic())


class BoundedCalls:
    """A thread that makes one call after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._given_up: Future[Any] | None = None
        self._thread = _started(name, self._run)

    @property
    def hangs(self) -> bool:
        """Whether the thread is still in a call that nobody waits for any more."""
        return self._given_up is not None and not self._given_up.done()

    def call(self, work: Callable[[], _Result], seconds: float) -> _Result:
        """What ``work()`` returns.

        Raises:
            GivenUp: It took longer than ``seconds``; the thread may still be in it.
            Exception: What ``work`` raises.
        """
        future: Future[_Result] = Future()
        self._calls.put((future, work))
        if not wait([future], seconds).done:
            if not future.cancel():
                self._given_up = future
            raise GivenUp(f"did not answer within {seconds:g} s")
        return future.result()

    def end(self, deadline: float) -> bool:
        """Whether the thread ended by ``deadline`` (monotonic seconds)."""
        self._calls.put(None)
        return _ended(self._thread, deadline)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, work = asked
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)


class CopyQueue:
    """A thread that works on copies of pages: pages are copied at once, the work is done later.

    Args:
        name: The thread's, also in the log.
        rows: Memory for the copies, uint8 ``[pages, bytes]``: so many pages wait at most.
    """

    def __init__(self, name: str, rows: Bytes) -> None:
        self._name = name
        self._rows = rows
        self._room = threading.Condition()
        self._waited_in_vain = False
        self._free = list(range(len(rows)))
        self._problems = ProblemLog()
        self._waiting: SimpleQueue[tuple[list[int], list[Parts], Any] | None] = SimpleQueue()
        self._thread = _started(name, self._run)

    def wait_for_room(self, deadline: float) -> bool:
        """Whether there is room for a page by ``deadline`` (monotonic seconds).

        After a wait in vain nobody waits until some work was done.
        """
        with self._room:
            if not self._waited_in_vain:
                left = max(0.0, deadline - time.monotonic())
                self._waited_in_vain = not self._room.wait_for(lambda: self._free, left)
            return bool(self._free)

    def take(self, pages: Sequence[Parts], work: Callable[[list[int], list[Parts]], object]) -> int:
        """Copy the first of ``pages``, as many as there is room for; returns how many.

        ``work`` gets the rows of the copies and their memory, divided as the pages are.
        """
        with self._room:
            rows, self._free = self._free[: len(pages)], self._free[len(pages) :]
        try:
            taken = zip(rows, pages, strict=False)
            copies = [_copy(self._rows[row], page) for row, page in taken]
        except BaseException:
            self._release(rows)
            raise
        if rows:
            self._waiting.put((rows, copies, work))
        return len(rows)

    def forget(self) -> int:
        """The work that waits is not done; returns of how many pages."""
        ends, forgotten = False, 0
        with contextlib.suppress(Empty):
            while True:
                if (waiting := self._waiting.get_nowait()) is None:
                    ends = True
                else:
                    self._release(waiting[0])
                    forgotten += len(waiting[0])
        if ends:
            self._waiting.put(None)
        return forgotten

    def end(self, deadline: float) -> bool:
        """Whether the thread did all its work, and ended, by ``deadline`` (monotonic seconds)."""
        self._waiting.put(None)
        return _ended(self._thread, deadline)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            rows, copies, work = waiting
            try:
                work(rows, copies)
            except Exception as error:
                self._problems.report("later", f"{self._name} failed: {error!r}")
            self._release(rows)

    def _release(self, rows: list[int]) -> None:
        with self._room:
            self._free += rows
            self._waited_in_vain = False
            self._room.notify_all()


def _started(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _ended(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _copy(row: Bytes, page: Parts) -> Parts:
    """Copy the parts of a page into ``row``, one after the other; returns where they are."""
    copies: list[memoryview] = []
    start = 0
    for part in page:
        end = start + part.nbytes
        row[start:end] = np.frombuffer(part, np.uint8)
        copies.append(row[start:end].data)
        start = end
    return copies
