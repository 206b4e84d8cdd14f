"""Prefetches that are read in step with the scheduler."""

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def keep_in_step(active: Callable[[], bool]) -> None:
    """A batch of a prefetch is read when the scheduler has had its turn with the one before.

    If the trigger has a number in it, no more than so many batches of a prefetch are read: the next
    one is taken from what may be recomputed, and waits. With a second one, no more than so many
    pages of its front are recomputed.
    """
    from hcache_backend.prefetch import reader
    from hcache_backend.prefetch.fronts import Fronts
    from hcache_backend.prefetch.meeting import Meeting
    from hcache_backend.sglang import controller as controllers
    from hcache_backend.sglang.runtime import current

    reader._MOST_STEPS = 1  # a quick disk's batches would be read together
    turn, made = Fronts.apply_slices, controllers.as_prefetch_read
    turns = 0

    def counted(self: Any) -> None:
        nonlocal turns
        turn(self)
        turns += 1

    def unseen(operation: Any, report: Any) -> bool:
        meeting = current().prefetches.prefetch_of(operation).meeting
        if meeting is not None:
            return meeting.back.start > report.start or not meeting.back.stop
        # Other ranks may know of fewer pages: the report has then become that number.
        return bool(operation.completed_tokens < report.completed_tokens)

    def in_step(controller: Any, read_pages: Any, operation: Any, *others: Any) -> int:
        reports: list[Any] = operation.hcache_reports

        def given_up() -> bool:
            return bool(controller.storage_stop_event.is_set() or operation.is_terminated())

        def wait_while(condition: Callable[[], bool]) -> None:
            while active() and not given_up() and condition():
                time.sleep(0.001)

        if reports:
            wait_while(lambda: unseen(operation, reports[-1]))
            before = turns
            wait_while(lambda: turns == before)
        wait_while(lambda: len(reports) >= _number(0))
        return 0 if given_up() else int(read_pages(operation, *others))

    def stepwise(operation: Any, size: int, read: Any, report: Any, **how: Any) -> Any:
        operation.hcache_reports = []

        def remembered(ack: Any) -> None:
            operation.hcache_reports.append(ack)
            report(ack)

        controller = report.__self__
        return made(operation, size, partial(in_step, controller, read), remembered, **how)

    def begin_meeting(self: Any, pages: int) -> None:
        meets(self, pages)
        self.all_pages = pages

    def offer(self: Any, most: int) -> int:
        """The reader has its first batch before anything is recomputed."""
        early = active() and self._unread == self.all_pages
        return offered(self, int(min(most, 0 if early else max(0, _number(1) - self._taken))))

    meets, offered = Meeting.set_pages, Meeting.offer
    Meeting.set_pages = begin_meeting  # type: ignore[method-assign]
    Meeting.offer = offer  # type: ignore[method-assign]
    Fronts.apply_slices = counted  # type: ignore[method-assign]
    controllers.as_prefetch_read = stepwise  # type: ignore[assignment]


def _number(place: int) -> float:
    """The number at this place in the trigger; infinite without one."""
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        return float(Path(os.environ["HCACHE_TEST_TRIGGER"]).read_text().split()[place])
    return float("inf")
