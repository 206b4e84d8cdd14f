"""Fronts of prefetches: pages that are recomputed whole while the back is read."""

import math
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.slices import Pace, SliceBudget
from hcache_backend.ranks import Turn
from hcache_backend.restore.recompute import TokenSpan
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import WorkerStream
from tests.engine.in_process.hits.eager_scene import PAGES, SIZE, Scene, hicache
from tests.kit.prefetch import Operation
from tests.kit.scheduler import around
from tests.kit.turns import Reduce, alone, turn_of

BROKEN: Any = SimpleNamespace(
    failed=RuntimeError("out of memory"), copied=SimpleNamespace(query=lambda: True)
)


class Fronts:
    """Eager loads of prefetches of eight pages of K and V, read from the back.

    Attributes:
        launched: The tokens of each slice, and how many are before it.
        saved: The host pages that were saved...
        lost: ...or could not be.
        expected: Those, and the positions and ids of their tokens, as the pool heard of them.
        settled: What was saved when the pool was asked to settle that.
        failures: What recomputation was given up for.
        known: Whether the device has what is before the prefetches.
        problem: Why the next slice fails...
        save_problem: ...or is not saved.
    """

    def __init__(self, scene: Scene) -> None:
        self.launched: list[tuple[list[int], int]] = []
        self.saved: list[int] = []
        self.lost: list[int] = []
        self.expected: list[tuple[list[int], list[int], list[int]]] = []
        self.settled: list[list[int]] = []
        self.failures: list[Exception | None] = []
        self.scene, self.known = scene, True
        self.problem: Exception | None = None
        self.save_problem: Exception | None = None
        self.stream = WorkerStream("forward")
        self.seconds_to_read = math.inf  # a token
        self.eager = scene.loads(
            SliceBudget(1e9, 2 * SIZE, lambda tokens, prefix: 3 * tokens, in_seconds=True),
            {"start_recomputation": self._launch},
            loads={
                "recompute_pages": self._recompute_pages,
                "recomputation_failed": self.failures.append,
                "recomputes_pages": True,
            },
            pool={
                "save_recomputed": self._save,
                "mark_arrived": lambda: self.settled.append([*self.saved]),
                "arena": SimpleNamespace(
                    physical=lambda pages: pages,
                    expect_recomputed=self._expect,
                    mark_unfit=lambda host_pages: self.lost.extend(host_pages.tolist()),
                ),
            },
        )
        self.l3 = self.eager._l3
        self.l3.seconds_to_read = lambda tokens, **_: tokens * self.seconds_to_read
        self.loads, self.pool = self.eager._loads, self.eager._pool
        self.cache = hicache(lost=lambda: not self.known)

    def begin(self, pages: int = 8) -> Any:
        """A prefetch begins; what HiCache knows of it."""
        prefetch = Operation(pages, SIZE)
        prefetch.meeting = Meeting()
        self.cache.ongoing_prefetch[0] = prefetch
        return prefetch

    def began(self, pages: int = 8) -> Any:
        """The same, and a turn behind it."""
        prefetch = self.begin(pages)
        self.turn()
        return prefetch

    def turn(self, reduce: Reduce = alone) -> None:
        turn_of(self.eager, self.cache, reduce)

    def settle(self) -> None:
        """Wait until all slices are done, and saved."""
        for stream in (self.stream, self.eager.fronts._saving):
            stream.record().synchronize()

    def _recompute_pages(self, span: TokenSpan, slots: torch.Tensor) -> torch.Tensor:
        assert len(span.token_ids) == len(slots)
        self.launched.append((span.token_ids.tolist(), len(span.prefix)))
        return slots

    def _expect(self, host_pages: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> None:
        self.expected.append((host_pages.tolist(), positions.tolist(), ids.tolist()))

    def _save(self, host_pages: np.ndarray, slots: torch.Tensor, rows: object) -> None:
        assert len(slots) == len(host_pages) * SIZE
        assert rows is None  # pages of K and V have none
        self.saved += host_pages.tolist()
        if self.save_problem is not None:
            raise self.save_problem

    def _launch(self, slots: torch.Tensor) -> RunningRestore:
        event = self.stream.record(timed=True)
        restore = RunningRestore(len(slots), {}, event, torch.device("cpu"), event, [event] * 3)
        restore.failed = self.problem
        return restore


@pytest.fixture
def fronts(scene: Scene) -> Fronts:
    return Fronts(scene)


def test_front_pages_are_recomputed_and_saved_until_they_meet_the_back(fronts: Fronts) -> None:
    operation = fronts.began()
    meeting = operation.meeting
    assert fronts.launched == [(list(range(100, 108)), SIZE)]  # two pages in a turn
    assert (fronts.saved, operation.completed_tokens) == ([0, 1], 2 * SIZE)
    assert fronts.expected == [([0, 1], list(range(SIZE, 3 * SIZE)), list(range(100, 108)))]
    assert meeting.next_batch(3) == range(5, 8)
    fronts.turn()
    meeting.set_back(5, 8)
    assert meeting.next_batch(3) == range(4, 5)
    fronts.turn()
    assert fronts.launched[1:] == [(list(range(108, 116)), 3 * SIZE)]  # page 4 is being read
    meeting.set_back(4, 8)
    fronts.turn()
    assert meeting.counted_pages == 8 and not meeting.next_batch(3)
    fronts.turn(lambda *_: pytest.fail("ranks agree on nothing once the ends have met"))
    handed = fronts.eager.restores.hand_out(np.arange(8))
    assert handed is not None and handed.ready.all()


def test_a_front_goes_on_as_far_as_every_rank_allows_and_has_unread_pages(fronts: Fronts) -> None:
    asked: list[list[int]] = []
    others = iter([[1], [0], [2]])

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.append(numbers.tolist())
        numbers.copy_(torch.tensor(next(others)))

    fronts.begin()
    for _ in range(3):
        fronts.turn(reduce)
    assert asked == [[2]] * 3
    assert [len(tokens) for tokens, _ in fronts.launched] == [SIZE, 2 * SIZE]


def test_a_turn_has_one_slice_and_none_while_two_are_not_done(fronts: Fronts) -> None:
    gate = threading.Event()
    fronts.stream.run(partial(gate.wait, 240))
    first, second = fronts.begin(5), Operation(5, SIZE, first=5)
    second.meeting = Meeting()
    fronts.cache.ongoing_prefetch[1] = second
    counts = []
    for _ in range(3):
        fronts.turn()
        counts.append((first.meeting.front, second.meeting.front))
    assert counts == [(2, 0), (4, 0), (4, 0)]
    gate.set()
    fronts.settle()
    for _ in range(2):
        fronts.turn()
        counts.append((first.meeting.front, second.meeting.front))
    assert counts[3:] == [(5, 0), (5, 2)]


@pytest.mark.parametrize("done", [False, True])
def test_what_was_recomputed_long_ago_is_in_front_of_no_batch(fronts: Fronts, done: bool) -> None:
    gate = threading.Event()
    fronts.stream.run(partial(gate.wait, 240))
    fronts.began()
    fronts.eager.fronts.governor.look = lambda _: None
    fronts.eager.fronts.governor.pace = Pace(0.0, "put_off_waiting")  # no further slice
    if done:
        gate.set()
        fronts.settle()
    fronts.turn()
    assert [fronts.eager.fronts.take_recomputed() for _ in range(2)] == [not done, False]
    gate.set()


def test_a_slice_that_is_put_off_is_put_off_on_every_rank(fronts: Fronts) -> None:
    """They agree on it: none needs to have seen what this one saw."""
    asked = list[list[int]]()
    fronts.eager.fronts.governor.look = lambda _: None
    fronts.eager.fronts.governor.pace = Pace(0.0, "put_off_waiting")
    fronts.begin()
    for _ in range(3):
        fronts.turn(lambda numbers, _: asked.append(numbers.tolist()))
    assert (asked, fronts.launched) == ([[0]] * 3, [])
    assert not fronts.eager.fronts.take_recomputed()
    fronts.eager.fronts.governor.pace = Pace(0.5, "shorter")
    fronts.turn()
    assert len(fronts.launched) == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("prefetch", "meeting", None),  # it is read in order
        ("cache", "prefetch_stop_policy", "best_effort"),
        ("fronts", "known", False),
        # SGLang may cut off what has come meanwhile; then token ids are not those of the pages.
        ("prefetch", "storage_start", 2 * SIZE),
    ],
)
def test_other_prefetches_are_only_read(owner: str, name: str, value: Any, fronts: Fronts) -> None:
    prefetch = fronts.begin()
    setattr({"prefetch": prefetch, "cache": fronts.cache, "fronts": fronts}[owner], name, value)
    fronts.turn()
    assert (fronts.launched, prefetch.completed_tokens) == ([], 0)
    assert fronts.scene.pages.count() == PAGES - 8
    if prefetch.meeting is not None:
        assert prefetch.meeting.next_batch(8) == range(8)


