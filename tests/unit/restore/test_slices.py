"""How much is recomputed: slices as long as a turn has time for, and a share of the GPU."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.prefetch.prefetches import HeldPrompt, Prefetches
from hcache_backend.prefetch.slices import RUNNING_LIMIT, Governor, SliceBudget

SIZE = 256
PER_TOKEN = 0.001
"""Seconds of all layers."""


def computing(tokens: int, prefix: float) -> float:
    """Attention costs as much as all else behind 1,000 tokens."""
    return PER_TOKEN * tokens * (1 + prefix / 1000)


def ended(tokens: int, seconds: float | None, failed: Exception | None = None) -> Any:
    """A restore of so many tokens; ``seconds``: None where it is not done."""
    report = SimpleNamespace(busy_ms=lambda stream: 1e3 * (seconds or 0.0))
    return SimpleNamespace(
        tokens=tokens, done=lambda: seconds is not None, report=lambda: report, failed=failed
    )


def budget(seconds: float, *, in_seconds: bool = True) -> SliceBudget:
    return SliceBudget(seconds, 8192, computing, in_seconds=in_seconds)


@pytest.mark.parametrize("prefix", [0, 1000])
@pytest.mark.parametrize("pages", [1, 5, 64])
def test_a_slice_is_as_long_as_it_may_take(pages: int, prefix: int) -> None:
    slices = budget(computing(pages * SIZE, prefix) * 1.001)
    assert slices.pages_of_slice(100, SIZE, prefix) == pages
    assert slices.pages_of_slice(3, SIZE, prefix) == min(pages, 3)  # no more are there


def test_few_tokens_take_about_as_long_so_an_idle_gpu_gets_slices_of_more() -> None:
    page = computing(64, 0)
    slices = budget(1.01 * page)
    assert slices.pages_of_slice(100, 64, 0) == 4
    assert slices.pages_of_slice(3, 64, 0) == 3
    assert slices.pages_of_slice(100, 64, 0, share=0.999) == 1
    assert slices.pages_of_slice(100, 64, 0, best=2.01 * page) == 2
    assert budget(9.01 * page).pages_of_slice(100, 64, 0) == 9
    assert budget(1e-9).seconds(1024, 64, 0) == budget(4 * page).seconds(1024, 64, 0)
    assert budget(1.0, in_seconds=False).pages_of_slice(100, 64, 0) == 1


def test_the_first_slice_is_launched_if_it_would_end_as_a_prefill_does_before_l3() -> None:
    """Without it the first hit of a server waited for a slice that took twice as long as L3."""
    unknown = budget(1.0, in_seconds=False)
    assert unknown.pages_of_slice(100, SIZE, 0, within=0.5, first=0.6) == 0
    assert unknown.pages_of_slice(100, SIZE, 0, within=0.5, first=0.4) == 1
    unknown.add_slice(ended(SIZE, 0.04), 0)
    assert unknown.pages_of_slice(100, SIZE, 0, within=0.5, first=0.6) >= 1  # now it is known


def test_slices_are_as_long_as_the_last_ones_took() -> None:
    unknown = budget(1.0, in_seconds=False)
    assert unknown.pages_of_slice(1000, SIZE, 0) == 1
    unknown.add_slice(ended(SIZE, 1e-6, RuntimeError("out of memory")), 0)  # says nothing
    assert unknown.pages_of_slice(1000, SIZE, 0) == 1
    unknown.add_slice(ended(SIZE, 0.01), 0)
    assert unknown.pages_of_slice(1000, SIZE, 0) == 100
    profiled = budget(computing(10 * SIZE, 0) * 1.001)
    for _ in range(2):
        profiled.add_slice(ended(10 * SIZE, 2 * computing(10 * SIZE, 0)), 0)
    assert profiled.pages_of_slice(1000, SIZE, 0) == 5


def test_nothing_is_recomputed_that_takes_longer_than_there_is_time() -> None:
    page, slices = computing(SIZE, 0), budget(10.0)
    assert slices.pages_of_slice(100, SIZE, 0, within=0.99 * page) == 0
    assert slices.pages_of_slice(100, SIZE, 0, within=5.01 * page) == 5
    assert budget(2.01 * page).pages_of_slice(100, SIZE, 0, within=5.01 * page) == 2
    unknown = budget(1.0, in_seconds=False)
    assert [unknown.pages_of_slice(100, SIZE, 0, within=within) for within in (0.0, 1e-9)] == [0, 1]
    assert slices.pages_of_slice(100, SIZE, 0, within=9.01 * page, best=3.01 * page) == 3
    assert slices.pages_of_slice(100, SIZE, 0, within=1.01 * page, best=0.5 * page) == 1


def test_how_long_all_slices_of_a_front_take() -> None:
    def fixed(tokens: int, prefix: float) -> float:
        return 1.0 + tokens  # the shorter a slice the more of it is lost

    slices = SliceBudget((1 + 4 * SIZE), 8192, fixed, in_seconds=True)
    assert slices.seconds(8 * SIZE, SIZE, 0) == 2 * (1 + 4 * SIZE)
    assert slices.seconds(2 * SIZE, SIZE, 0) == (1 + 2 * SIZE)
    long = budget(1e9).seconds(1000, SIZE, 500)  # in one slice, in the middle of it
    assert long == pytest.approx(computing(1000, 1000), rel=0.02)
    assert budget(1.0, in_seconds=False).seconds(SIZE, SIZE, 0) == math.inf


def test_a_slice_is_as_long_as_its_share_of_the_time_allows() -> None:
    slices = SliceBudget(1.0, 8192, lambda tokens, prefix: 0.001 * tokens, in_seconds=True)
    shares = {1.0: 100, 0.5: 50, 1e-9: 1, 0.0: 0}
    assert {share: slices.pages_of_slice(1000, 10, 0, share) for share in shares} == shares


# ---- the governor: how much of the GPU recomputation gets, from what SGLang's scheduler holds ----


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
        waiting_queue=list(waiting),
        reading={name: HeldPrompt(name) for name in reading},
    )


def looked_at(scheduler: Any, found: Governor | None = None) -> Governor:
    prefetches, found = Prefetches(), found or Governor()
    prefetches.scheduler, prefetches.fetching = scheduler, getattr(scheduler, "reading", {})
    found.update_pace(prefetches)
    return found


def governor(running: int = 0, **others: Any) -> Governor:
    """Of a scheduler with so many running requests, and others that wait or are being read."""
    return looked_at(scheduler_of(running, **others))


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
        looked_at(SimpleNamespace(chunked_req=None), broken)
        assert broken.pace == (0.0, "put_off_waiting")
    assert len(caplog.records) == 1


def test_other_threads_see_what_the_turn_saw_while_the_scheduler_goes_on() -> None:
    scheduler, found = scheduler_of(2), Governor()
    looked_at(scheduler, found)
    del scheduler.last_batch  # as good as anything between two turns
    assert found.pace.share == 1 - 2 / RUNNING_LIMIT
    scheduler.last_batch, scheduler.running_batch = None, batch(0)
    looked_at(scheduler, found)
    assert found.pace == (1.0, "whole")
