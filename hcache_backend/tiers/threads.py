"""Threads for calls that may hang: callers wait for a bounded time. They are daemon threads, so one
that hangs for ever does not keep its process alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
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


class _Worker:
    """A thread that makes one call after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._calls.put((future, work))
        return future

    def end(self, deadline: float) -> bool:
        """Returns True if all calls were made before ``deadline`` (monotonic seconds)."""
        self._calls.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, work = asked
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)


class BoundedCalls(_Worker):
    """Calls whose results are waited for."""

    _given_up: Future[Any] | None = None

    @property
    def hangs(self) -> bool:
        """True if the thread is still in an abandoned call."""
        return self._given_up is not None and not self._given_up.done()

    def call(self, work: Callable[[], _Result], seconds: float) -> _Result:
        """The result of ``work()``; raises its exception, or GivenUp after ``seconds``."""
        future = self.submit(work)
        if not wait([future], seconds).done:
            if not future.cancel():
                self._given_up = future
            raise GivenUp(f"did not answer within {seconds:g} s")
        return future.result()


class CopyQueue(_Worker):
    """Work on copies of pages: pages are copied at once, the work is done later. ``rows`` (uint8
    ``[pages, bytes]``) hold the copies, and limit the waiting pages."""

    def __init__(self, name: str, rows: Bytes) -> None:
        super().__init__(name)
        self._rows, self._problems = rows, ProblemLog()
        self._room, self._waited_in_vain = threading.Condition(), False
        self._free = list(range(len(rows)))
        self._waiting: dict[Future[object], list[int]] = {}

    def wait_for_room(self, deadline: float) -> bool:
        """Returns True if there is room for a page before ``deadline`` (monotonic seconds). After a
        failed wait it does not wait again until some work was done."""
        with self._room:
            if not self._waited_in_vain:
                left = max(0.0, deadline - time.monotonic())
                self._waited_in_vain = not self._room.wait_for(lambda: self._free, left)
            return bool(self._free)

    def take(self, pages: Sequence[Parts], work: Callable[[list[int], list[Parts]], object]) -> int:
        """Copy the first of ``pages``, as many as there is room for; returns their number. ``work``
        gets the rows of the copies and their memory, divided as the pages are."""
        with self._room:
            rows, self._free = self._free[: len(pages)], self._free[len(pages) :]
        try:
            copies = [_copy(self._rows[row], page) for row, page in zip(rows, pages, strict=False)]
        except BaseException:
            self._release(rows)
            raise
        if rows:
            future = self.submit(partial(work, rows, copies))
            self._waiting[future] = rows
            future.add_done_callback(self._done)
        return len(rows)

    def forget(self) -> int:
        """Drop the waiting work; returns its number of pages."""
        return sum(len(rows) for future, rows in [*self._waiting.items()] if future.cancel())

    def _done(self, future: Future[object]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._problems.report("later", f"{self._thread.name} failed: {error!r}")
        self._release(self._waiting.pop(future))

    def _release(self, rows: list[int]) -> None:
        with self._room:
            self._free += rows
            self._waited_in_vain = False
            self._room.notify_all()


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
