"""Eager restores: what is reserved, launched, handed out and given back, one fact at a time."""

import numpy as np
import pytest
import torch

from hcache_backend.host.loads import Prepared
from hcache_backend.prefetch.reservations import EagerRestores
from hcache_backend.streams import StreamFailed
from tests.kit.prefetch import Restore
from tests.kit.turns import work
from tests.unit.restore.eager_device import DEVICE_PAGES, SIZE, Device, pages_of


class Scene:
    """Eager restores with a device of their own, and the restores that were launched."""

    def __init__(self, limit: int = DEVICE_PAGES, cached: int = 0) -> None:
        self.device = Device(cached)
        self.launched: list[tuple[list[int], Restore]] = []
        self.slice: Restore | None = None  # the last one
        self.problem: Exception | None = None  # of launches
        self.eager = EagerRestores(SIZE, self.device, self._launch, limit)  # type: ignore[arg-type]

    def _launch(self, host_pages: np.ndarray, slots: torch.Tensor) -> Restore:
        restore = Restore(pages_of(slots))
        restore.failed = self.problem
        self.launched.append((host_pages.tolist(), restore))
        self.device.writes(restore)
        return restore

    def recompute(self, *pages: int, failed: bool = False) -> Restore:
        """Recompute consecutive pages of the first prefetch."""
        due = range(pages[0], pages[-1] + 1)
        slots, before = (self.eager.slots("a", pages) for pages in (due, range(due.start)))
        restore = self.slice = Restore(pages_of(slots), pages_of(before), self.slice)
        restore.failed = RuntimeError("out of memory") if failed else None
        self.device.writes(restore)
        self.eager.mark_recomputed("a", due, restore)  # type: ignore[arg-type]
        return restore

    def begin(self, name: str, host: list[int], keys: list[str] | None = None) -> int:
        return self.eager.reserve(name, keys or [f"{name}{i}" for i in host], np.array(host))


def hand_out(scene: Scene, host: list[int]) -> Prepared:
    handed = scene.eager.hand_out(np.array(host))
    assert handed is not None
    return handed


def ready(scene: Scene, host: list[int]) -> list[bool]:
    return list(hand_out(scene, host).ready)


def test_pages_are_restored_once_as_they_arrive_and_handed_out_at_the_load() -> None:
    scene = Scene()
    assert scene.begin("a", [5, 6, 7, 8]) == 4
    assert [scene.eager.restore_arrived("a", range(n)) for n in (0, 2, 2, 3)] == [0, 2, 0, 1]
    assert [host for host, _ in scene.launched] == [[5, 6], [7]]
    handed = hand_out(scene, [6, 7, 8, 9])
    assert handed.ready.tolist() == [True, True, False, False]
    assert handed.restores == tuple(restore for _, restore in scene.launched)
    [(_, first), (_, second)] = scene.launched
    assert pages_of(handed.slots)[:2] == [first.pages[1], *second.pages]
    assert scene.eager.pages == 1  # page 5
    scene.eager.end("a")
    assert ready(scene, [5]) == [True]


def test_neighbours_are_handed_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut page by page, those of 128k tokens took the scheduler's thread 15 ms."""
    scene, parts, join = Scene(), list[int](), torch.cat
    scene.begin("a", [5, 6, 7, 8])
    scene.begin("b", [11, 12])

    def counted(tensors: list[torch.Tensor]) -> torch.Tensor:
        parts.extend(len(tensor) // SIZE for tensor in tensors)
        return join(tensors)

    monkeypatch.setattr(torch, "cat", counted)
    reserved = {page.host_page: page for page in scene.eager._reserved.values()}
    places = {
        host: pages_of(scene.eager._slots(page.reservation, range(page.number, page.number + 1)))
        for host, page in reserved.items()
    }
    handed = pages_of(hand_out(scene, [6, 7, 8, 1, 2, 12, 5, 11, 3]).slots)
    assert parts == [3, 2, 1, 1, 1, 1]
    for at, host in enumerate([6, 7, 8, 1, 2, 12, 5, 11, 3]):
        assert host not in places or handed[at] == places[host][0]
    assert len(set(handed)) == 9


def test_a_turn_looks_only_at_pages_that_have_arrived() -> None:
    found = set()
    for pages in (4, DEVICE_PAGES):
        scene = Scene()
        assert scene.begin("a", [*range(pages)]) == pages
        found.add(work(lambda scene=scene: scene.eager.restore_arrived("a", range(0))))  # type: ignore[misc]
    assert len(found) == 1, found


def test_what_is_reserved_is_there_for_everybody_unlaunched_and_new_pages_first() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2])
    scene.begin("b", [3, 4, 5])
    scene.eager.restore_arrived("a", range(3))
    scene.eager.restore_arrived("b", range(1))
    scene.eager.make_free(DEVICE_PAGES - 4)
    assert scene.eager.pages == 4
    assert not any(restore.is_done for _, restore in scene.launched)  # nobody had to wait
    scene.eager.make_free(DEVICE_PAGES - 3)
    assert scene.launched[0][1].is_done
    scene.eager.end("b")
    assert ready(scene, [0, 1, 2, 3]) == [True, True, False, True]


