"""Reservations in SGLang's own allocator."""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.host.loads import QueuedLoad
from hcache_backend.prefetch.slices import Pace, SliceBudget
from hcache_backend.streams import WorkerStream
from tests.engine.in_process.hits.eager_scene import PAGES, SIZE, Scene, pages_in
from tests.kit.prefetch import Operation
from tests.kit.turns import recompute, turn_of
from tests.unit.restore.pipeline_server import Server


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
    assert scene.restores[0].is_done


def extended(scene: Scene, pages: int) -> torch.Tensor:
    nothing, tokens = torch.tensor([0]), torch.tensor([pages * SIZE])
    last = torch.tensor([-1])
    return scene.allocator.alloc_extend(nothing, nothing, tokens, tokens, last, pages * SIZE)


def decoded(scene: Scene, page: int) -> Any:
    """The first slot of a page."""
    lengths = torch.tensor([page * SIZE + 1])
    return scene.allocator.alloc_decode(lengths, lengths, torch.tensor([-1]))


def test_extending_and_decoding_get_reserved_pages_too(scene: Scene) -> None:
    scene.reserve(*range(8))
    assert len(pages_in(extended(scene, 5))) == 5
    for page in range(5, PAGES):
        assert decoded(scene, page) is not None
    assert (scene.eager.pages, scene.allocator.available_size()) == (0, 0)


def test_a_load_gets_what_was_restored_for_it(scene: Scene) -> None:
    scene.reserve(1, 2, 3, arrived=2)
    load = QueuedLoad(np.array([2, 3, 7]))
    scene.pages.load = load
    slots, scene.pages.load = scene.allocator.alloc(3 * SIZE), None
    handed = load.prepared
    assert handed is not None
    assert torch.equal(handed.slots, slots)
    assert handed.ready.tolist() == [True, False, False]
    assert scene.allocator.available_size() == (PAGES - 3) * SIZE
    scene.eager.end("prefetch")
    scene.allocator.free(slots)
    assert scene.allocator.available_size() == PAGES * SIZE


def test_capture_hears_of_all_slots_that_are_allocated(scene: Scene) -> None:
    """Also of those of a page that was restored before, but not when it was reserved."""
    scene.reserve(1, arrived=1)
    assert scene.captured == []
    found = [scene.allocator.alloc(SIZE), extended(scene, 2), decoded(scene, 1)]
    scene.pages.load = QueuedLoad(np.array([1]))
    found.append(scene.allocator.alloc(SIZE))
    scene.pages.load = None
    assert scene.allocator.alloc(PAGES * SIZE) is None
    assert len(scene.captured) == len(found)
    assert all(map(torch.equal, scene.captured, found))


def test_pages_are_free_at_once_while_the_scheduler_collects_what_it_frees(scene: Scene) -> None:
    scene.reserve(*range(PAGES))
    scene.allocator.free_group_begin()
    assert len(pages_in(scene.allocator.alloc(PAGES * SIZE))) == PAGES
    scene.allocator.free_group_end()


def test_clearing_the_allocator_forgets_reservations(scene: Scene) -> None:
    scene.reserve(1, 2, arrived=1)
    scene.allocator.clear()
    assert scene.restores[0].is_done
    assert scene.eager.pages == 0
    assert len(pages_in(scene.allocator.alloc(PAGES * SIZE))) == PAGES