def test_slices_get_shorter_behind_all_that_is_before_them(fronts: Fronts) -> None:
    prefixes: list[int] = []

    def pages(
        original: Any, most: int, page_size: int, prefix: int, share: float, **limits: float
    ) -> Any:
        prefixes.append(prefix)
        return original(most, page_size, prefix, share, **limits)

    around(fronts.eager.fronts._budget, "pages_of_slice", pages)
    fronts.began()
    fronts.turn()
    assert prefixes == [SIZE, 3 * SIZE]


def test_for_what_comes_in_one_piece_nothing_is_reserved(fronts: Fronts) -> None:
    operation = fronts.began(pages=4)
    assert (fronts.scene.pages.count(), fronts.launched) == (PAGES, [])
    assert operation.meeting.reachable == 0


def test_readers_are_told_whether_a_front_may_be_recomputed(fronts: Fronts) -> None:
    assert not fronts.eager.fronts.recomputes_pages  # nobody has said
    fronts.turn()
    assert fronts.eager.fronts.recomputes_pages
    fronts.cache.prefetch_stop_policy = "best_effort"
    assert not fronts.eager.fronts.recomputes_pages


def test_what_was_offered_is_read_if_an_error_came_before_the_ranks_agreed(fronts: Fronts) -> None:
    meeting = fronts.began().meeting
    first = fronts.eager.restore_arrived(fronts.cache)
    fronts.eager.fronts.propose_slices(Turn(fronts.cache), first)
    assert meeting.next_batch(8) == range(4, 8)
    fronts.known = False  # nothing is offered any more
    fronts.turn()
    assert not meeting._offered and meeting.next_batch(8) == range(2, 4)


