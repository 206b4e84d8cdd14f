"""A scripted scheduler over the arena: no page is lost, doubled or stale, whatever the order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hcache_backend.capture.arena import NO_NAMESPACE, Arena, ShadowChanges, Verdict
from hcache_backend.page import PageLayout

SIZE = 4
LAYOUT = PageLayout(SIZE, (SIZE * 8, SIZE * 8))
HOST_PAGES, DEVICE_PAGES = 6, 5
NAMESPACE, WRITER = b"n" * 16, b"w" * 8


def arena(host_pages: int = HOST_PAGES, device_pages: int = DEVICE_PAGES) -> Arena:
    memory = np.full((host_pages + device_pages, LAYOUT.page_bytes), 0xEE, np.uint8)
    return Arena(
        memory,
        LAYOUT,
        host_pages,
        device_pages,
        lambda page: LAYOUT.stamp(page, NAMESPACE, WRITER),
    )


def slots_of(pages: list[int]) -> np.ndarray:
    return (np.array(pages, np.int64)[:, None] * SIZE + np.arange(SIZE)).ravel()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)


@dataclass
class Node:
    """Tokens of one sequence, whole pages; what a radix node is to HiCache."""

    sequence: int
    first: int  # position of the first token
    device: list[int] | None
    host: list[int] | None
    backup_done: bool = False
    promised: bool = True
    written: bool = True

    @property
    def pages(self) -> int:
        return len(self.device or self.host or ())


class ScriptedScheduler(RuleBasedStateMachine):
    """Plays scheduler, device and L3 against the arena.

    The device works off a queue, in order and late: row transfers use the device's own copy of the
    shadow table, which changes only when the queue gets there, as on a transfer stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena()
        self.table = self.arena.shadows
        self.queue: list[Callable[[], None]] = []
        self.free_device = list(range(DEVICE_PAGES))
        self.free_host = list(range(HOST_PAGES))
        self.nodes: list[Node] = []
        self.sequences = 0

    # ---- the device ----

    def expected(self, node: Node) -> np.ndarray:
        """Rows of a node, uint8 ``[pages, layers, tokens, 8]``."""
        value = np.empty((node.pages, 2, SIZE, 8), np.uint8)
        for page in range(node.pages):
            for layer in range(2):
                for token in range(SIZE):
                    position = node.first + page * SIZE + token
                    value[page, layer, token] = (node.sequence * 37 + position * 5 + layer) % 251
        return value

    def submit(self, changes: ShadowChanges) -> None:
        def apply() -> None:
            self.table[changes.device_pages] = changes.physical

        self.queue.append(apply)

    def transfer(self, node: Node, start: int, end: int, ticket: int) -> None:
        assert node.device is not None
        slots, rows = slots_of(node.device)[start:end], self.expected(node)
        node_written = node.written

        def apply() -> None:
            for i, slot in enumerate(slots.tolist()):
                page, token = divmod(start + i, SIZE)
                memory = self.arena.memory[self.table[slot // SIZE]]
                for layer in range(2):
                    row = memory[LAYOUT.segment(layer)].reshape(SIZE, 8)
                    row[slot % SIZE] = rows[page, layer, token]
            self.arena.prove(slots, ticket, np.full(len(slots), node_written, np.uint8))

        self.queue.append(apply)

    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()
        for node in self.nodes:
            node.backup_done = node.host is not None

    @rule(steps=st.integers(1, 3))
    def device_gets_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.queue:
                self.queue.pop(0)()
        if not self.queue:
            self.drain()

    # ---- requests ----

    def allocate(self, pages: int) -> list[int]:
        taken, self.free_device = self.free_device[:pages], self.free_device[pages:]
        self.arena.allocated(slots_of(taken))
        return taken

    @precondition(lambda self: len(self.free_device) >= 2)
    @rule(
        pages=st.integers(1, 2),
        cut=st.integers(1, 7),
        fate=st.sampled_from(["fine", "fine", "fine", "no promise", "not written", "retracted"]),
    )
    def request(self, pages: int, cut: int, fate: str) -> None:
        """Two chunks; a chunk may end inside a page."""
        self.sequences += 1
        node = Node(self.sequences, 8 * SIZE, self.allocate(pages), None)
        node.promised, node.written = fate != "no promise", fate != "not written"
        assert node.device is not None
        slots = slots_of(node.device)
        ends = sorted({min(cut, len(slots)), len(slots)})
        for start, end in zip([0, *ends], ends, strict=False):
            part = slots[start:end]
            positions = np.arange(node.first + start, node.first + end)
            ticket = self.arena.begin(part, positions, positions + 1000 * node.sequence)
            if node.promised:
                self.arena.promise(part, ticket)
                self.transfer(node, start, end, ticket)
            if fate == "retracted":
                self.free_device += node.device
                return
        self.nodes.append(node)

    def pick(self, data: st.DataObject, wanted: Callable[[Node], bool]) -> Node | None:
        nodes = [node for node in self.nodes if wanted(node)]
        return data.draw(st.sampled_from(nodes)) if nodes else None

    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        """Another request shares the first page of a node."""
        node = self.pick(data, lambda n: n.pages == 2 and (n.host is None or n.backup_done))
        if node is None:
            return
        rest = Node(**vars(node))
        rest.first += SIZE
        for half, part in ((node, slice(0, 1)), (rest, slice(1, 2))):
            half.device = None if half.device is None else half.device[part]
            half.host = None if half.host is None else half.host[part]
        self.nodes.append(rest)

    # ---- HiCache ----

    @rule(data=st.data())
    def back_up(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.host is None)
        if node is None or len(self.free_host) < node.pages:
            return  # exhaustion: the node stays without a host copy
        assert node.device is not None
        slots = slots_of(node.device)
        problem = self.arena.problem(slots)
        if node.promised and node.written:
            assert problem is None, "rows that were captured or restored got lost"
        if problem is not None:
            return
        node.host, self.free_host = self.free_host[: node.pages], self.free_host[node.pages :]
        node.backup_done = False
        before = self.arena.memory[:, LAYOUT.header_bytes :].copy()
        self.submit(self.arena.swap(slots, ids(*node.host)))
        assert (self.arena.memory[:, LAYOUT.header_bytes :] == before).all(), "a backup copied"

    def free_host_pages(self, pages: list[int]) -> None:
        self.submit(self.arena.host_freed(ids(*pages)))
        for page in self.arena.physical(ids(*pages)).tolist():
            self.arena.memory[page] = 0xEE  # whoever gets it next writes at once
        self.free_host += pages

    @rule(data=st.data())
    def reclaim_the_host_copy(self, data: st.DataObject) -> None:
        """``write_back`` frees host copies of nodes that are still on the device."""
        node = self.pick(data, lambda n: n.device is not None and n.backup_done)
        if node is not None and node.host is not None:
            self.free_host_pages(node.host)
            node.host, node.backup_done = None, False

    @rule(data=st.data())
    def evict_from_device(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is not None and (n.host is None or n.backup_done))
        if node is not None and node.device is not None:
            self.free_device += node.device
            node.device = None
            if node.host is None:
                self.nodes.remove(node)

    @rule(data=st.data())
    def evict_from_host(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is None)
        if node is not None and node.host is not None:
            self.free_host_pages(node.host)
            self.nodes.remove(node)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is None and n.promised and n.written)
        if node is not None and node.host is not None and len(self.free_device) >= node.pages:
            node.device = self.allocate(node.pages)
            self.arena.loaded(slots_of(node.device), ids(*node.host))

    @precondition(lambda self: len(self.free_host) >= 2)
    @rule(pages=st.integers(1, 2))
    def prefetch_from_l3(self, pages: int) -> None:
        self.sequences += 1
        taken, self.free_host = self.free_host[:pages], self.free_host[pages:]
        node = Node(self.sequences, 0, None, taken, backup_done=True)
        for i, physical in enumerate(self.arena.physical(ids(*taken)).tolist()):
            page = self.arena.memory[physical]
            LAYOUT.begin(page, NAMESPACE, WRITER)
            LAYOUT.positions(page)[:] = np.arange(i * SIZE, (i + 1) * SIZE)
            LAYOUT.token_ids(page)[:] = 1000 * node.sequence + LAYOUT.positions(page)
            for layer in range(2):
                page[LAYOUT.segment(layer)] = self.expected(node)[i, layer].ravel()
        self.nodes.append(node)

    @rule()
    def flush(self) -> None:
        self.arena.clear()
        self.free_device, self.free_host = list(range(DEVICE_PAGES)), list(range(HOST_PAGES))
        self.nodes.clear()

    # ---- what must hold ----

    @invariant()
    def integrity(self) -> None:
        self.arena.check_integrity()
        assert len(set(self.free_host)) == len(self.free_host)

    @invariant()
    def finished_host_pages_are_what_their_node_is(self) -> None:
        for node in self.nodes:
            if node.host is None or not node.backup_done:
                continue
            for i, physical in enumerate(self.arena.physical(ids(*node.host)).tolist()):
                page = self.arena.memory[physical]
                if LAYOUT.namespace_of(page) != NAMESPACE:
                    assert not node.written, "a backup was lost"
                    continue
                first = node.first + i * SIZE
                assert LAYOUT.positions(page).tolist() == list(range(first, first + SIZE))
                assert (LAYOUT.token_ids(page) // 1000 == node.sequence).all()
                for layer in range(2):
                    got = page[LAYOUT.segment(layer)].reshape(SIZE, 8)
                    assert (got == self.expected(node)[i, layer]).all(), "wrong rows"


TestScriptedScheduler = ScriptedScheduler.TestCase
TestScriptedScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


# ---- single facts ----


def captured(a: Arena, pages: list[int], first: int = 0) -> np.ndarray:
    slots = slots_of(pages)
    positions = np.arange(first, first + len(slots))
    ticket = a.begin(slots, positions, positions + 500)
    a.promise(slots, ticket)
    assert a.prove(slots, ticket, np.ones(len(slots), np.uint8)) == (0, 0)
    return slots


def test_a_backup_exchanges_table_entries_and_counts_pages() -> None:
    a = arena()
    slots = captured(a, [1, 3])
    shadows = a.shadows[[1, 3]]
    changes = a.swap(slots, ids(2, 0))
    assert a.physical(ids(2, 0)).tolist() == shadows.tolist()
    assert changes.device_pages.tolist() == [1, 3]
    assert a.shadows[[1, 3]].tolist() == changes.physical.tolist() == [2, 0]
    assert a.swapped_pages == 2


def test_rows_are_valid_from_the_promise_on_and_stamped_with_the_proof() -> None:
    a = arena()
    slots = slots_of([2])
    ticket = a.begin(slots, np.arange(4), np.arange(4))
    assert a.problem(slots) == "rows not valid"
    a.promise(slots, ticket)
    assert a.problem(slots) is None
    a.swap(slots, ids(0))
    page = a.memory[a.physical(ids(0))[0]]
    assert LAYOUT.namespace_of(page) == NO_NAMESPACE
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(page) == NAMESPACE
    assert a.problem(slots) == "rows backed up already"


@pytest.mark.parametrize(("verdict", "lost"), [(Verdict.MISSING, (1, 0)), (Verdict.UNFIT, (0, 1))])
def test_a_page_with_a_row_that_was_not_written_is_never_stamped(
    verdict: Verdict, lost: tuple[int, int]
) -> None:
    a = arena()
    slots = slots_of([2])
    ticket = a.begin(slots, np.arange(4), np.arange(4))
    a.promise(slots, ticket)
    a.swap(slots, ids(0))
    assert a.prove(slots, ticket, np.array([1, 1, verdict, 1], np.uint8)) == lost
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert LAYOUT.namespace_of(a.memory[a.physical(ids(0))[0]]) == NO_NAMESPACE


def test_rows_that_the_codec_cannot_hold_are_told_apart_from_missing_ones() -> None:
    a = arena()
    slots = slots_of([2])
    ticket = a.begin(slots, np.arange(4), np.arange(4))
    a.promise(slots, ticket)
    a.prove(slots, ticket, np.array([1, 2, 0, 1], np.uint8))
    assert a.problem(slots) == "rows not encodable"
    captured(a, [2])
    assert a.problem(slots) is None


def test_the_proof_of_an_older_allocation_counts_for_nothing() -> None:
    a = arena()
    slots = slots_of([2])
    ticket = a.begin(slots, np.arange(4), np.arange(4))
    a.promise(slots, ticket)
    a.allocated(slots[2:3])
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert a.problem(slots) == "rows not valid"


def test_the_proof_of_an_older_allocation_is_no_proof_of_the_newer_one() -> None:
    a = arena()
    slots = slots_of([2])
    old = a.begin(slots, np.arange(4), np.arange(4))
    a.promise(slots, old)
    new = a.begin(slots, np.arange(4), np.arange(4))
    a.promise(slots, new)
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
    slots = slots_of([2])
    ticket = a.begin(slots, np.arange(4), np.arange(4))
    a.promise(slots, ticket)
    a.swap(slots, ids(0))
    assert len(a.host_freed(ids(0)).device_pages) == 0
    a.prove(slots, ticket, np.ones(4, np.uint8))
    assert a.problem(slots) == "rows not valid"


@pytest.mark.parametrize("positions", [[1, 2, 3, 4], [0, 1, 3, 2], [4, 5, 6, 8]])
def test_positions_must_follow_each_other_from_a_page_boundary(positions: list[int]) -> None:
    a = arena()
    slots = slots_of([1])
    a.promise(slots, a.begin(slots, np.array(positions), np.arange(4)))
    assert a.problem(slots) == "positions not consecutive"


def test_slots_that_are_no_whole_pages_are_refused() -> None:
    a = arena()
    captured(a, [1, 2])
    assert a.problem(np.array([5, 4, 6, 7])) == "slots are not whole pages"


def test_the_memory_must_have_a_page_for_every_entry() -> None:
    with pytest.raises(ValueError, match=r"the arena needs \(11, "):
        Arena(np.zeros((10, LAYOUT.page_bytes), np.uint8), LAYOUT, 6, 5, lambda page: None)
