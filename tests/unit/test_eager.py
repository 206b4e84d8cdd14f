"""Eager restores: a scripted scheduler plays every interleaving, and the rules hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hcache_backend.restore.eager import EagerRestores, HandOut
from hcache_backend.restore.reservation import Launched
from hcache_backend.streams import StreamFailed

SIZE, DEVICE_PAGES, HOST_PAGES = 2, 12, 24


class Restore:
    """A restore that ends when somebody waits for it, and not before."""

    def __init__(self, pages: list[int], reads: list[int] | None = None) -> None:
        self.pages = pages
        self.reads = reads or []  # device pages from which it recomputes
        self.done = False

    def wait_for_layer(self, layer: int) -> None:
        self.done = True

    def wait(self) -> None:
        self.done = True


class Device:
    """Free pages, and what is being written to every page."""

    def __init__(self, cached: int = 0) -> None:
        self.free = list(range(DEVICE_PAGES - cached))
        self.cached = list(range(DEVICE_PAGES - cached, DEVICE_PAGES))
        self.writers: dict[int, Restore] = {}
        self.readers: list[Restore] = []
        self.made: dict[int, tuple[int, int]] = {}  # of which host page, and which content of it
        self.whole: set[int] = set()  # those that lack no layer

    def count(self) -> int:
        return len(self.free)

    def make_room(self, pages: int) -> None:
        while self.cached and len(self.free) < pages:
            self.free.append(self.cached.pop())

    def take(self, pages: int) -> torch.Tensor:
        assert 0 < pages <= len(self.free)
        taken, self.free = self.free[:pages], self.free[pages:]
        return slots_of(taken)

    def give(self, slots: torch.Tensor) -> None:
        pages = pages_of(slots)
        assert not set(pages) & set(self.free)
        for page in pages:
            assert page not in self.writers or self.writers[page].done, "still written"
            self.made.pop(page, None)
            self.whole.discard(page)
        assert not set(pages) & self.being_read(), "still read"
        self.free += pages

    def being_read(self) -> set[int]:
        return {page for reader in self.readers if not reader.done for page in reader.reads}


def slots_of(pages: list[int]) -> torch.Tensor:
    slots = [SIZE * page + i for page in pages for i in range(SIZE)]
    return torch.tensor(slots, dtype=torch.int64)


def pages_of(slots: torch.Tensor) -> list[int]:
    pages = [int(slot) // SIZE for slot in slots[::SIZE]]
    assert torch.equal(slots, slots_of(pages)), "slots are not whole pages"
    return pages


class Prefetch:
    def __init__(self, keys: list[str], host: list[int]) -> None:
        self.keys, self.host, self.arrived = keys, host, 0


class ScriptedScheduler(RuleBasedStateMachine):
    """HiCache as far as eager restores see it: prefetches, a tree of host pages, an allocator."""

    @initialize(limit=st.integers(1, DEVICE_PAGES), cached=st.integers(0, DEVICE_PAGES))
    def start(self, limit: int, cached: int) -> None:
        self.device = Device(cached)
        self.eager = EagerRestores(SIZE, self.device, self.launch, limit)
        self.host_free = list(range(HOST_PAGES))
        self.content = Counter[int]()  # what a host page holds: a number that grows
        self.readable: set[int] = set()  # host pages whose content has arrived
        self.running: dict[Hashable, Prefetch] = {}
        self.recomputes: dict[Hashable, bool] = {}  # whether what is before it is on the device
        self.stale: list[list[int]] = []  # host pages of ended prefetches, not freed yet
        self.tree: list[int] = []
        self.used: list[int] = []
        self.number = 0

    def launch(
        self,
        prefetch: Hashable,
        host_pages: np.ndarray,
        slots: torch.Tensor,
        before: torch.Tensor | None,
    ) -> Launched:
        pages = pages_of(slots)
        recomputes = before is not None and self.recomputes[prefetch]
        restore = Restore(pages, pages_of(before) if recomputes and before is not None else [])
        self.device.readers.append(restore)
        host = self.running[prefetch].host
        at = host.index(int(host_pages[0]))
        assert host[at : at + len(pages)] == host_pages.tolist()
        if before is not None:
            sources = [self.device.made.get(page) for page in pages_of(before)]
            assert sources == [(page, self.content[page]) for page in host[:at]], "of other pages"
            assert set(pages_of(before)) <= self.device.whole, "they lack layers themselves"
        for page, host in zip(pages, host_pages.tolist(), strict=True):
            assert page not in self.device.free and page not in self.used
            assert host in self.readable, "launched before it arrived"
            assert page not in self.device.made, "launched twice"
            self.device.made[page] = host, self.content[host]
            self.device.writers[page] = restore
        if recomputes:
            self.device.whole.update(pages)
        return Launched(restore, recomputes, recomputes)

    # ---- prefetches ----

    @rule(pages=st.integers(1, 8), prefix=st.integers(0, 3), recomputes=st.booleans())
    def begin(self, pages: int, prefix: int, recomputes: bool = True) -> None:
        if len(self.host_free) < pages:
            return
        host, self.host_free = self.host_free[:pages], self.host_free[pages:]
        for page in host:
            self.content[page] += 1
        self.number += 1
        keys = [f"{0 if i < prefix else self.number}/{i}" for i in range(pages)]
        self.running[self.number] = Prefetch(keys, host)
        self.recomputes[self.number] = recomputes
        before = self.eager.pages
        reserved = self.eager.reserve(self.number, keys, np.array(host))
        assert reserved <= pages and self.eager.pages <= max(before, self.eager._limit)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def arrive(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        prefetch = self.running[number]
        prefetch.arrived = data.draw(st.integers(prefetch.arrived, len(prefetch.host)))
        self.readable.update(prefetch.host[: prefetch.arrived])
        self.eager.arrived(number, prefetch.arrived)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), polled=st.booleans())
    def end_with_a_usable_prefix(self, data: Any, polled: bool) -> None:
        """Complete, best effort, timeout, a bad page: some are inserted, some of those dropped."""
        number = data.draw(st.sampled_from(sorted(self.running)))
        prefetch = self.running.pop(number)
        # The last batch arrives together with the end: nothing is launched for it.
        prefetch.arrived = data.draw(st.integers(prefetch.arrived, len(prefetch.host)))
        self.readable.update(prefetch.host[: prefetch.arrived])
        known = data.draw(st.integers(0, prefetch.arrived))  # the tree had them already
        self.tree = prefetch.host[known : prefetch.arrived] + self.tree
        self.stale.append(prefetch.host[prefetch.arrived :])
        if polled:
            self.eager.end(number)
        self.free_host(prefetch.host[:known])
        if not polled:
            self.load(data)
            self.eager.end(number)

    @rule(pages=st.integers(1, 6), data=st.data())
    def whole_prefetch(self, pages: int, data: Any) -> None:
        """The usual case: all pages arrive, in two batches, and the request is admitted."""
        if len(self.host_free) < pages:
            return
        self.begin(pages, 0)
        host = self.running[self.number].host
        for arrived in (pages // 2, pages):
            self.running[self.number].arrived = arrived
            self.readable.update(host[:arrived])
            self.eager.arrived(self.number, arrived)
        del self.running[self.number]
        self.eager.end(self.number)
        self.tree = host + self.tree
        self.load(data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.stale.append(self.running.pop(number).host)
        self.eager.end(number)

    @precondition(lambda self: self.stale)
    @rule()
    def release(self) -> None:
        self.free_host(self.stale.pop(0))

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def evict_from_host(self, data: Any) -> None:
        start = data.draw(st.integers(0, len(self.tree) - 1))
        pages = self.tree[start : start + 3]
        self.tree = self.tree[:start] + self.tree[start + 3 :]
        self.free_host(pages)

    def free_host(self, pages: list[int]) -> None:
        self.eager.host_freed(np.array(pages, dtype=np.int64))
        self.readable.difference_update(pages)
        self.host_free += pages

    # ---- the device ----

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        """One request, or another one with the same nodes, or a part of a split node."""
        if not self.tree:
            return
        start = data.draw(st.integers(0, len(self.tree) - 1))
        host = self.tree[start : start + data.draw(st.integers(1, 8))]
        free, reserved = self.device.count(), self.eager.pages
        handed: HandOut | None = self.eager.hand_out(np.array(host))
        if handed is None:
            assert len(host) > free + reserved
            assert (self.device.count(), self.eager.pages) == (free, reserved)
            return
        pages = pages_of(handed.slots)
        assert len(set(pages)) == len(pages) == len(host)
        assert not set(pages) & (set(self.device.free) | set(self.used))
        writers = {id(restore) for restore in handed.restores}
        assert {page for page, whole in zip(pages, handed.whole, strict=True) if whole} == (
            set(pages) & self.device.whole
        )
        assert not handed.whole[~handed.ready].any()
        for reader in self.device.readers:
            if not reader.done and set(reader.reads) & set(pages):
                assert id(reader) in writers, "nobody waits for who reads it"
        self.device.whole.difference_update(pages)
        for page, ready, source in zip(pages, handed.ready, host, strict=True):
            if ready:
                assert self.device.made.pop(page) == (source, self.content[source]), (
                    "of another page"
                )
                assert id(self.device.writers[page]) in writers, "nobody waits for it"
            else:
                writer = self.device.writers.get(page)
                assert writer is None or writer.done, "others still write it"
        self.used += pages

    @rule(pages=st.integers(1, 6))
    def allocate(self, pages: int) -> None:
        """Pressure: what is reserved counts as free."""
        there = self.device.count() + self.eager.pages
        self.eager.make_free(pages)
        assert self.device.count() >= min(pages, there)
        if self.device.count() >= pages:
            self.used += pages_of(self.device.take(pages))

    @precondition(lambda self: self.used)
    @rule(pages=st.integers(1, 6))
    def free(self, pages: int) -> None:
        freed, self.used = self.used[:pages], self.used[pages:]
        for page in freed:  # the engine frees behind its own work, which waited for the restore
            if page in self.device.writers:
                self.device.writers[page].done = True
            for reader in self.device.readers:
                reader.done = reader.done or page in reader.reads
        self.device.give(slots_of(freed))

    @rule()
    def new_weights(self) -> None:
        self.eager.clear()
        assert self.eager.pages == 0

    @rule()
    def flush(self) -> None:
        self.eager.all_freed()
        assert all(
            writer.done for page, writer in self.device.writers.items() if page in self.device.made
        )
        assert self.device.being_read() <= set(self.used)
        for number in sorted(self.running):
            self.eager.end(number)
        self.device.free, self.device.cached = list(range(DEVICE_PAGES)), []
        self.device.made, self.used, self.device.writers = {}, [], {}
        self.device.readers, self.device.whole = [], set()
        self.running, self.stale, self.tree, self.readable = {}, [], [], set()
        self.host_free = list(range(HOST_PAGES))

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "eager"):
            return
        self.eager.check_integrity()
        device = self.device
        assert device.count() + len(device.cached) + len(self.used) + self.eager.pages == (
            DEVICE_PAGES
        )
        assert sorted(self.eager.running()) == sorted(self.running)
        held = set(self.eager._places)
        coming = {page for prefetch in self.running.values() for page in prefetch.host}
        assert held <= self.readable | coming, "reserved for pages that nobody will load"


ScriptedScheduler.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestScriptedScheduler = ScriptedScheduler.TestCase


class Scene:
    """Eager restores with a device of their own, and the restores that were launched."""

    def __init__(self, limit: int = DEVICE_PAGES, cached: int = 0, lack: int = 0) -> None:
        self.device = Device(cached)
        self.launched: list[tuple[list[int], Restore]] = []
        self.lack = lack  # of so many launches first layers cannot be recomputed
        self.eager = EagerRestores(SIZE, self.device, self._launch, limit)

    def _launch(
        self,
        prefetch: Hashable,
        host_pages: np.ndarray,
        slots: torch.Tensor,
        before: torch.Tensor | None,
    ) -> Launched:
        whole = before is not None and len(self.launched) >= self.lack
        restore = Restore(pages_of(slots), pages_of(before) if before is not None else [])
        self.launched.append((host_pages.tolist(), restore))
        self.device.writers.update(dict.fromkeys(restore.pages, restore))
        return Launched(restore, whole, whole)

    def begin(self, name: str, host: list[int], keys: list[str] | None = None) -> int:
        return self.eager.reserve(name, keys or [f"{name}{i}" for i in host], np.array(host))


def hand_out(scene: Scene, host: list[int]) -> HandOut:
    handed = scene.eager.hand_out(np.array(host))
    assert handed is not None
    return handed


def ready(scene: Scene, host: list[int]) -> list[bool]:
    return list(hand_out(scene, host).ready)


def whole(scene: Scene, host: list[int]) -> list[bool]:
    return list(hand_out(scene, host).whole)


def test_pages_are_restored_once_as_they_arrive_and_handed_out_at_the_load() -> None:
    scene = Scene()
    assert scene.begin("a", [5, 6, 7, 8]) == 4
    assert [scene.eager.arrived("a", n) for n in (0, 2, 2, 3)] == [0, 2, 0, 1]
    assert [host for host, _ in scene.launched] == [[5, 6], [7]]
    handed = scene.eager.hand_out(np.array([6, 7, 8, 9]))
    assert handed is not None
    assert handed.ready.tolist() == [True, True, False, False]
    assert handed.restores == tuple(restore for _, restore in scene.launched)
    assert pages_of(handed.slots)[:2] == [
        scene.launched[0][1].pages[1],
        *scene.launched[1][1].pages,
    ]
    assert scene.eager.pages == 1  # page 5


def test_what_is_reserved_is_there_for_everybody_unlaunched_and_new_pages_first() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2])
    scene.begin("b", [3, 4, 5])
    scene.eager.arrived("a", 3)
    scene.eager.arrived("b", 1)
    scene.eager.make_free(DEVICE_PAGES - 4)
    assert scene.eager.pages == 4
    assert not any(restore.done for _, restore in scene.launched)  # nobody had to wait
    scene.eager.make_free(DEVICE_PAGES - 3)
    assert scene.launched[0][1].done
    scene.eager.end("b")
    assert ready(scene, [0, 1, 2, 3]) == [True, True, False, True]


def test_nothing_is_launched_into_pages_that_were_given_back() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2])
    scene.eager.make_free(DEVICE_PAGES - 1)
    scene.eager.arrived("a", 3)
    assert [host for host, _ in scene.launched] == [[0]]


def test_an_ended_prefetch_gives_back_what_did_not_arrive_and_keeps_the_rest() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2])
    scene.eager.arrived("a", 2)
    assert scene.eager.end("a") == 1
    assert scene.eager.pages == 2
    scene.eager.host_freed(np.array([0, 2]))
    assert scene.eager.pages == 1
    assert ready(scene, [1]) == [True]


def test_two_prefetches_of_the_same_pages_restore_them_once() -> None:
    scene = Scene()
    assert scene.begin("a", [0, 1], ["x", "y"]) == 2
    assert scene.begin("b", [2, 3, 4], ["x", "y", "z"]) == 1
    scene.eager.arrived("b", 3)
    assert [host for host, _ in scene.launched] == [[4]]


def test_no_more_than_the_limit_and_leftovers_make_room() -> None:
    scene = Scene(limit=3)
    assert scene.begin("a", [0, 1, 2, 3]) == 3
    assert scene.begin("b", [4, 5]) == 0
    scene.eager.arrived("a", 4)
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
    scene = Scene()
    scene.begin("a", [0])
    scene.eager.arrived("a", 1)

    def fail(restore: Restore) -> None:
        restore.done = True
        raise StreamFailed("no such weights")

    monkeypatch.setattr(Restore, "wait", fail)
    scene.eager.clear()
    assert scene.device.count() == DEVICE_PAGES


def test_first_layers_are_recomputed_behind_pages_that_lack_none() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2, 3])
    scene.eager.arrived("a", 1)
    scene.eager.arrived("a", 3)
    [(_, first), (_, second)] = scene.launched
    assert (first.reads, second.reads) == ([], first.pages)
    assert whole(scene, [0, 1, 2, 3]) == [True, True, True, False]


def test_nothing_is_recomputed_behind_a_page_that_lacks_layers_or_is_somebody_elses() -> None:
    scene = Scene(lack=1)
    scene.begin("a", [0, 1], ["x", "y"])
    scene.begin("b", [2, 3, 4], ["x", "y", "z"])
    for prefetch, pages in (("a", 1), ("a", 2), ("b", 3)):
        scene.eager.arrived(prefetch, pages)
    assert [restore.reads for _, restore in scene.launched] == [[], [], []]
    assert whole(scene, [0, 1, 4]) == [False, False, False]


def test_a_page_that_is_given_back_waits_for_who_recomputes_from_it() -> None:
    scene = Scene()
    scene.begin("a", [0, 1])
    scene.eager.arrived("a", 1)
    scene.eager.arrived("a", 2)
    scene.eager.host_freed(np.array([0]))
    assert all(restore.done for _, restore in scene.launched)
    assert whole(scene, [1]) == [True]


def test_who_gets_a_page_hears_of_who_recomputes_from_it() -> None:
    scene = Scene()
    scene.begin("a", [0, 1])
    scene.eager.arrived("a", 1)
    scene.eager.arrived("a", 2)
    assert hand_out(scene, [0]).restores == tuple(restore for _, restore in scene.launched)


def test_nothing_is_recomputed_behind_a_page_that_was_taken_away() -> None:
    scene = Scene()
    scene.begin("a", [0, 1, 2])
    scene.eager.arrived("a", 1)
    scene.eager.host_freed(np.array([0]))
    scene.eager.arrived("a", 2)
    assert [restore.reads for _, restore in scene.launched] == [[], []]
    assert whole(scene, [1]) == [False]