def test_host_pages_are_left_alone_when_the_processor_wants_them(fronts: Fronts) -> None:
    fronts.begin().meeting = None
    fronts.cache.ongoing_prefetch[0].operation.completed_tokens = 2 * SIZE
    fronts.turn()
    [restore] = fronts.scene.restores
    fronts.eager.wait_until_saved(np.array([5]))
    assert not restore.read_host
    fronts.eager.wait_until_saved(np.array([1, 5]))
    assert restore.read_host


def test_what_was_restored_is_given_back_when_it_means_nothing_any_more(fronts: Fronts) -> None:
    fronts.began()
    assert fronts.scene.pages.count() == PAGES - 8
    fronts.eager.restores.give_all_back()
    assert (fronts.scene.pages.count(), fronts.eager.restores.pages) == (PAGES, 0)
    assert fronts.eager.restores.hand_out(np.arange(2)).ready.tolist() == [False] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("freed", [True, False])
def test_saved_pages_are_settled_before_they_are_freed_or_in_the_next_turn(
    freed: bool, fronts: Fronts
) -> None:
    fronts.began()
    if not freed:
        fronts.turn()
        assert fronts.settled == [[], [0, 1]]
        return
    fronts.pool.on_freed[0](np.array([1]))
    assert fronts.settled == [[], [0, 1]]
    assert fronts.eager.restores.ready_pages(np.arange(2)).tolist() == [True, False]


