"""The arena: what a backup, a load, a proof and a free do, one fact at a time."""

from typing import Any

import numpy as np
import pytest

from hcache_backend.arena import NO_NAMESPACE, NOT_ENCODABLE, Arena, Verdict
from tests.integrity import assert_sound_arena
from tests.unit.capture.small_arena import LAYOUT, NAMESPACE, SIZE, arena, ids, slots_of


def promised(a: Arena) -> tuple[np.ndarray, int]:
    """Slots of device page 2 whose rows are on their way, and the ticket of their proof."""
    slots = slots_of([2])
    return slots, a.begin_step(slots, np.arange(4), np.arange(4))


def test_rows_are_valid_from_the_promise_on_and_stamped_with_the_proof() -> None:
    a = arena()
    slots = slots_of([2])
    a.begin_step(slots, np.arange(4), np.arange(4), promised=False)
    assert a.problem(slots) == "rows not valid" and not a.none_lost
    slots, ticket = promised(a)
    assert a.problem(slots) is None and a.none_lost
    a.swap(slots, ids(0))
    page = a.memory[a.physical(ids(0))[0]]
    assert LAYOUT.namespace_of(page) == NO_NAMESPACE
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(page) == NAMESPACE
    assert a.problem(slots) == "rows backed up already"


def test_rows_that_do_not_fit_are_not_backed_up() -> None:
    a = arena()
    slots, ticket = promised(a)
    assert a.prove(slots, ticket, np.array([1, Verdict.UNFIT, 1, 1], np.uint8)) == (0, 1)
    assert a.problem(slots) == NOT_ENCODABLE and not a.none_lost
    assert a.prove(*promised(a), np.ones(4, np.uint8)) == (0, 0)
    assert a.problem(slots) is None and a.none_lost


@pytest.mark.parametrize("verdicts", [[1, 2, 1, 1], [1, 2, 0, 1]])
def test_a_page_whose_rows_are_found_unfit_after_its_backup_is_never_stamped(
    verdicts: list[int],
) -> None:
    """Also if another row is missing. Its tokens are not backed up again."""
    a = arena()
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    assert not a.settled(ids(0, 1)) and a.settled(ids(1)) and a.whole(ids(0)) is None
    a.prove(slots, ticket, np.array(verdicts, np.uint8))
    assert a.settled(ids(0)) and a.unfit(ids(0, 1)).tolist() == [True, False]
    assert a.whole(ids(0)) is False
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NO_NAMESPACE
    a.host_freed(ids(0))
    assert a.problem(slots) == "rows not valid"
    assert_sound_arena(a)


@pytest.mark.parametrize("again", ["read from L3", "backed up"])
def test_a_page_that_is_filled_anew_is_not_unfit_any_more(again: str) -> None:
    a = arena()
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    a.prove(slots, ticket, np.array([1, 2, 1, 1], np.uint8))
    a.host_dropped(ids(0))
    if again == "read from L3":
        a.expect(ids(0))
    else:
        slots, ticket = promised(a)
        a.swap(slots, ids(0))
        a.prove(slots, ticket, np.ones(4, np.uint8))
        assert a.whole(ids(0))
    assert not a.unfit(ids(0)).any()


@pytest.mark.parametrize("positions", [[1, 2, 3, 4], [0, 1, 3, 2], [4, 5, 6, 8]])
def test_positions_must_follow_each_other_from_a_page_boundary(positions: list[int]) -> None:
    a = arena()
    slots = slots_of([1])
    a.begin_step(slots, np.array(positions), np.arange(4))
    assert a.problem(slots) == "positions not consecutive"


def test_slots_that_are_no_whole_pages_are_refused() -> None:
    a = arena()
    slots, _ = promised(a)
    assert a.problem(slots[[1, 0, 2, 3]]) == "slots are not whole pages"


def test_the_memory_must_have_a_page_for_every_entry() -> None:
    memory = np.zeros((10, LAYOUT.stride), np.uint8)
    for host_pages, said in ((6, r"the arena needs \(11, "), (0, "0 host pages")):
        with pytest.raises(ValueError, match=said):
            Arena(memory, LAYOUT, host_pages, 5, lambda page: None)


# ---- unfit pages never pass for whole ones ----


def test_of_a_load_only_the_rows_of_whole_pages_are_valid() -> None:
    pool = arena()
    pool.expect(ids(0))
    pool.mark_unfit(ids(1))
    pool.layout.positions(pool.memory)[pool.physical(ids(0, 1))] = np.arange(SIZE)
    pool.loaded(slots_of([2, 3]), ids(0, 1))
    pool.host_freed(ids(0, 1))
    assert pool.problem(slots_of([2])) is None
    assert pool.problem(slots_of([3])) == "rows not valid"


def test_tokens_that_were_loaded_from_such_a_page_are_not_backed_up_from_it() -> None:
    pool = arena()
    pool.mark_unfit(ids(0))
    slots = slots_of([2])
    pool.loaded(slots, ids(0))
    assert pool.problem(slots) == "rows backed up already"
    pool.host_freed(ids(0))  # as write_back does while the tokens stay on the device
    assert pool.problem(slots) == "rows not valid"
    assert_sound_arena(pool)


@pytest.mark.parametrize("free", [Arena.host_freed, Arena.host_dropped])
def test_what_arrives_for_a_page_that_was_freed_meanwhile_is_of_no_interest(free: Any) -> None:
    a = arena()

    def expected() -> np.ndarray:
        """A host page whose rows are recomputed and on their way."""
        page = ids(0)
        a.mark_unfit(page)  # it held something else before
        a.recomputed(page, np.arange(SIZE), np.arange(SIZE))
        return page

    page = expected()
    free(a, page)
    assert a.settled(page)
    again = expected()
    a.mark_saved(page, np.array([False]))
    assert a.whole(again) is None and not a.unfit(again).any()
    a.mark_saved(again, np.array([False]))
    assert a.whole(again) is False
