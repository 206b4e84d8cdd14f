"""Many small jobs on a pool of threads, with a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

logger = logging.getLogger("hcache.store")

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batch(Generic[Item, Result]):
    """Runs ``work`` on every item.

    Args:
        items: What to work on, first things first.
        work: Called in a thread of the pool; what it raises is logged, and the result is None.
        late: Called with a result that nobody waits for any more.

    Attributes:
        left_undone: After :meth:`wait`, how many items have no result.
    """

    def __init__(
        self,
        items: Sequence[Item],
        work: Callable[[Item], Result],
        late: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self._items = items
        self._work = work
        self._late = late
        self._results: list[Result | None] = [None] * len(items)
        self._condition = threading.Condition()
        self._next = 0
        self._running = 0
        self._done = 0
        self._abandoned = False
        self.left_undone = 0

    def start(self, pool: Executor, width: int) -> None:
        """Begin, in at most ``width`` threads of ``pool``."""
        try:
            for _ in range(min(width, len(self._items))):
                pool.submit(self._run)
        except RuntimeError:  # the store was closed
            with self._condition:
                self._next = len(self._items)

    def wait(self, seconds: float, *, running: bool = False) -> list[Result | None]:
        """The results; None for an item that was not done within ``seconds``.

        Args:
            running: Wait for jobs that have begun, however long they take: the memory that they
                write to must not be given back before.
        """
        with self._condition:
            self._condition.wait_for(self._finished, timeout=max(seconds, 0))
            if running:
                self._next = len(self._items)
                self._condition.wait_for(lambda: self._running == 0)
            self._abandoned = True
            self.left_undone = len(self._items) - self._done
            return list(self._results)

    def _finished(self) -> bool:
        return self._next >= len(self._items) and self._running == 0

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._abandoned or self._next >= len(self._items):
                    return
                number = self._next
                self._next += 1
                self._running += 1
            try:
                result = self._work(self._items[number])
            except Exception:
                # Whoever waits must not wait for ever; the item has no result.
                logger.exception("hcache: a job of the page store failed")
                result = None
            with self._condition:
                self._running -= 1
                late = self._abandoned
                if not late:
                    self._results[number] = result
                    self._done += 1
                if self._running == 0:
                    self._condition.notify_all()
            if late and result is not None:
                self._late(result)