def test_who_frees_host_pages_waits_for_their_copies_and_for_no_more() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2])
    scene.eager.restore_arrived("a", range(1))
    scene.eager.restore_arrived("a", range(3))
    [(_, first), (_, second)] = scene.launched
    scene.eager._give_back = lambda places: None  # type: ignore[method-assign]
    scene.eager.host_freed(np.array([1]))
    assert (second.read_host, second.is_done) == (True, False)
    assert not first.read_host


def test_two_prefetches_of_the_same_pages_restore_them_once() -> None:
    scene = Scene()
    assert scene.begin("a", [0, 1], ["x", "y"]) == 2
    assert scene.begin("b", [2, 3, 4], ["x", "y", "z"]) == 1
    scene.eager.restore_arrived("b", range(3))
    assert [host for host, _ in scene.launched] == [[4]]


def test_no_more_than_the_limit_and_leftovers_make_room() -> None:
    scene = Scene(limit=3)
    assert scene.begin("a", [0, 1, 2, 3]) == 3
    assert scene.begin("b", [4, 5]) == 0
    scene.eager.restore_arrived("a", range(4))
    scene.eager.end("a")
    scene.eager.end("b")
    assert scene.eager.pages == 3
    assert scene.begin("c", [6, 7]) == 2
    assert ready(scene, [0, 1, 2]) == [True, False, False]


def test_the_device_cache_makes_room_for_what_may_be_reserved() -> None:
    scene = Scene(limit=5, cached=DEVICE_PAGES - 1)
    assert scene.begin("a", list(range(8))) == 5
    assert len(scene.device.cached) == DEVICE_PAGES - 5


def test_a_restore_that_failed_is_waited_for_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(restore: Restore) -> None:
        restore.is_done = True
        raise StreamFailed("no such weights")

    monkeypatch.setattr(Restore, "wait", fail)
    scene = Scene()
    scene.begin("a", [0])
    scene.eager.restore_arrived("a", range(1))
    scene.eager.give_all_back()
    assert scene.device.count() == DEVICE_PAGES


def test_a_launch_that_fails_counts_as_one_and_no_load_may_get_its_pages() -> None:
    """Other ranks do not know of it: device pages are free, or not, as they are there."""
    fine, scene = Scene(), Scene()
    for one in (fine, scene):
        one.problem = RuntimeError("out of memory") if one is scene else None
        one.begin("a", [0, 1, 2, 3])
        one.begin("b", [4, 5])
        assert one.eager.restore_arrived("a", range(2)) == 2
        one.problem = None
        assert one.eager.restore_arrived("a", range(4)) == 2
        assert one.eager.restore_arrived("b", range(2)) == 2
        assert one.eager.end("a") == 0
        assert one.eager.ready_pages(np.arange(6)).all()
    failed = [scene.eager.any_failed(np.array(pages)) for pages in ([1, 7], [3], [4, 5], [6])]
    assert failed == [True, True, False, False]
    assert not fine.eager.any_failed(np.arange(6))
    scene.eager.host_freed(np.arange(4))
    assert not scene.eager.any_failed(np.arange(6))
    assert all(restore.is_done for _, restore in scene.launched[:2])
    assert scene.device.count() == DEVICE_PAGES - 2


def test_pages_of_a_slice_that_failed_wait_for_it_though_fewer_are_tried_again() -> None:
    scene = Scene()
    scene.begin("a", [0, 1])
    failed = scene.recompute(0, 1, failed=True)  # it may have written both
    scene.recompute(0)
    scene.eager.host_freed(np.array([1]))
    assert failed.is_done


def test_a_load_writes_pages_behind_a_slice_of_them_that_failed() -> None:
    """It launched some layers, perhaps, and then the page came from L3 after all."""
    scene = Scene()
    scene.begin("a", [0, 1])
    failed = scene.recompute(0, 1, failed=True)
    assert ready(scene, [0]) == [False]
    assert failed.is_done


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_nothing_is_recomputed_behind_a_page_that_was_taken_away(taken: int) -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2, 3])
    for page in range(2):
        scene.recompute(page)
    assert scene.eager.reachable("a", 2) == 4
    scene.eager.host_freed(np.array([taken]))
    assert scene.eager.reachable("a", 2) == (2 if taken == 2 else 0)
