"""Threads for calls that may hang: callers wait for a bounded time. They are daemon threads, so one
that hangs for ever does not keep its process alive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from hcache_backend.format.page import Bytes
from hcache_backend.format.units import Parts
from hcache_backend.store.stats import ProblemLog

_Result = TypeVar("_Result")

CLOSE_SECONDS = 5.0  # longest wait for queued work, or for a close, when a tier ends


class GivenUp(Exception):
    """A call took too long and was abandoned."""


def bounded(name: str, work: Callable[[], _Result], seconds: float) -> _Result:
    """The result of ``work()`` in a thread of its own; raises as :meth:`BoundedCalls.call`."""
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def hangs(self) -> bool:
        """True if the thread is still in an abandoned call."""
        return self._given_up is not None and not self._given_up.done()

    def call(self, work: Callable[[], _Result], seconds: float) -> _Result:
        """The result of ``work()``; raises its exception, or GivenUp after ``seconds``."""
        future: Future[_Result] = Future()
        self._calls.put((future, work))
        if not wait([future], seconds).done:
            if not future.cancel():
                self._given_up = future
            raise GivenUp(f"did not answer within {seconds:g} s")
        return future.result()

    def end(self, deadline: float) -> bool:
        """Returns True if the thread ended before ``deadline`` (monotonic seconds)."""
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
    ``rows`` (uint8 ``[pages, bytes]``) hold the copies, and limit the waiting pages."""

    def __init__(self, name: str, rows: Bytes) -> None:
        self._rows = rows
        self._changed = threading.Condition()
        self._free = list(range(len(rows)))
        self._waiting: deque[tuple[list[int], Callable[[], object]]] = deque()
        self._waited_in_vain = self._ends = False
        self._problems = ProblemLog()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_for_room(self, deadline: float) -> bool:
        """Returns True if there is room for a page before ``deadline`` (monotonic seconds). After a
        failed wait it does not wait again until some work was done."""
        with self._changed:
            if not self._waited_in_vain:
                left = max(0.0, deadline - time.monotonic())
                self._waited_in_vain = not self._changed.wait_for(lambda: self._free, left)
            return bool(self._free)

    def take(self, pages: Sequence[Parts], work: Callable[[list[int], list[Parts]], object]) -> int:
        """Copy the first of ``pages``, as many as there is room for; returns their number. ``work``
        gets the rows of the copies and their memory, divided as the pages are."""
        with self._changed:
            rows, self._free = self._free[: len(pages)], self._free[len(pages) :]
        try:
            copies = [_copy(self._rows[row], page) for row, page in zip(rows, pages, strict=False)]
        except BaseException:
            self._release(rows)
            raise
        if rows:
            with self._changed:
                self._waiting.append((rows, lambda: work(rows, copies)))
                self._changed.notify_all()
        return len(rows)

    def forget(self) -> int:
        """Drop the waiting work; returns its number of pages."""
        with self._changed:
            dropped = [row for rows, _ in self._waiting for row in rows]
            self._waiting.clear()
            self._release(dropped)
        return len(dropped)

    def end(self, deadline: float) -> bool:
        """Returns True if all work was done, and the thread ended, before ``deadline``."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        return _ended(self._thread, deadline)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    return
                rows, work = self._waiting.popleft()
            try:
                work()
            except Exception as error:
                self._problems.report("later", f"{self._thread.name} failed: {error!r}")
            self._release(rows)

    def _release(self, rows: list[int]) -> None:
        with self._changed:
            self._free += rows
            self._waited_in_vain = False
            self._changed.notify_all()


def _ended(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _copy(row: Bytes, page: Parts) -> Parts:
    """Copy the parts of a page into ``row``, one after the other; returns the copies."""
    copies: list[memoryview] = []
    start = 0
    for part in page:
        end = start + part.nbytes
        row[start:end] = np.frombuffer(part, np.uint8)
        copies.append(row[start:end].data)
        start = end
    return copies