def test_nothing_is_recomputed_whole_for_a_prefetch_that_has_ended(fronts: Fronts) -> None:
    operation = fronts.began()
    operation.terminated = True
    fronts.turn()
    assert len(fronts.launched) == 1
    for prefetch in list(fronts.cache.ongoing_prefetch):
        del fronts.cache.ongoing_prefetch[prefetch]
    operation.terminated = False
    fronts.turn()
    assert (len(fronts.launched), fronts.eager.restores.pages) == (1, 2)
    fronts.pool.on_freed[0](np.arange(2))
    assert (fronts.eager.restores.pages, fronts.scene.pages.count()) == (0, PAGES)


def test_recomputed_pages_that_were_not_saved_are_lost_on_this_rank_alone(fronts: Fronts) -> None:
    """The others know nothing of it: the front goes on, and the pages of the device count."""
    fronts.save_problem = RuntimeError("no pinned memory")
    operation = fronts.began()
    fronts.save_problem = None
    fronts.turn()
    assert (fronts.failures, fronts.lost) == ([], [0, 1])
    assert operation.meeting.counted_pages == 4
    handed = fronts.eager.restores.hand_out(np.arange(4))
    assert handed is not None and handed.ready.all()


def test_pages_whose_recomputation_failed_do_not_count(fronts: Fronts) -> None:
    fronts.problem = problem = RuntimeError("out of memory")
    operation = fronts.began()
    assert fronts.failures == [problem]
    fronts.turn()
    assert len(fronts.launched) == 1  # there is no way past them
    meeting = operation.meeting
    while batch := meeting.next_batch(3):
        meeting.set_back(batch.start, 8)
    assert meeting.counted_pages == 0
    handed = fronts.eager.restores.hand_out(np.arange(2))
    assert handed is not None and not handed.ready.any()


def test_a_front_ends_on_all_ranks_where_a_launch_has_failed_on_one(fronts: Fronts) -> None:
    """Its tokens could attend to pages that this rank does not have."""
    meeting, said = fronts.began().meeting, list[list[int]]()
    fronts.eager._pipeline = SimpleNamespace(
        failed_restore=lambda tokens: BROKEN
    )  # cannot start any
    meeting.next_batch(3)
    meeting.set_back(5, 8)

    def note(numbers: torch.Tensor, _: Any) -> None:
        said.append(numbers.tolist())

    fronts.turn(note)
    assert said == [[0]] and len(fronts.launched) == 1
    assert fronts.eager.restores.any_failed(np.array([0]))


@pytest.mark.parametrize(("seconds", "recomputed"), [(0.1, 0), (1.0, 5), (9.0, 8)])
def test_what_l3_brings_sooner_is_only_read(
    seconds: float, recomputed: int, fronts: Fronts
) -> None:
    """A token takes three seconds; the reader does not begin."""
    fronts.eager.fronts._budget.add_slice = lambda *_: None  # type: ignore[method-assign]
    fronts.seconds_to_read = seconds
    fronts.begin()
    for _ in range(8):
        fronts.turn()
    assert sum(len(tokens) for tokens, _ in fronts.launched) == recomputed * SIZE