def test_an_abort_frees_what_it_held_in_the_next_turn(scene: Scene) -> None:
    """HiCache forgets the prefetch, and gives back the host pages that it had brought."""
    eager = scene.loads(SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, known=True), {})
    prefetch = Operation(8, SIZE)
    prefetch.completed_tokens = 4 * SIZE  # half of it has arrived
    controller = SimpleNamespace(after_forwards=lambda stream: None)
    cache = SimpleNamespace(cache_controller=controller, ongoing_prefetch={0: prefetch})
    turn_of(eager, cache)
    turn_of(eager, cache)
    assert scene.pages.count() == PAGES - 8
    cache.ongoing_prefetch = {}
    eager._pool.on_freed[0](np.arange(4))
    turn_of(eager, cache)
    assert (scene.pages.count(), scene.allocator.available_size()) == (PAGES, PAGES * SIZE)
    assert all(restore.is_done for restore in scene.restores)


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
        self.eager = scene.loads(
            SliceBudget(seconds, 8 * SIZE, lambda tokens, prefix: tokens, known=True),
            {"start_recomputation": self._launch},
            arena={"pages": lambda pages, header: pages},
            pool={"page_layout": SimpleNamespace(page_bytes=1, positions=lambda page: [SIZE])},
            loads={
                "stored_from": 2,
                "recompute_of": self._recompute_of,
                "recomputation_failed": self.failures.append,
            },
        )
        self.eager.governor = self
        self.eager._before_prefetch = lambda prefetch: (
            torch.zeros(SIZE, dtype=torch.int64) if self.known else None
        )
        self.restores = self.eager.restores

    @property
    def pages(self) -> list[list[int]]:
        """Those of each slice."""
        return [pages for pages, _ in self.launched]

    def arrived(self, prefetch: str, *host_pages: int) -> None:
        keys = [f"{prefetch}{page}" for page in host_pages]
        self.restores.reserve(prefetch, keys, np.array(host_pages))
        self.restores.restore_arrived(prefetch, len(host_pages))

    def look(self, scheduler: Any) -> None:
        """As a governor, with a pace that tests set."""

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
    slices.arrived("a", 1, 2, 3)
    slices.arrived("b", 4, 5)
    for _ in range(4):
        recompute(slices.eager)
    assert slices.launched == [([1, 2], SIZE), ([3], 3 * SIZE), ([4, 5], SIZE)]
    assert slices.layers == [2, 2, 2]
    handed = slices.restores.hand_out(np.array([1, 2, 3, 4, 5]))
    assert handed is not None and handed.whole.all()
    assert [slices.eager.take_recomputed(), slices.eager.take_recomputed()] == [True, False]


def test_no_slice_is_launched_while_two_are_not_done(scene: Scene) -> None:
    slices = Slices(scene, seconds=1e-9)
    slices.arrived("a", 1, 2, 3, 4)
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
    slices.arrived("a", 1)
    slices.done = False
    recompute(slices.eager)
    slices.done = done
    turn_of(slices.eager, SimpleNamespace(cache_controller=None, ongoing_prefetch={}))
    assert slices.eager.take_recomputed() == (not done)


def test_a_slice_is_no_longer_than_every_rank_allows(scene: Scene) -> None:
    slices, asked = Slices(scene, seconds=1e9), []

    def reduce(numbers: torch.Tensor, _: Any) -> None:
        asked.extend(numbers.tolist())
        # At first the other rank is busy with earlier ones.
        numbers.copy_(torch.tensor([len(asked) - 1]))

    slices.arrived("a", 1, 2, 3)
    for _ in range(3):
        recompute(slices.eager, reduce)
    assert asked == [3, 3, 2]
    assert slices.pages == [[1], [2, 3]]


def test_a_slice_that_is_put_off_is_put_off_on_every_rank(scene: Scene) -> None:
    """They agree on it: none needs to have seen what this one saw."""
    slices, asked = Slices(scene, seconds=1e9), []
    slices.arrived("a", 1, 2)
    slices.pace = Pace(0.0, "put_off_waiting")
    for _ in range(3):
        recompute(slices.eager, lambda numbers, _: asked.append(numbers.tolist()))
    assert (asked, slices.launched) == ([[0]] * 3, [])
    assert not slices.eager.take_recomputed()
    slices.pace = Pace(0.5, "shorter")
    recompute(slices.eager)
    assert slices.pages == [[1, 2]]


def test_nothing_is_recomputed_behind_tokens_that_are_not_on_the_device(scene: Scene) -> None:
    slices = Slices(scene, seconds=1e9)
    slices.arrived("a", 1)
    slices.known = False
    recompute(slices.eager)
    assert slices.launched == [] and not slices.eager.take_recomputed()


def test_pages_whose_recomputation_failed_lack_layers_at_the_load(scene: Scene) -> None:
    slices = Slices(scene, 1e9, problem := RuntimeError("out of memory"))
    slices.arrived("a", 1, 2)
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
        restore, _ = eager._launch(np.array([1, 2]), torch.arange(2 * SIZE))
    restore.wait()
    assert not gate.is_set()
    server.assert_restored(1, [1, 2], torch.arange(2 * SIZE))
    gate.set()
