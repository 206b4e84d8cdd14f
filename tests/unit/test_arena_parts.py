"""Pages that lack the segments of their first layers never pass for whole ones."""

from __future__ import annotations

import numpy as np

from hcache_backend.capture.arena import Arena, Verdict
from tests.unit.test_arena import SIZE, arena, ids, slots_of


def capture(arena: Arena, page: int) -> np.ndarray:
    """A forward pass fills a device page; its slots."""
    slots = slots_of([page])
    positions = np.arange(SIZE, dtype=np.int32)
    ticket = arena.begin(slots, positions, positions)
    arena.promise(slots, ticket)
    arena.prove(slots, ticket, np.full(SIZE, Verdict.WRITTEN, np.uint8))
    return slots


def test_tokens_that_were_loaded_from_such_a_page_are_not_backed_up_from_it() -> None:
    pool = arena()
    pool.expect(ids(0), 1)
    assert pool.first_layers(ids(0)).tolist() == [1]
    slots = slots_of([2])
    pool.loaded(slots, ids(0))
    assert pool.problem(slots) == "rows not valid"
    pool.host_freed(ids(0))  # as write_back does while the tokens stay on the device
    assert pool.problem(slots) == "rows not valid"
    pool.check_integrity()


def test_of_a_load_only_the_rows_of_whole_pages_are_valid() -> None:
    pool = arena()
    pool.expect(ids(0), 0)
    pool.expect(ids(1), 2)
    pool.layout.positions(pool.memory)[pool.physical(ids(0, 1))] = np.arange(SIZE)
    pool.loaded(slots_of([2, 3]), ids(0, 1))
    pool.host_freed(ids(0, 1))
    assert pool.problem(slots_of([2])) is None
    assert pool.problem(slots_of([3])) == "rows not valid"


def test_memory_that_held_such_a_page_is_whole_again_after_a_backup() -> None:
    pool = arena()
    pool.expect(ids(0), 1)
    lacking = int(pool.physical(ids(0))[0])
    first = capture(pool, 2)
    pool.swap(first, ids(0))  # the lacking memory becomes the shadow of page 2
    assert pool.first_layers(ids(0)).tolist() == [0]
    assert pool.shadows[2] == lacking
    pool.allocated(first)
    second = capture(pool, 2)
    pool.swap(second, ids(3))
    assert int(pool.physical(ids(3))[0]) == lacking
    assert pool.first_layers(ids(3)).tolist() == [0]
    pool.check_integrity()
