"""What a turn of the scheduler does does not depend on how many requests wait for L3."""

from collections.abc import Callable
from typing import Any

import pytest

from hcache_backend.sglang import runtime as runtimes
from tests.engine.in_process.hits.crowd import COUNTS, Asked, Crowd
from tests.kit.turns import work


@pytest.fixture(autouse=True)
def own_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_runtime", None)


def reading(hits: int) -> Crowd:
    crowd = Crowd(hits)
    crowd.answer()
    for _ in range(2):
        crowd.turn()
    assert not crowd.gate.gpu.wanted
    return crowd


def asked(hits: int) -> Crowd:
    crowd = Crowd(hits)
    crowd.turn()
    crowd.turn()
    return crowd


def without_room(hits: int, policy: str = "wait_complete") -> Crowd:
    """One of them is being read."""
    crowd = Crowd(hits)
    crowd.cache.prefetch_stop_policy = policy
    crowd.answer(reads=1)
    crowd.turn()
    crowd.turn()
    return crowd


def timed(hits: int) -> Crowd:
    return without_room(hits, "timeout")


def early(hits: int) -> Crowd:
    """They wait for their decode servers."""
    crowd = Crowd(hits, early=True)
    crowd.turn()
    crowd.turn()
    return crowd


CROWDS = [asked, reading, without_room, timed, early]


def assert_as_many(crowd_of: Callable[[int], Crowd], step: Callable[[Crowd], Any]) -> None:
    found = {}
    for hits in COUNTS[::2]:
        crowd = crowd_of(hits)
        found[hits] = work(lambda crowd=crowd: step(crowd))  # type: ignore[misc]
    assert len({*found.values()}) == 1, found


@pytest.mark.parametrize("crowd_of", CROWDS)
def test_a_turn_with_nothing_new(crowd_of: Callable[[int], Crowd]) -> None:
    assert_as_many(crowd_of, Crowd.turn)


def test_a_turn_in_which_pages_have_arrived() -> None:
    def step(crowd: Crowd) -> None:
        crowd.arrived(1)
        crowd.turn()

    assert_as_many(reading, step)


@pytest.mark.parametrize("crowd_of", [reading, without_room])
def test_a_turn_after_a_prefetch_has_ended(crowd_of: Callable[[int], Crowd]) -> None:
    def step(crowd: Crowd) -> None:
        crowd.ends()
        crowd.turn()

    assert_as_many(crowd_of, step)


@pytest.mark.parametrize("crowd_of", [reading, without_room])
def test_a_turn_in_which_an_answer_comes(crowd_of: Callable[[int], Crowd]) -> None:
    def step(crowd: Crowd) -> None:
        new = next(reversed(crowd.cache.ongoing_prefetch.data.values()))
        crowd.controller.prefetch_hit_queue.put(new.operation)
        crowd.turn()

    def crowd_and_one(hits: int) -> Crowd:
        crowd = crowd_of(hits)
        crowd.receive()
        return crowd

    assert_as_many(crowd_and_one, step)


@pytest.mark.parametrize("crowd_of", CROWDS)
@pytest.mark.parametrize("place", [0, 20])
def test_a_turn_after_a_request_has_left(crowd_of: Callable[[int], Crowd], place: int) -> None:
    def step(crowd: Crowd) -> None:
        crowd.abort(place)
        crowd.turn()

    assert_as_many(crowd_of, step)
    crowd = crowd_of(40)
    step(crowd)
    left = {str(number) for number in range(40)} - {str(place)}
    assert crowd.gate.prefetches.held.keys() == crowd.gate.prefetches.waiting.keys() == left


@pytest.mark.parametrize("crowd_of", CROWDS)
def test_a_request_comes(crowd_of: Callable[[int], Crowd]) -> None:
    def step(crowd: Crowd) -> None:
        crowd.receive()
        crowd.turn()

    assert_as_many(crowd_of, step)


def test_a_request_has_its_decode_server() -> None:
    def step(crowd: Crowd) -> None:
        crowd.scheduler.waiting_queue.append(crowd.comes_to.pop(3))
        crowd.turn()
        assert crowd.gate.prefetches.fetching.keys() == {"3"}

    assert_as_many(early, step)


def test_an_l3_that_is_stalled_ends_all_prefetches(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = reading(12)
    found = [info.operation for info in crowd.cache.ongoing_prefetch.values()]
    ended: list[Asked] = []

    def mark(operation: Asked) -> None:
        ended.append(operation)

    monkeypatch.setattr(Asked, "mark_terminate", mark, raising=False)
    monkeypatch.setattr(crowd.gate.l3, "seems_stalled", lambda now: True)
    crowd.turn()
    assert ended == found
    assert all(crowd.gate.prefetches.prefetch_of(one).refused for one in found)
    assert crowd.gate.prefetches.hits == {}
