"""Reservations in SGLang's own allocator."""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hcache_backend.host.loads import QueuedLoad
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.streams import WorkerStream
from tests.engine.in_process.hits.eager_scene import PAGES, SIZE, Scene, pages_in
from tests.kit.prefetch import Operation
from tests.kit.turns import turn_of
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
    eager = scene.loads(SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, in_seconds=True), {})
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


def test_copies_of_a_hit_do_not_wait_for_restores_that_others_wait_for(scene: Scene) -> None:
    server, gate = Server(["hidden", "kv"]), threading.Event()
    loading = WorkerStream("loading")
    loading.run(partial(gate.wait, 240))
    budget = SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, in_seconds=True)
    eager = scene.loads(budget, {"start": server.pipeline.start})
    with loading.as_current():
        restore = eager._launch(np.array([1, 2]), torch.arange(2 * SIZE))
    restore.wait()
    assert not gate.is_set()
    server.assert_restored(1, [1, 2], torch.arange(2 * SIZE))
    gate.set()
