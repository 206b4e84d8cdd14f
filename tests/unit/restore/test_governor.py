"""How much of the GPU recomputation gets, from what SGLang's scheduler holds."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.prefetch.slices import RUNNING_LIMIT, Governor, SliceBudget


def batch(requests: int, *, extend: bool = False, finished: int = 0) -> Any:
    """Of so many requests that run, and others that have finished."""
    ends = [False] * requests + [True] * finished
    return SimpleNamespace(
        reqs=[SimpleNamespace(finished=lambda end=end: end) for end in ends],
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
    )


def scheduler_of(
    running: int = 0,
    last: Any = None,
    waiting: tuple[str, ...] = (),
    reading: tuple[str, ...] = (),
    chunked: object = None,
) -> Any:
    return SimpleNamespace(
        running_batch=batch(running),
        last_batch=last,
        chunked_req=chunked,
        waiting_queue=[SimpleNamespace(cache_request_handle=name) for name in waiting],
        tree_cache=SimpleNamespace(ongoing_prefetch=dict.fromkeys(reading)),
    )


def governor(running: int = 0, **others: Any) -> Governor:
    """Of a scheduler with so many running requests, and others that wait or are being read."""
    found = Governor()
    found.look(scheduler_of(running, **others))
    return found


WHOLE, WAITING = (1.0, "whole"), (0.0, "put_off_waiting")


@pytest.mark.parametrize(
    ("scheduler", "pace"),
    [
        ({}, WHOLE),
        ({"waiting": ("a", "b"), "reading": ("a", "b")}, WHOLE),
        ({"running": 1}, (1 - 1 / RUNNING_LIMIT, "shorter")),
        ({"running": RUNNING_LIMIT}, (0.0, "put_off_running")),
        # Requests of the last prefill run already, those of a decode step run once.
        ({"running": 5, "last": batch(3, extend=True)}, (0.0, "put_off_running")),
        ({"running": 5, "last": batch(5)}, (1 - 5 / RUNNING_LIMIT, "shorter")),
        # Requests that have finished want nothing.
        ({"last": batch(2, extend=True, finished=6)}, (1 - 2 / RUNNING_LIMIT, "shorter")),
        # A request waits for the GPU.
        ({"waiting": ("a",)}, WAITING),
        ({"waiting": ("a", "b"), "reading": ("a",)}, WAITING),
        ({"chunked": object()}, WAITING),
        ({"running": RUNNING_LIMIT, "waiting": ("a",)}, WAITING),
    ],
)
def test_the_pace_is_what_the_batch_and_the_queue_leave(
    scheduler: dict[str, Any], pace: tuple[float, str]
) -> None:
    assert Governor().pace == WHOLE  # before the first request
    assert governor(**scheduler).pace == pace


def test_the_share_falls_to_nothing_as_the_batch_grows() -> None:
    shares = [governor(running).pace.share for running in range(RUNNING_LIMIT + 3)]
    assert shares[0] == 1
    assert all(more > less for more, less in pairwise(shares[: RUNNING_LIMIT + 1]))
    assert shares[RUNNING_LIMIT:] == [0, 0, 0]


def test_a_scheduler_that_cannot_be_asked_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """What would be recomputed in slices is then left to the load."""
    broken = Governor()
    for _ in range(3):
        broken.look(SimpleNamespace(chunked_req=None))
        assert broken.pace == (0.0, "put_off_waiting")
    assert len(caplog.records) == 1


def test_other_threads_see_what_the_turn_saw_while_the_scheduler_goes_on() -> None:
    scheduler, found = scheduler_of(2), Governor()
    found.look(scheduler)
    del scheduler.last_batch  # as good as anything between two turns
    assert found.pace.share == 1 - 2 / RUNNING_LIMIT
    scheduler.last_batch, scheduler.running_batch = None, batch(0)
    found.look(scheduler)
    assert found.pace == (1.0, "whole")


def test_a_slice_is_as_long_as_its_share_of_the_time_allows() -> None:
    slices = SliceBudget(1.0, 8192, lambda tokens, prefix: 0.001 * tokens, known=True)
    shares = {1.0: 100, 0.5: 50, 1e-9: 1, 0.0: 0}
    assert {share: slices.pages(1000, 10, 0, 1, share) for share in shares} == shares
