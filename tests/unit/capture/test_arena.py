"""The arena: what a backup, a load, a proof and a free do, one fact at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hcache_backend.capture.shadows import NO_NAMESPACE, ShadowArena, Verdict
from tests.integrity import assert_sound_arena
from tests.unit.capture.small_arena import (
    LAYOUT,
    NAMESPACE,
    SIZE,
    WRITER,
    arena,
    ids,
    slots_of,
)


def captured(a: ShadowArena, pages: list[int], first: int = 0) -> np.ndarray:
    slots = slots_of(pages)
    positions = np.arange(first, first + len(slots))
    ticket = a.begin(slots, positions, positions + 500)
    assert a.prove(slots, ticket, np.ones(len(slots), np.uint8)) == (0, 0)
    return slots


def promised(a: ShadowArena) -> tuple[np.ndarray, int]:
    """Slots of device page 2 whose rows are on their way, and the ticket of their proof."""
    slots = slots_of([2])
    return slots, a.begin(slots, np.arange(4), np.arange(4))


def test_a_backup_exchanges_table_entries() -> None:
    a = arena()
    slots = captured(a, [1, 3])
    shadows = a.shadows[[1, 3]]
    changes = a.swap(slots, ids(2, 0))
    assert a.physical(ids(2, 0)).tolist() == shadows.tolist()
    assert changes.device_pages.tolist() == [1, 3]
    assert a.shadows[[1, 3]].tolist() == changes.physical.tolist() == [2, 0]


def test_rows_are_valid_from_the_promise_on_and_stamped_with_the_proof() -> None:
    a = arena()
    slots = slots_of([2])
    a.begin(slots, np.arange(4), np.arange(4), promised=False)
    assert a.problem(slots) == "rows not valid" and not a.none_lost
    slots, ticket = promised(a)
    assert a.problem(slots) is None and a.none_lost
    a.swap(slots, ids(0))
    page = a.memory[a.physical(ids(0))[0]]
    assert LAYOUT.namespace_of(page) == NO_NAMESPACE
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(page) == NAMESPACE
    assert a.problem(slots) == "rows backed up already"


@pytest.mark.parametrize(("verdict", "lost"), [(Verdict.MISSING, (1, 0)), (Verdict.UNFIT, (0, 1))])
def test_a_page_with_a_row_that_was_not_written_is_never_stamped(
    verdict: int, lost: tuple[int, int]
) -> None:
    a = arena()
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    assert a.prove(slots, ticket, np.array([1, 1, verdict, 1], np.uint8)) == lost
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NO_NAMESPACE


def test_rows_that_the_codec_cannot_hold_are_told_apart_from_missing_ones() -> None:
    a = arena()
    slots, ticket = promised(a)
    a.prove(slots, ticket, np.array([1, 2, 0, 1], np.uint8))
    assert a.problem(slots) == "rows not encodable"
    captured(a, [2])
    assert a.problem(slots) is None


def test_an_unfit_page_is_kept_and_never_counts_as_whole() -> None:
    a = arena(keeps_unfit=True)
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    page = a.memory[a.physical(ids(0))[0]]
    a.prove(slots[:2], ticket, np.array([1, Verdict.UNFIT], np.uint8))
    assert a.waits_for_proof(ids(0)) and a.whole(ids(0)) is None  # two rows are on their way
    assert a.prove(slots[2:], ticket, np.ones(2, np.uint8)) == (0, 0)
    assert LAYOUT.namespace_of(page) == NAMESPACE and a.none_lost
    assert a.lost(ids(0, 1)).tolist() == [True, False] and a.whole(ids(0)) is False


def test_an_unfit_page_that_lost_a_row_as_well_is_never_stamped() -> None:
    a = arena(keeps_unfit=True)
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    assert a.prove(slots, ticket, np.array([1, 2, 0, 1], np.uint8)) == (1, 1)
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NO_NAMESPACE
    assert not a.none_lost and not a.whole(ids(0))


@pytest.mark.parametrize("on_the_device", [True, False])
def test_what_is_unfit_stays_so_in_every_later_backup(on_the_device: bool) -> None:
    """Whether the host page is freed while its tokens are on the device, or they are loaded to
    other slots first."""
    a = arena(keeps_unfit=True)
    slots, ticket = promised(a)
    a.prove(slots, ticket, np.array([1, 2, 1, 1], np.uint8))
    assert a.problem(slots) is None and a.unfit_rows(slots).any()
    a.swap(slots, ids(0))
    if not on_the_device:
        slots = slots_of([3])
        a.allocated(slots)
        a.loaded(slots, ids(0))
    a.host_freed(ids(0))
    assert a.problem(slots) is None and a.unfit_rows(slots).any()
    a.swap(slots, ids(4))
    assert a.lost(ids(4)).all() and not a.whole(ids(4))
    assert_sound_arena(a)


def test_a_recomputed_page_of_which_nothing_is_there_still_says_which_tokens_it_is_of() -> None:
    """A load goes by that to recompute them; and by its namespace."""
    a = arena()
    pages = expected(a, 3)
    a.arrived(pages, np.array([False]))
    page = a.memory[a.physical(pages)[0]]
    assert LAYOUT.namespace_of(page) == NAMESPACE
    assert LAYOUT.token_ids(page).tolist() == [500, 501, 502, 503]
    assert a.lost(pages).all() and a.whole(pages) is False


def test_a_page_that_is_filled_anew_or_read_from_l3_is_not_unfit_any_more() -> None:
    a = arena(keeps_unfit=True)
    slots, ticket = promised(a)
    a.prove(slots, ticket, np.array([1, 2, 1, 1], np.uint8))
    a.swap(slots, ids(0))
    a.host_dropped(ids(0))
    a.expect(ids(0))
    assert not a.lost(ids(0)).any()
    captured(a, [2])
    a.swap(slots, ids(1))
    assert not a.lost(ids(1)).any() and a.whole(ids(1))


def test_the_proof_of_an_older_allocation_counts_for_nothing() -> None:
    a = arena()
    slots, ticket = promised(a)
    a.allocated(slots[2:3])
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert a.problem(slots) == "rows not valid"


def test_the_proof_of_an_older_allocation_is_no_proof_of_the_newer_one() -> None:
    a = arena()
    slots = slots_of([2])
    old = a.begin(slots, np.arange(4), np.arange(4))
    new = a.begin(slots, np.arange(4), np.arange(4))
    a.swap(slots, ids(0))
    a.prove(slots, old, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NO_NAMESPACE
    a.prove(slots, new, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NAMESPACE


def test_a_freed_host_page_gives_nothing_to_the_next_owner_of_its_device_page() -> None:
    a = arena()
    a.swap(captured(a, [2]), ids(0))
    captured(a, [2], first=64)
    shadow = a.shadows[2]
    assert len(a.host_freed(ids(0)).device_pages) == 0
    assert a.shadows[2] == shadow


def test_a_host_page_that_is_freed_before_the_proof_leaves_no_valid_rows() -> None:
    a = arena()
    slots, ticket = promised(a)
    a.swap(slots, ids(0))
    assert len(a.host_freed(ids(0)).device_pages) == 0
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert a.problem(slots) == "rows not valid"


@pytest.mark.parametrize("positions", [[1, 2, 3, 4], [0, 1, 3, 2], [4, 5, 6, 8]])
def test_positions_must_follow_each_other_from_a_page_boundary(positions: list[int]) -> None:
    a = arena()
    slots = slots_of([1])
    a.begin(slots, np.array(positions), np.arange(4))
    assert a.problem(slots) == "positions not consecutive"


def test_slots_that_are_no_whole_pages_are_refused() -> None:
    a = arena()
    captured(a, [1, 2])
    assert a.problem(np.array([5, 4, 6, 7])) == "slots are not whole pages"


def test_the_memory_must_have_a_page_for_every_entry() -> None:
    with pytest.raises(ValueError, match=r"the arena needs \(11, "):
        ShadowArena(np.zeros((10, LAYOUT.page_bytes), np.uint8), LAYOUT, 6, 5, lambda page: None)


# ---- lost pages never pass for whole ones ----


def test_tokens_that_were_loaded_from_such_a_page_are_not_backed_up_from_it() -> None:
    pool = arena()
    pool.lose(ids(0))
    slots = slots_of([2])
    pool.loaded(slots, ids(0))
    assert pool.problem(slots) == "rows not encodable"
    pool.host_freed(ids(0))  # as write_back does while the tokens stay on the device
    assert pool.problem(slots) == "rows not valid"
    assert_sound_arena(pool)


def test_of_a_load_only_the_rows_of_whole_pages_are_valid() -> None:
    pool = arena()
    pool.expect(ids(0))
    pool.lose(ids(1))
    pool.layout.positions(pool.memory)[pool.physical(ids(0, 1))] = np.arange(SIZE)
    pool.loaded(slots_of([2, 3]), ids(0, 1))
    pool.host_freed(ids(0, 1))
    assert pool.problem(slots_of([2])) is None
    assert pool.problem(slots_of([3])) == "rows not valid"


def test_memory_that_held_such_a_page_is_whole_again_after_a_backup() -> None:
    pool = arena()
    pool.lose(ids(0))
    lacking = int(pool.physical(ids(0))[0])
    first = captured(pool, [2])
    pool.swap(first, ids(0))  # the lacking memory becomes the shadow of page 2
    assert not pool.lost(ids(0)).any()
    assert pool.shadows[2] == lacking
    pool.allocated(first)
    second = captured(pool, [2])
    pool.swap(second, ids(3))
    assert int(pool.physical(ids(3))[0]) == lacking
    assert not pool.lost(ids(3)).any()
    assert_sound_arena(pool)


def expected(a: ShadowArena, *host_pages: int) -> np.ndarray:
    """Host pages whose rows were recomputed and are on their way, of tokens from position 0 on."""
    pages = ids(*host_pages)
    a.lose(pages)  # they held something else before
    positions = np.arange(len(pages) * SIZE)
    a.recomputed(pages, positions, positions + 500)
    return pages


def test_recomputed_rows_count_once_they_are_there() -> None:
    a = arena()
    pages = expected(a, 3, 1)
    assert a.waits_for_proof(ids(1)) and a.whole(pages) is None
    assert not a.lost(pages).any()
    a.arrived(pages, np.array([True, True]))
    assert a.whole(pages)
    second = a.memory[a.physical(ids(1))[0]]
    assert LAYOUT.namespace_of(second) == NAMESPACE
    assert LAYOUT.positions(second).tolist() == [4, 5, 6, 7]
    assert LAYOUT.token_ids(second).tolist() == [504, 505, 506, 507]


@pytest.mark.parametrize("loaded_before", [False, True])
def test_recomputed_rows_that_the_codec_cannot_hold_are_lost(loaded_before: bool) -> None:
    """No good rows are taken from them, whenever their tokens came to the device."""
    a = arena()
    pages, slots = expected(a, 0, 1), slots_of([2, 3])
    if loaded_before:
        a.loaded(slots, pages)
    a.arrived(pages, np.array([True, False]))
    if not loaded_before:
        a.loaded(slots, pages)
    assert a.whole(ids(0)) and a.whole(ids(1)) is False
    assert a.lost(pages).tolist() == [False, True]
    a.host_freed(pages)  # while their tokens are on the device
    assert a.problem(slots[:SIZE]) is None
    assert a.problem(slots[SIZE:]) == "rows not valid"
    assert_sound_arena(a)


@pytest.mark.parametrize("freed", ["freed", "dropped", "all"])
def test_what_arrives_for_a_page_that_was_freed_meanwhile_is_of_no_interest(freed: str) -> None:
    a = arena()
    pages = expected(a, 0)
    if freed == "all":
        a.clear()
    else:
        (a.host_freed if freed == "freed" else a.host_dropped)(pages)
    assert not a.waits_for_proof(pages)
    again = expected(a, 0)
    a.arrived(pages, np.array([False]))
    assert a.whole(again) is None and not a.lost(again).any()
    a.arrived(again, np.array([False]))
    assert a.whole(again) is False


def test_a_recomputed_page_was_not_sealed_before() -> None:
    """What it held is not taken for it: its header is blank until its rows are there."""
    a = arena()
    LAYOUT.stamp(a.memory[a.physical(ids(0))[0]], NAMESPACE, WRITER)
    expected(a, 0)
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NO_NAMESPACE
