"""Eager restores: a scripted scheduler plays every interleaving, and the rules hold."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hcache_backend.host.loads import Prepared
from hcache_backend.prefetch.reservations import EagerRestores
from tests.integrity import assert_sound_reservations
from tests.kit.prefetch import Restore
from tests.unit.restore.eager_device import (
    DEVICE_PAGES,
    HOST_PAGES,
    SIZE,
    Device,
    pages_of,
    slots_of,
)


class Prefetch:
    def __init__(self, keys: list[str], host: list[int]) -> None:
        self.keys, self.host, self.arrived = keys, host, 0
        self.start = len(host)  # read from the back: those from here on have arrived

    @property
    def counts(self) -> int:
        """How many pages, from the first one on, have arrived or were recomputed."""
        return len(self.host) if self.arrived >= self.start else self.arrived


class ScriptedScheduler(RuleBasedStateMachine):
    """HiCache as far as eager restores see it: prefetches, a tree of host pages, an allocator."""

    @initialize(
        limit=st.integers(1, DEVICE_PAGES),
        cached=st.integers(0, DEVICE_PAGES),
        back=st.booleans(),
    )
    def start(self, limit: int, cached: int, back: bool) -> None:
        """Pages are read in order, or from the back, and front ones are recomputed."""
        self.back = back
        self.device = Device(cached)
        self.eager = EagerRestores(SIZE, self.device, self.launch, limit)
        self.host_free = list(range(HOST_PAGES))
        self.content = Counter[int]()  # what a host page holds: a number that grows
        self.readable: set[int] = set()  # host pages whose content has arrived
        self.running: dict[Hashable, Prefetch] = {}
        self.recomputes: dict[Hashable, bool] = {}  # whether what is before it is on the device
        self.stale: list[list[int]] = []  # host pages of ended prefetches, not freed yet
        self.tree: list[int] = []
        self.launched: list[tuple[set[int], Restore]] = []  # what reads host pages
        self.slice: Restore | None = None  # the last recomputation
        self.used: list[int] = []
        self.number = 0

    def launch(self, host_pages: np.ndarray, slots: torch.Tensor) -> Any:
        pages = pages_of(slots)
        restore = Restore(pages)
        self.launched.append((set(host_pages.tolist()), restore))
        for page, host in zip(pages, host_pages.tolist(), strict=True):
            assert page not in self.device.free and page not in self.used
            assert host in self.readable, "launched before it arrived"
            assert page not in self.device.made, "launched twice"
            self.device.made[page] = host, self.content[host]
        self.device.writes(restore)
        return restore

    # ---- prefetches ----

    @rule(pages=st.integers(1, 8), prefix=st.integers(0, 3), recomputes=st.booleans())
    def begin(self, pages: int, prefix: int, recomputes: bool = True) -> None:
        if len(self.host_free) < pages:
            return
        host, self.host_free = self.host_free[:pages], self.host_free[pages:]
        self.content.update(host)
        self.number += 1
        keys = [f"{0 if i < prefix else self.number}/{i}" for i in range(pages)]
        self.running[self.number] = Prefetch(keys, host)
        self.recomputes[self.number] = recomputes
        before = self.eager.pages
        reserved = self.eager.reserve(self.number, keys, np.array(host))
        assert reserved <= pages and self.eager.pages <= max(before, self.eager.limit)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def arrive(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.read_on(number, data)

    def read_on(self, number: int, data: Any, *, told: bool = True) -> None:
        prefetch = self.running[number]
        self.read_up_to(number, data.draw(st.integers(prefetch.arrived, prefetch.start)), told)

    def read_up_to(self, number: int, page: int, told: bool = True) -> None:
        prefetch = self.running[number]
        if self.back:
            prefetch.start, first, end = page, page, len(prefetch.host)
        else:
            prefetch.arrived, first, end = page, 0, page
        self.readable.update(prefetch.host[first:end])
        if told:
            self.eager.restore_arrived(number, range(first, end))

    @precondition(lambda self: self.back)
    @rule(most=st.integers(1, 4), data=st.data())
    def recompute(self, most: int, data: Any) -> None:
        """A turn of the scheduler has time for some pages of the first prefetch that can be."""
        for number, prefetch in self.running.items():
            front = prefetch.arrived
            end = min(front + most, prefetch.start, self.eager.reachable(number, front))
            if front >= end or not self.recomputes[number]:
                continue
            due = range(front, data.draw(st.integers(front + 1, end)))
            wanted = due, range(due.start)
            slots, before = (pages_of(self.eager.slots(number, pages)) for pages in wanted)
            host = self.eager.host_pages(number, due).tolist()
            assert host == prefetch.host[len(before) :][: len(slots)]
            made = [self.device.made.get(page) for page in before]
            assert made == [(page, self.content[page]) for page in prefetch.host[: len(before)]]
            others = self.device.made.keys() | set(self.device.free) | set(self.used)
            assert not set(slots) & others, "launched twice"
            assert not set(host) & self.readable, "read, too"
            failed = data.draw(st.booleans())
            restore = self.slice = Restore(slots, before, self.slice)
            restore.failed = RuntimeError("out of memory") if failed else None
            self.device.readers.append(restore)
            self.device.writes(restore)
            self.eager.mark_recomputed(number, due, restore)  # type: ignore[arg-type]
            if failed:
                self.recomputes[number] = False
                return
            self.launched.append((set(host), restore))  # it writes them
            self.readable.update(host)
            for page, source in zip(slots, host, strict=True):
                self.device.made[page] = source, self.content[source]
            prefetch.arrived += len(slots)
            return

    @precondition(lambda self: self.running)
    @rule(data=st.data(), polled=st.booleans())
    def end_with_a_usable_prefix(self, data: Any, polled: bool) -> None:
        """Complete, best effort, timeout, a bad page: some are inserted, some of those dropped."""
        number = data.draw(st.sampled_from(sorted(self.running)))
        # The last batch arrives together with the end: nothing is launched for it.
        self.read_on(number, data, told=False)
        prefetch = self.running.pop(number)
        counts = prefetch.counts
        known = data.draw(st.integers(0, counts))  # the tree had them already
        self.tree = prefetch.host[known:counts] + self.tree
        self.stale.append(prefetch.host[counts:])
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
        prefetch = self.running[self.number]
        host = prefetch.host
        for arrived in (pages // 2, pages):
            self.read_up_to(
                self.number, max(pages - arrived, prefetch.arrived) if self.back else arrived
            )
            if self.back:
                self.recompute(4, data)
        assert prefetch.counts == pages
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
        for read, restore in self.launched:
            assert restore.read_host or not read & set(pages), "a thread may write what is read"
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
        handed: Prepared | None = self.eager.hand_out(np.array(host))
        if handed is None:
            assert len(host) > free + reserved
            assert (self.device.count(), self.eager.pages) == (free, reserved)
            return
        pages = pages_of(handed.slots)
        assert len(set(pages)) == len(pages) == len(host)
        assert not set(pages) & (set(self.device.free) | set(self.used))
        waited: list[Any] = list(handed.restores)
        writers = {id(one) for restore in waited for one in restore.with_those_before()}
        for reader in self.device.readers:
            if not reader.is_done and set(reader.reads) & set(pages):
                assert id(reader) in writers, "nobody waits for who reads it"
        for page, ready, source in zip(pages, handed.ready, host, strict=True):
            if ready:
                assert self.device.made.pop(page) == (source, self.content[source]), (
                    "of another page"
                )
                writing = {id(restore) for restore in self.device.writers[page]}
                assert writing <= writers, "nobody waits for it"
            else:
                assert self.device.is_written(page), "others still write it"
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
            for restore in self.device.writers.get(page, ()):
                restore.is_done = True
            for reader in self.device.readers:
                reader.is_done = reader.is_done or page in reader.reads
        self.device.give(slots_of(freed))

    @rule()
    def new_weights(self) -> None:
        self.eager.give_all_back()
        assert self.eager.pages == 0

    @rule()
    def flush(self) -> None:
        self.eager.all_freed()
        assert all(map(self.device.is_written, self.device.made))
        assert self.device.being_read() <= set(self.used)
        self.eager.give_all_back()  # HiCache resets its controller, too
        assert all(restore.read_host for _, restore in self.launched)
        for number in sorted(self.running):
            self.eager.end(number)
        self.device.free, self.device.cached = list(range(DEVICE_PAGES)), []
        self.device.made, self.used, self.device.writers = {}, [], {}
        self.device.readers = []
        self.running, self.stale, self.tree, self.readable = {}, [], [], set()
        self.launched = []
        self.host_free = list(range(HOST_PAGES))

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "eager"):
            return
        assert_sound_reservations(self.eager)
        device = self.device
        assert device.count() + len(device.cached) + len(self.used) + self.eager.pages == (
            DEVICE_PAGES
        )
        assert sorted(self.eager.running_prefetches()) == sorted(self.running)
        held = set(self.eager._reserved)
        coming = {page for prefetch in self.running.values() for page in prefetch.host}
        assert held <= self.readable | coming, "reserved for pages that nobody will load"


ScriptedScheduler.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestScriptedScheduler = ScriptedScheduler.TestCase
