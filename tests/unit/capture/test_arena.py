"""The arena, one fact at a time; test_arena_scheduler.py has backups, loads and frees."""

import numpy as np
import pytest

from hcache_backend.arena import NOT_ENCODABLE, Arena, RowState
from tests.unit.capture.small_arena import LAYOUT, arena, ids, slots_of


def promised(a: Arena) -> tuple[np.ndarray, int]:
    """Slots of device page 2 whose rows are on their way, and the ticket of their proof."""
    slots = slots_of([2])
    return slots, a.begin_step(slots, np.arange(4), np.arange(4))


def test_rows_that_do_not_fit_are_not_backed_up() -> None:
    a = arena()
    slots, ticket = promised(a)
    assert a.end_step(slots, ticket, np.array([1, RowState.UNFIT, 1, 1], np.uint8)) == (0, 1)
    assert a.problem(slots) == NOT_ENCODABLE and not a.none_lost
    assert a.end_step(*promised(a), np.ones(4, np.uint8)) == (0, 0)
    assert a.problem(slots) is None and a.none_lost


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
            Arena(memory, LAYOUT, host_pages, 5)


def test_a_thread_that_reads_pages_leaves_the_clock_of_rows_alone() -> None:
    """Of two threads that set it forward, the scheduler would lose the proof of a step."""
    a = arena()
    before = a._clock
    a.settle(ids(0, 1), a.expect(ids(0, 1)))
    assert a.usable(ids(0, 1)) and a._clock == before


def test_a_load_that_is_known_late_gives_no_rows_of_pages_that_were_freed() -> None:
    """They have the tokens of another node by then."""
    a, slots = arena(), slots_of([1, 2])
    a.settle(ids(0, 1), a.expect(ids(0, 1)))
    before = a.tickets(ids(0, 1))
    a.free(ids(1))
    a.settle(ids(1), a.expect(ids(1)))
    a.note_loaded(slots, ids(0, 1), before)
    assert a.problem(slots_of([1])) == "rows backed up already"
    assert a.problem(slots_of([2])) == "rows not valid"


def test_what_nobody_expects_is_not_settled() -> None:
    """Rows of a backup did not come: its K and V are copied all the same."""
    a = arena()
    a.expect(ids(0))
    a.free(ids(0))
    assert a.settle(ids(0), a.tickets(ids(0)), np.array([False])).tolist() == []
    assert a.usable(ids(0)) is False and not a.unfit(ids(0)).any()


def test_rows_that_come_no_more_are_not_waited_for() -> None:
    a = arena()
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    a.note_allocated(slots[:1])
    assert a.usable(ids(0)) is False
    a.end_step(slots, ticket, np.ones(4, np.uint8))
    assert a.usable(ids(0)) is False


@pytest.mark.parametrize("proven", [False, True])
def test_a_shadow_that_an_earlier_step_may_still_write_goes_to_no_host_page(proven: bool) -> None:
    """Its request was retracted, and a load got the slots. HiCache frees the host copy."""
    a = arena()
    slots, ticket = promised(a)
    shadow = a.shadows[2]
    a.note_allocated(slots)
    a.settle(ids(0), a.expect_recomputed(ids(0), np.arange(4), np.arange(4)))
    a.note_loaded(slots, ids(0), a.tickets(ids(0)))
    if proven:
        a.end_step(slots, ticket, np.ones(4, np.uint8))
    a.take_back(ids(0))
    assert (a.physical(ids(0)) == shadow).item() == proven
    assert a.problem(slots) == (None if proven else "rows not valid")
