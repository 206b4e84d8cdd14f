"""Reservations in SGLang's own allocator."""

from __future__ import annotations

import math
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hcache_cpu_engine import plugin
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hcache_backend.host.loads import QueuedLoad
from hcache_backend.prefetch.eager import EagerRestores, Launched
from hcache_backend.prefetch.eager_loads import EagerLoads, Offer
from hcache_backend.prefetch.governor import Pace
from hcache_backend.prefetch.prefetch import Meeting
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.restore.report import RunningRestore
from hcache_backend.sglang.allocator import ReservablePages
from hcache_backend.streams import WorkerStream
from hcache_backend.turn import Turn
from tests.kit.prefetch import Operation, eager_over
from tests.kit.turns import Reduce, alone, recompute, turn_of
from tests.unit.restore.pipeline_server import Server

SIZE, PAGES = 4, 10
plugin._replace_allocator_kernels()


class Restore:
    def __init__(self) -> None:
        self.waited = False

    def wait_for_layer(self, layer: int) -> None:
        self.waited = True

    @property
    def copied(self) -> Restore:
        return self

    def query(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True

    def wait_until_copied(self) -> None:
        self.waited = True


class Scene:
    """An allocator with reservations."""

    def __init__(self, *, need_sort: bool) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(
            PAGES * SIZE, SIZE, torch.float32, "cpu", SimpleNamespace(), need_sort
        )
        self.pages = ReservablePages(self.allocator)
        self.restores: list[Restore] = []
        self.eager = EagerRestores(SIZE, self.pages, self._launch, PAGES)
        self.pages.eager = self.eager

    def _launch(self, *_: Any) -> Launched:
        self.restores.append(Restore())
        return Launched(self.restores[-1], lacking=0)  # type: ignore[arg-type]

    def _launch_alone(self, *_: Any, ahead: bool) -> Restore:
        assert ahead
        self.restores.append(Restore())
        return self.restores[-1]

    def loads(self, budget: SliceBudget, starts: dict[str, Any], **others: Any) -> Any:
        """Eager loads into its pages, whose pipeline starts what it is to with ``starts``."""
        pipeline = {"start": self._launch_alone} | starts
        return eager_over(self.pages, PAGES, SIZE, budget, pipeline, **others)

    def reserve(self, *host_pages: int, arrived: int = 0) -> None:
        self.eager.reserve("prefetch", host_pages, np.array(host_pages))
        self.eager.arrived("prefetch", arrived)


@pytest.fixture(params=[False, True], ids=["unsorted", "sorted"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(need_sort=request.param)


def pages_in(slots: torch.Tensor) -> set[int]:
    return set((slots // SIZE).tolist())


def test_reserved_pages_count_as_available_and_go_to_whoever_needs_them(scene: Scene) -> None:
    scene.reserve(1, 2, 3, 4, arrived=2)
    assert scene.allocator.available_size() == PAGES * SIZE
    first = scene.allocator.alloc(6 * SIZE)
    assert scene.eager.pages == 4
    second = scene.allocator.alloc(3 * SIZE)
    assert scene.eager.pages == 1
    assert scene.allocator.available_size() == SIZE
    assert not pages_in(first) & pages_in(second)
    assert scene.allocator.alloc(2 * SIZE) is None
    assert scene.restores[0].waited


def test_extending_and_decoding_get_reserved_pages_too(scene: Scene) -> None:
    scene.reserve(*range(8))
    nothing, tokens = torch.tensor([0]), torch.tensor([5 * SIZE])
    slots = scene.allocator.alloc_extend(
        nothing, nothing, tokens, tokens, torch.tensor([-1]), 5 * SIZE
    )
    assert len(pages_in(slots)) == 5
    for page in range(5, PAGES):
        lengths = torch.tensor([page * SIZE + 1])
        assert scene.allocator.alloc_decode(lengths, lengths, torch.tensor([-1])) is not None
    assert (scene.eager.pages, scene.allocator.available_size()) == (0, 0)


def test_a_load_gets_what_was_restored_for_it(scene: Scene) -> None:
    scene.reserve(1, 2, 3, arrived=2)
    load = QueuedLoad(np.array([2, 3, 7]))
    with scene.pages.given_to(load):
        slots = scene.allocator.alloc(3 * SIZE)
    handed = load.handed
    assert handed is not None
    assert torch.equal(handed.slots, slots)
    assert handed.ready.tolist() == [True, False, False]
    assert scene.pages._load is None
    assert scene.allocator.available_size() == (PAGES - 3) * SIZE
    scene.eager.end("prefetch")
    scene.allocator.free(slots)
    assert scene.allocator.available_size() == PAGES * SIZE


def test_pages_are_free_at_once_while_the_scheduler_collects_what_it_frees(scene: Scene) -> None:
    scene.reserve(*range(PAGES))
    scene.allocator.free_group_begin()
    assert len(pages_in(scene.allocator.alloc(PAGES * SIZE))) == PAGES
    scene.allocator.free_group_end()


def test_clearing_the_allocator_forgets_reservations(scene: Scene) -> None:
    scene.reserve(1, 2, arrived=1)
    scene.allocator.clear()
    assert scene.restores[0].waited
    assert scene.eager.pages == 0
    assert len(pages_in(scene.allocator.alloc(PAGES * SIZE))) == PAGES


def test_an_abort_frees_what_it_held_in_the_next_turn(scene: Scene) -> None:
    """HiCache forgets the prefetch, and gives back the host pages that it had brought."""
    eager = scene.loads(SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, known=True), {})
    prefetch = Operation(8, SIZE)
    prefetch.completed_tokens = 4 * SIZE  # half of it has arrived
    transfers = SimpleNamespace(host_to_device_stream=None)
    cache = SimpleNamespace(
        cache_controller=SimpleNamespace(
            l2_transfer_engine=transfers, after_forwards=lambda stream: None
        ),
        ongoing_prefetch={0: prefetch},
    )
    turn_of(eager, cache)
    turn_of(eager, cache)
    assert scene.pages.count() == PAGES - 8
    cache.ongoing_prefetch = {}
    eager._pool.on_freed[0](np.arange(4))
    turn_of(eager, cache)
    assert (scene.pages.count(), scene.allocator.available_size()) == (PAGES, PAGES * SIZE)
    assert all(restore.waited for restore in scene.restores)


class Slices:
    """Eager loads of prefetches whose pages have all arrived and lack two layers.

    Attributes:
        launched: For each slice the pages, and how many tokens are before them.
        layers: How many first layers each recomputes.
        done: Whether the device has done what was launched.
        failures: What recomputation was given up for.
    """

    def __init__(self, scene: Scene, seconds: float, problem: Exception | None = None) -> None:
        self.launched: list[tuple[list[int], int]] = []
        self.layers: list[int] = []
        self.failures: list[Exception | None] = []
        self.known, self.done, self._problem = True, True, problem
        self.pace = Pace(0.999, "shorter")  # at 1.0 a slice has 256 tokens at least
        self.budget = SliceBudget(seconds, 8 * SIZE, lambda tokens, prefix: tokens, known=True)
        layout = SimpleNamespace(page_bytes=1, positions=lambda page: [SIZE])
        self.eager = scene.loads(
            self.budget,
            {"start_recomputation": self._launch},
            arena={"pages": lambda pages, header: pages},
            pool={"page_layout": layout},
            loads={
                "stored_from": 2,
                "recompute_of": self._recompute_of,
                "recomputation_failed": self.failures.append,
            },
        )
        self.eager._controller = SimpleNamespace(tp_group=None)
        self.eager.governor = SimpleNamespace(pace=lambda: self.pace)
        self.eager._before_prefetch = lambda prefetch: (
            torch.zeros(SIZE, dtype=torch.int64) if self.known else None
        )
        self.restores = self.eager._restores

    def _recompute_of(self, host_pages: np.ndarray, layers: int, prefix: Any) -> object:
        self.layers.append(layers)
        self.launched.append((host_pages.tolist(), len(prefix())))
        return object()

    def _launch(
        self, recompute: object, positions: np.ndarray, slots: torch.Tensor, after: Any
    ) -> Any:
        assert after is None
        _, before = self.launched[-1]
        assert positions.tolist() == list(range(before, before + len(slots)))
        report = SimpleNamespace(busy_ms=lambda stream: 2e3 * len(slots))  # a second per token
        return SimpleNamespace(
            tokens=len(slots), done=lambda: self.done, report=lambda: report, failed=self._problem
        )


def test_a_turn_recomputes_one_slice_of_the_first_prefetch_that_lacks_layers(scene: Scene) -> None:
    slices = Slices(scene, seconds=2 * 2 * SIZE + 0.1)  # two layers of two pages
    for prefetch, host in (("a", [1, 2, 3]), ("b", [4, 5])):
        slices.restores.reserve(prefetch, [f"{prefetch}{i}" for i in host], np.array(host))
        slices.restores.arrived(prefetch, len(host))
    for _ in range(4):
        recompute(slices.eager)
    assert slices.launched == [([1, 2], SIZE), ([3], 3 * SIZE), ([4, 5], SIZE)]
    assert slices.layers == [2, 2, 2]
    handed = slices.restores.hand_out(np.array([1, 2, 3, 4, 5]))
    assert handed is not None and handed.whole.all()
    assert [slices.eager.take_recomputed(), slices.eager.take_recomputed()] == [True, False]


def test_no_slice_is_launched_while_two_are_not_done(scene: Scene) -> None:
    slices = Slices(scene, seconds=1e-9)
    slices.restores.reserve("a", "wxyz", np.array([1, 2, 3, 4]))
    slices.restores.arrived("a", 4)
    slices.done = False
    for _ in range(4):
        recompute(slices.eager)
    assert len(slices.launched) == 2
    slices.done = True
    recompute(slices.eager)
    assert len(slices.launched) == 3


@pytest.mark.parametrize("done", [False, True])
def test_what_was_recomputed_long_ago_is_in_front_of_no_batch(scene: Scene, done: bool) -> None:
    slices = Slices(scene, seconds=1e9)
    slices.restores.reserve("a", ["x"], np.array([1]))
    slices.restores.arrived("a", 1)
    slices.done = False
    recompute(slices.eager)
    slices.done = done
    turn_of(slices.eager, SimpleNamespace(cache_controller=None, ongoing_prefetch={}))
    assert slices.eager.take_recomputed() == (not done)


def test_a_slice_is_no_longer_than_every_rank_allows(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, asked = Slices(scene, seconds=1e9), []

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.append(int(numbers[1]))
        # At first the other rank is busy with earlier ones.
        numbers.copy_(torch.tensor([len(asked) > 1, len(asked) - 1]))

    slices.restores.reserve("a", ["x", "y", "z"], np.array([1, 2, 3]))
    slices.restores.arrived("a", 3)
    for _ in range(3):
        recompute(slices.eager, reduce)
    assert asked == [3, 3, 2]
    assert [pages for pages, _ in slices.launched] == [[1], [2, 3]]


def test_a_slice_that_is_put_off_is_put_off_on_every_rank(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree on it: none needs to have seen what this one saw."""
    slices, asked = Slices(scene, seconds=1e9), []

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.append(numbers.tolist())

    slices.restores.reserve("a", ["x", "y"], np.array([1, 2]))
    slices.restores.arrived("a", 2)
    slices.pace = Pace(0.0, "put_off_waiting")
    for _ in range(3):
        recompute(slices.eager, reduce)
    assert (asked, slices.launched) == ([[0, 0]] * 3, [])
    assert not slices.eager.take_recomputed()
    slices.pace = Pace(0.5, "shorter")
    recompute(slices.eager)
    assert [pages for pages, _ in slices.launched] == [[1, 2]]


def test_nothing_is_recomputed_behind_tokens_that_are_not_on_the_device(scene: Scene) -> None:
    slices = Slices(scene, seconds=1e9)
    slices.restores.reserve("a", ["x"], np.array([1]))
    slices.restores.arrived("a", 1)
    slices.known = False
    recompute(slices.eager)
    assert slices.launched == [] and not slices.eager.take_recomputed()


def test_pages_whose_recomputation_failed_lack_layers_at_the_load(scene: Scene) -> None:
    slices = Slices(scene, 1e9, problem := RuntimeError("out of memory"))
    slices.restores.reserve("a", ["x", "y"], np.array([1, 2]))
    slices.restores.arrived("a", 2)
    recompute(slices.eager)
    assert slices.failures == [problem]
    handed = slices.restores.hand_out(np.array([1, 2]))
    assert handed is not None and handed.ready.all() and not handed.whole.any()


def test_copies_of_a_hit_do_not_wait_for_restores_that_others_wait_for(scene: Scene) -> None:
    server, gate = Server(["hidden", "kv"]), threading.Event()
    loading = WorkerStream("loading")
    loading.run(partial(gate.wait, 240))
    budget = SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, known=True)
    eager = scene.loads(budget, {"start": server.pipeline.start})
    with loading.as_current():
        launched = eager._launch(np.array([1, 2]), torch.arange(2 * SIZE))
    launched.restore.wait()
    assert not gate.is_set()
    server.assert_restored(1, [1, 2], torch.arange(2 * SIZE))
    gate.set()


class Fronts:
    """Eager loads of prefetches of eight pages of K and V, read from the back.

    Attributes:
        launched: The tokens of each slice, and how many are before it.
        saved: The host pages that were saved...
        lost: ...or could not be.
        expected: Those, and the positions and ids of their tokens, as the pool heard of them.
        settled: What was saved when the pool was asked to settle that.
        failures: What recomputation was given up for.
    """

    def __init__(self, scene: Scene, problem: Exception | None = None) -> None:
        self.launched: list[tuple[list[int], int]] = []
        self.saved: list[int] = []
        self.lost: list[int] = []
        self.expected: list[tuple[list[int], list[int], list[int]]] = []
        self.settled: list[list[int]] = []
        self.failures: list[Exception | None] = []
        self.problem, self.save_problem = problem, None
        self.whole = True
        self.known = True
        self.stream = WorkerStream("forward")
        self.seconds_to_read = math.inf  # a token
        self.eager = scene.loads(
            SliceBudget(1e9, 2 * SIZE, lambda tokens, prefix: tokens, known=True),
            {"start_recomputation": self._launch},
            loads={
                "methods": SimpleNamespace(methods=("kv",) * 3),
                "recompute_pages": self._recompute_pages,
                "recomputation_failed": self.failures.append,
                "recomputes_pages": True,
            },
            pool={
                "save_recomputed": self._save,
                "settle": lambda: self.settled.append([*self.saved]),
                "arena": SimpleNamespace(
                    physical=lambda pages: pages,
                    recomputed=self._expect,
                    arrived=lambda host_pages, fits: self.lost.extend(host_pages.tolist()),
                ),
            },
        )
        self.l3 = self.eager._l3
        self.l3.seconds_to_read = lambda tokens: tokens * self.seconds_to_read
        self.loads, self.pool = self.eager._loads, self.eager._pool
        self.cache = SimpleNamespace(
            prefetch_stop_policy="wait_complete",
            cache_controller=SimpleNamespace(tp_group=None, after_forwards=lambda stream: None),
            ongoing_prefetch={},
            tree_core=SimpleNamespace(
                empty_match_result=SimpleNamespace(last_device_node=-1),
                is_full_device_evicted=lambda node: not self.known,
                collect_full_device_indices=lambda *_: torch.zeros(SIZE, dtype=torch.int64),
            ),
        )

    def begin(self, pages: int = 8) -> Any:
        """A prefetch begins; what HiCache knows of it."""
        prefetch = Operation(pages, SIZE)
        prefetch.meeting = Meeting()
        self.cache.ongoing_prefetch[0] = prefetch
        return prefetch

    def turn(self, reduce: Reduce = alone) -> None:
        turn_of(self.eager, self.cache, reduce)

    def _recompute_pages(self, token_ids: np.ndarray, prefix: torch.Tensor) -> object:
        self.launched.append((token_ids.tolist(), len(prefix)))
        return object()

    def _expect(self, host_pages: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> None:
        self.expected.append((host_pages.tolist(), positions.tolist(), ids.tolist()))

    def _save(self, host_pages: np.ndarray, slots: torch.Tensor, rows: object) -> None:
        assert len(slots) == len(host_pages) * SIZE
        assert rows is None  # pages of K and V have none
        self.saved += host_pages.tolist()
        if self.save_problem is not None:
            raise self.save_problem

    def _launch(
        self, recompute: object, positions: np.ndarray, slots: torch.Tensor, after: Any
    ) -> Any:
        assert after == []
        _, before = self.launched[-1]
        assert positions.tolist() == list(range(before, before + len(slots)))
        event = self.stream.record(timed=True)
        restore = RunningRestore(len(slots), {}, event, torch.device("cpu"), event, [event] * 3)
        restore.failed = self.problem
        return restore


def test_front_pages_are_recomputed_and_saved_until_they_meet_the_back(scene: Scene) -> None:
    fronts = Fronts(scene)
    operation = fronts.begin()
    fronts.turn()
    meeting = operation.meeting
    assert fronts.launched == [(list(range(100, 108)), SIZE)]  # two pages in a turn
    assert (fronts.saved, operation.completed_tokens) == ([0, 1], 2 * SIZE)
    assert fronts.expected == [([0, 1], list(range(SIZE, 3 * SIZE)), list(range(100, 108)))]
    assert meeting.next_batch(3) == range(5, 8)
    fronts.turn()
    meeting.arrived(5, 8)
    assert meeting.next_batch(3) == range(4, 5)
    fronts.turn()
    assert fronts.launched[1:] == [(list(range(108, 116)), 3 * SIZE)]  # page 4 is being read
    meeting.arrived(4, 8)
    fronts.turn()
    assert meeting.pages == 8 and not meeting.next_batch(3)
    handed = fronts.eager._restores.hand_out(np.arange(8))
    assert handed is not None and handed.whole.all()


def test_pages_are_taken_behind_the_forward_passes_that_may_still_use_them(scene: Scene) -> None:
    fronts, waited = Fronts(scene), []
    fronts.cache.cache_controller.after_forwards = waited.append
    fronts.begin()
    fronts.turn()
    fronts.turn()
    assert waited == [fronts.eager._stream]


def test_a_front_goes_on_as_far_as_every_rank_allows_and_has_unread_pages(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fronts, asked = Fronts(scene), []
    others = iter([[1, 1], [1, 0], [1, 2]])

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.append(numbers.tolist())
        numbers.copy_(torch.tensor(next(others)))

    fronts.begin()
    for _ in range(3):
        fronts.turn(reduce)
    assert asked == [[1, 2]] * 3
    assert [len(tokens) for tokens, _ in fronts.launched] == [SIZE, 2 * SIZE]


def test_for_what_comes_in_one_piece_nothing_is_reserved(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin(pages=4)
    fronts.turn()
    assert (scene.pages.count(), fronts.launched) == (PAGES, [])


def test_a_prefetch_that_is_read_in_order_is_not_recomputed_whole(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin().meeting = None
    fronts.turn()
    assert (scene.pages.count(), fronts.launched) == (PAGES - 8, [])


def test_no_front_is_recomputed_where_another_one_was_taken(scene: Scene) -> None:
    fronts = Fronts(scene)
    operation = fronts.begin()
    fronts.turn()
    [due] = fronts.eager._restores.to_recompute(2)
    assert due.pages == range(2, 4)
    meeting = operation.meeting
    offer = Offer(due._replace(pages=range(3, 5)), meeting, Turn().say())
    assert meeting.offer() == 6 and fronts.eager._taken(offer, 2) == 0
    assert meeting.next_batch(8) == range(4, 8)


def test_slices_get_shorter_behind_all_that_is_before_them(scene: Scene) -> None:
    fronts, prefixes = Fronts(scene), []
    allowed = fronts.eager._budget.pages

    def pages(most: int, page_size: int, prefix: int, *rest: Any) -> int:
        prefixes.append(prefix)
        return allowed(most, page_size, prefix, *rest)

    fronts.eager._budget.pages = pages  # type: ignore[method-assign]
    fronts.begin()
    fronts.turn()
    fronts.turn()
    assert prefixes == [SIZE, 3 * SIZE]


def test_a_front_is_not_recomputed_where_prefetches_may_end_at_any_time(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin()
    fronts.cache.prefetch_stop_policy = "best_effort"
    fronts.turn()
    assert not fronts.launched


def test_host_pages_are_left_alone_when_the_processor_wants_them(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin().meeting = None
    fronts.cache.ongoing_prefetch[0].operation.completed_tokens = 2 * SIZE
    fronts.turn()
    [restore] = scene.restores
    fronts.eager.until_saved(np.array([5]))
    assert not restore.waited
    fronts.eager.until_saved(np.array([1, 5]))
    assert restore.waited


def test_what_was_restored_is_given_back_when_it_means_nothing_any_more(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin()
    fronts.turn()
    assert scene.pages.count() == PAGES - 8
    fronts.eager.give_back()
    assert (scene.pages.count(), fronts.eager._restores.pages) == (PAGES, 0)
    assert fronts.eager._restores.hand_out(np.arange(2)).ready.tolist() == [False] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("anchor", "evicted", "found"), [(0, True, []), (7, False, [4, 5]), (7, True, None)]
)
def test_tokens_before_a_prefetch_are_found_unless_they_were_evicted(
    anchor: int, evicted: bool, found: list[int] | None, scene: Scene
) -> None:
    slots = {0: [], 7: [4, 5]}
    tree = SimpleNamespace(
        empty_match_result=SimpleNamespace(last_device_node=0),
        is_full_device_evicted=lambda node: evicted,
        collect_full_device_indices=lambda node, root: torch.tensor(slots[node]),
    )
    eager: Any = object.__new__(EagerLoads)
    eager._pages = SimpleNamespace(cache=SimpleNamespace(tree_core=tree))
    eager._prefetches, operation = Operation.prefetches, Operation(8, SIZE)
    Operation.prefetches.of(operation).anchor = anchor
    before = eager._before_prefetch(operation)
    assert found is None if before is None else before.tolist() == found


def test_a_host_page_is_freed_behind_what_is_to_be_done_once_it_is_saved(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin()
    fronts.turn()
    fronts.pool.on_freed[0](np.array([1]))
    assert fronts.settled == [[], [0, 1]]
    assert fronts.eager._restores.prepared(np.arange(2)).tolist() == [True, False]


def test_what_did_not_fit_when_it_was_saved_is_lost_in_a_later_turn(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.begin()
    fronts.turn()
    fronts.turn()
    assert fronts.settled == [[], [0, 1]]


def test_nothing_is_recomputed_whole_for_a_prefetch_that_has_ended(scene: Scene) -> None:
    fronts = Fronts(scene)
    operation = fronts.begin()
    fronts.turn()
    operation.terminated = True
    fronts.turn()
    assert len(fronts.launched) == 1
    fronts.cache.ongoing_prefetch.clear()
    operation.terminated = False
    fronts.turn()
    assert (len(fronts.launched), fronts.eager._restores.pages) == (1, 2)
    fronts.pool.on_freed[0](np.arange(2))
    assert (fronts.eager._restores.pages, scene.pages.count()) == (0, PAGES)


def test_pages_that_were_recomputed_and_not_saved_are_lost_on_this_rank_alone(
    scene: Scene,
) -> None:
    """The others know nothing of it: the front goes on, and the pages of the device count."""
    fronts = Fronts(scene)
    fronts.save_problem = RuntimeError("no pinned memory")  # type: ignore[assignment]
    operation = fronts.begin()
    fronts.turn()
    fronts.save_problem = None
    fronts.turn()
    assert (fronts.failures, fronts.lost) == ([], [0, 1])
    assert operation.meeting.pages == 4
    handed = fronts.eager._restores.hand_out(np.arange(4))
    assert handed is not None and handed.whole.all()


def test_pages_whose_recomputation_failed_do_not_count(scene: Scene) -> None:
    problem = RuntimeError("out of memory")
    fronts = Fronts(scene, problem)
    operation = fronts.begin()
    fronts.turn()
    assert fronts.failures == [problem]
    fronts.turn()
    assert len(fronts.launched) == 1  # there is no way past them
    meeting = operation.meeting
    while batch := meeting.next_batch(3):
        meeting.arrived(batch.start, 8)
    assert meeting.pages == 0
    handed = fronts.eager._restores.hand_out(np.arange(2))
    assert handed is not None and not handed.ready.any()


@pytest.mark.parametrize(("seconds", "recomputed"), [(0.1, 0), (1.0, 6), (9.0, 8)])
def test_what_l3_brings_sooner_is_not_recomputed(
    seconds: float, recomputed: int, scene: Scene
) -> None:
    """A token takes a second in each of three layers; the reader does not begin."""
    fronts = Fronts(scene)
    fronts.eager._budget.launched = lambda *_: None  # type: ignore[method-assign]
    fronts.seconds_to_read = seconds
    fronts.begin()
    for _ in range(8):
        fronts.turn()
    assert sum(len(tokens) for tokens, _ in fronts.launched) == recomputed * SIZE


def test_a_front_does_not_wait_for_what_is_being_read_of_a_prefetch_before_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pages of the first prefetch are being read, perhaps for long."""
    fronts, asked, other_is_free = Fronts(scene), [], 1
    fronts.seconds_to_read = 1e9

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.append(numbers.tolist())
        numbers[::2] *= other_is_free

    first, second = fronts.begin(5), fronts.begin(5)
    fronts.cache.ongoing_prefetch = dict(enumerate((first, second)))
    first.hash_value, second.token_ids = list("abcde"), list(range(500, 500 + 5 * SIZE))
    second.host_indices = second.host_indices + 5 * SIZE
    first.meeting.begin(5)
    assert first.meeting.next_batch(5) == range(5)
    other_is_free = 0
    fronts.turn(reduce)
    assert len(asked) == 1 and not fronts.launched
    other_is_free = 1
    fronts.turn(reduce)
    assert asked == [[1, 0, 1, 2]] * 2
    assert [tokens[0] for tokens, _ in fronts.launched] == [500]


def test_a_front_is_not_waited_for_where_slices_are_put_off(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.seconds_to_read, meeting = 1.0, Meeting()
    meeting.begin(8)
    meeting.reachable = 8
    assert fronts.eager.seconds_to_recompute(8 * SIZE, 0) == 3 * 8 * SIZE
    together, alone = fronts.eager.until_met(meeting, 0)
    assert (together, alone) == (pytest.approx(8 * SIZE * 3 / 4), 8 * SIZE)
    fronts.eager.governor.pace = lambda: Pace(0.5, "shorter")
    assert fronts.eager.seconds_to_recompute(8 * SIZE, 0) == 2 * 3 * 8 * SIZE
    fronts.eager.governor.pace = lambda: Pace(0.0, "put_off_running")
    assert fronts.eager.until_met(meeting, 0) == (alone, alone)


def test_slices_take_as_long_as_a_prefill_until_one_has_run(scene: Scene) -> None:
    """Servers of K and V have no profile for slices; their first hits are judged all the same."""
    fronts = Fronts(scene)
    fronts.eager._budget = SliceBudget(1.0, 2 * SIZE, lambda tokens, _: tokens, known=False)
    fronts.l3.estimates.computing = lambda tokens, prefix: tokens * 5 + prefix
    fronts.eager.governor.pace = lambda: Pace(0.5, "shorter")
    assert fronts.eager.seconds_to_recompute(8 * SIZE, 3) == 2 * (8 * SIZE * 5 + 3)
    fronts.eager._budget._layer.measured(2 * SIZE, 0, 2.0 * SIZE)
    assert fronts.eager.seconds_to_recompute(8 * SIZE, 3) == 2 * 3 * 8 * SIZE


def test_a_front_is_not_waited_for_where_slices_do_not_reach_it(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.seconds_to_read, meeting = 1.0, Meeting()
    meeting.begin(8)
    alone = 8 * SIZE
    # The scheduler has not looked yet: the reader leaves to the front what that may reach.
    assert fronts.eager.until_met(meeting, 0)[0] == pytest.approx(alone * 6 / 8)
    for reachable in range(9):
        meeting.reachable = reachable
        together, _ = fronts.eager.until_met(meeting, 0)
        # Slices are three times as slow as L3: they recompute a quarter, if they reach so far.
        assert together == pytest.approx(alone * max(6, 8 - reachable) / 8)


def test_slices_reach_what_is_reserved_behind_tokens_that_are_on_the_device(scene: Scene) -> None:
    fronts = Fronts(scene)
    operation = fronts.begin()
    fronts.turn()
    meeting = operation.meeting
    assert meeting.reachable == 8
    scene.pages.take(PAGES - 8)
    fronts.eager._restores.make_free(3)
    fronts.turn()
    assert meeting.reachable == 5
    fronts.known = False
    fronts.turn()
    assert meeting.reachable == 0
    fronts.known, fronts.loads.recomputes_pages = True, False
    fronts.turn()
    assert meeting.reachable == 0
    fronts.loads.recomputes_pages = True
    fronts.turn()
    assert meeting.reachable == 5
    fronts.eager._restores.make_free(8)
    fronts.turn()
    assert meeting.reachable == 0


def test_slices_reach_nothing_of_what_comes_in_one_piece(scene: Scene) -> None:
    fronts = Fronts(scene)
    operation = fronts.begin(pages=4)
    fronts.turn()
    assert operation.meeting.reachable == 0


def test_without_all_that_is_before_them_pages_are_read(scene: Scene) -> None:
    fronts = Fronts(scene)
    fronts.known = False
    operation = fronts.begin()
    fronts.turn()
    assert not fronts.launched and operation.completed_tokens == 0
    assert operation.meeting.next_batch(8) == range(8)


def test_pages_that_do_not_follow_what_is_before_the_prefetch_are_read(scene: Scene) -> None:
    """SGLang may cut off what has come meanwhile; then token ids are not those of the pages."""
    fronts = Fronts(scene)
    operation = fronts.begin()
    operation.storage_start += SIZE
    fronts.turn()
    assert not fronts.launched
    operation.storage_start = SIZE
    fronts.turn()
    assert fronts.launched == [(list(range(100, 108)), SIZE)]


def test_prefetches_that_may_end_at_any_time_are_read_in_order(scene: Scene) -> None:
    fronts = Fronts(scene)
    assert not fronts.eager.recomputes_pages  # nobody has said
    fronts.turn()
    assert fronts.eager.recomputes_pages
    fronts.cache.prefetch_stop_policy = "best_effort"
    assert not fronts.eager.recomputes_pages