def test_a_front_does_not_wait_for_reads_of_a_prefetch_before_it(fronts: Fronts) -> None:
    """The last pages of the first prefetch are being read, perhaps for long."""
    asked, other_is_free = list[Any](), 1
    fronts.seconds_to_read = 1e9

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.append(numbers.tolist())
        numbers *= other_is_free

    first, second = fronts.begin(5), Operation(5, SIZE, first=5)
    second.token_ids, second.meeting = list(range(500, 500 + 5 * SIZE)), Meeting()
    fronts.cache.ongoing_prefetch[1] = second
    first.meeting.set_pages(5)
    assert first.meeting.next_batch(5) == range(5)
    other_is_free = 0
    fronts.turn(reduce)
    assert len(asked) == 1 and not fronts.launched
    other_is_free = 1
    fronts.turn(reduce)
    assert asked == [[0, 2]] * 2
    assert [tokens[0] for tokens, _ in fronts.launched] == [500]


def test_a_front_is_not_waited_for_where_slices_are_put_off(fronts: Fronts) -> None:
    fronts.seconds_to_read, meeting = 1.0, Meeting()
    meeting.set_pages(8)
    meeting.reachable = 8
    assert fronts.eager.fronts.seconds_to_recompute(8 * SIZE, 0) == 3 * 8 * SIZE
    together, alone = fronts.eager.fronts.seconds_until_met(meeting, 0)
    assert (together, alone) == (pytest.approx(8 * SIZE * 3 / 4), 8 * SIZE)
    fronts.eager.fronts.governor.pace = Pace(0.5, "shorter")
    assert fronts.eager.fronts.seconds_to_recompute(8 * SIZE, 0) == 2 * 3 * 8 * SIZE
    fronts.eager.fronts.governor.pace = Pace(0.0, "put_off_running")
    assert fronts.eager.fronts.seconds_until_met(meeting, 0) == (alone, alone)


def test_slices_take_as_long_as_a_prefill_until_one_has_run(fronts: Fronts) -> None:
    """Servers of K and V have no profile for slices; their first hits are judged all the same."""
    fronts.eager.fronts._budget = SliceBudget(
        1.0, 2 * SIZE, lambda tokens, _: 3 * tokens, in_seconds=False
    )
    fronts.l3.estimates.prefill.seconds = lambda tokens, prefix: tokens * 5 + prefix
    fronts.eager.fronts.governor.pace = Pace(0.5, "shorter")
    assert fronts.eager.fronts.seconds_to_recompute(8 * SIZE, 3) == 2 * (8 * SIZE * 5 + 3)
    fronts.eager.fronts._budget._recomputing.add_time(2 * SIZE, 0, 6.0 * SIZE)
    assert fronts.eager.fronts.seconds_to_recompute(8 * SIZE, 3) == 2 * 3 * 8 * SIZE


def test_a_front_is_not_waited_for_where_slices_do_not_reach_it(fronts: Fronts) -> None:
    fronts.seconds_to_read, meeting = 1.0, Meeting()
    meeting.set_pages(8)
    alone = 8 * SIZE
    # The scheduler has not looked yet: the reader leaves to the front what that may reach.
    assert fronts.eager.fronts.seconds_until_met(meeting, 0)[0] == pytest.approx(alone * 6 / 8)
    for reachable in range(9):
        meeting.reachable = reachable
        together, _ = fronts.eager.fronts.seconds_until_met(meeting, 0)
        # Slices are three times as slow as L3: they recompute a quarter, if they reach so far.
        assert together == pytest.approx(alone * max(6, 8 - reachable) / 8)


def test_slices_reach_what_is_reserved_behind_tokens_that_are_on_the_device(fronts: Fronts) -> None:
    operation = fronts.began()
    meeting = operation.meeting
    assert meeting.reachable == 8
    fronts.scene.pages.take(PAGES - 8)
    fronts.eager.restores.make_free(3)
    for known, recomputes, reachable in ((1, 1, 5), (0, 1, 0), (1, 0, 0), (1, 1, 5)):
        fronts.known, fronts.loads.recomputes_pages = bool(known), bool(recomputes)
        fronts.turn()
        assert meeting.reachable == reachable
    fronts.eager.restores.make_free(8)
    fronts.turn()
    assert meeting.reachable == 0
