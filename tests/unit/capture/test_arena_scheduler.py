"""A scripted scheduler over the arena: no page is lost, doubled or stale, whatever the order."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hcache_backend.arena import ShadowChanges, Verdict
from tests.integrity import assert_sound_arena
from tests.unit.capture.small_arena import (
    DEVICE_PAGES,
    HOST_PAGES,
    LAYOUT,
    NAMESPACE,
    SIZE,
    WRITER,
    arena,
    ids,
    slots_of,
)


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
    encodable: bool = True  # every row

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
        # Host pages that are being recomputed, and which of them fit: none is told twice.
        self.coming: list[tuple[np.ndarray, np.ndarray]] = []
        self.recomputing: dict[int, np.ndarray] = {}  # by host page

    # ---- the device ----

    def expected(self, node: Node) -> np.ndarray:
        """Rows of a node, uint8 ``[pages, layers, tokens, 8]``."""
        positions = node.first + np.arange(node.pages * SIZE).reshape(-1, 1, SIZE, 1)
        values = node.sequence * 37 + positions * 5 + np.arange(2).reshape(-1, 1, 1)
        return np.broadcast_to(values % 251, (node.pages, 2, SIZE, 8)).astype(np.uint8)

    def submit(self, changes: ShadowChanges) -> None:
        def apply() -> None:
            self.table[changes.device_pages] = changes.physical

        self.queue.append(apply)

    def transfer(self, node: Node, start: int, end: int, ticket: int) -> None:
        slots, rows = slots_of(node.device)[start:end], self.expected(node)
        verdicts = np.full(len(slots), node.written, np.uint8)
        if not node.encodable:
            verdicts[0], rows[start // SIZE, :, start % SIZE] = Verdict.UNFIT, 0xA5

        def apply() -> None:
            for i, slot in enumerate(slots.tolist()):
                page, token = divmod(start + i, SIZE)
                memory = self.arena.memory[self.table[slot // SIZE]]
                for layer in range(2):
                    row = memory[LAYOUT.segment(layer)].reshape(SIZE, 8)
                    row[slot % SIZE] = rows[page, layer, token]
            self.arena.prove(slots, ticket, verdicts)

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
        fate=st.sampled_from(
            ["fine", "fine", "fine", "no promise", "not written", "not encodable", "retracted"]
        ),
    )
    def request(self, pages: int, cut: int, fate: str) -> None:
        """Two chunks; a chunk may end inside a page."""
        self.sequences += 1
        node = Node(self.sequences, 8 * SIZE, self.allocate(pages), None)
        node.promised, node.written = fate != "no promise", fate != "not written"
        node.encodable = fate != "not encodable"
        slots = slots_of(node.device)
        ends = sorted({min(cut, len(slots)), len(slots)})
        for start, end in zip([0, *ends], ends, strict=False):
            part = slots[start:end]
            positions = np.arange(node.first + start, node.first + end)
            tokens = positions + 1000 * node.sequence
            ticket = self.arena.begin_step(part, positions, tokens, promised=node.promised)
            if node.promised:
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
        slots = slots_of(node.device)
        problem = self.arena.problem(slots)
        if node.promised and node.written and node.encodable:
            assert problem is None, "rows that were captured or restored got lost"
        if problem is not None:
            return
        node.host, self.free_host = self.free_host[: node.pages], self.free_host[node.pages :]
        node.backup_done = False
        before = self.arena.memory[:, LAYOUT.header_bytes :].copy()
        self.submit(self.arena.swap(slots, ids(*node.host)))
        assert (self.arena.memory[:, LAYOUT.header_bytes :] == before).all(), "a backup copied"

    def free_host_pages(self, pages: list[int]) -> None:
        """Rows that are being recomputed have been copied; if it matters, it is known what fits."""
        on_device = (self.arena._device_page[pages] >= 0).any()
        for host, fits in [*self.coming]:
            if on_device and any(self.recomputing.get(page) is host for page in pages):
                self.coming = [one for one in self.coming if one[0] is not host]
                self.tell(host, fits)
        for page in pages:
            self.recomputing.pop(page, None)
        self.submit(self.arena.host_freed(ids(*pages)))
        for page in self.arena.physical(ids(*pages)).tolist():
            self.arena.memory[page] = 0xEE  # whoever gets it next writes at once
        self.free_host += pages

    @rule(data=st.data())
    def reclaim_the_host_copy(self, data: st.DataObject) -> None:
        """``write_back`` frees host copies of nodes that are still on the device."""
        node = self.pick(data, lambda n: n.device is not None and n.backup_done)
        if node is not None:
            self.free_host_pages(node.host)
            node.host, node.backup_done = None, False

    @rule(data=st.data())
    def evict_from_device(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is not None and (n.host is None or n.backup_done))
        if node is not None:
            self.free_device += node.device
            node.device = None
            if node.host is None:
                self.nodes.remove(node)

    @rule(data=st.data())
    def evict_from_host(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is None)
        if node is not None:
            self.free_host_pages(node.host)
            self.nodes.remove(node)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """A node can be loaded, or is removed: else it would be a miss for ever."""
        node = self.pick(data, lambda n: n.device is None)
        if node is None or len(self.free_device) < node.pages:
            return
        pages = ids(*node.host)
        prepared = all(page in self.recomputing for page in node.host)
        if not self.arena.settled(pages) and not prepared:
            return
        if not prepared and not self.arena.whole(pages):
            assert not (node.written and node.encodable), "a backup was lost"
            self.free_host_pages(node.host)
            self.nodes.remove(node)
            return
        node.device = self.allocate(node.pages)
        self.arena.loaded(slots_of(node.device), pages)

    @precondition(lambda self: len(self.free_host) >= 2)
    @rule(pages=st.integers(1, 2))
    def prefetch_from_l3(self, pages: int) -> None:
        self.sequences += 1
        taken, self.free_host = self.free_host[:pages], self.free_host[pages:]
        node = Node(self.sequences, 0, None, taken, backup_done=True)
        self.arena.expect(ids(*taken))
        for i, physical in enumerate(self.arena.physical(ids(*taken)).tolist()):
            page = self.arena.memory[physical]
            LAYOUT.begin_header(page, NAMESPACE, WRITER)
            LAYOUT.positions(page)[:] = np.arange(i * SIZE, (i + 1) * SIZE)
            LAYOUT.token_ids(page)[:] = 1000 * node.sequence + LAYOUT.positions(page)
            for layer in range(2):
                page[LAYOUT.segment(layer)] = self.expected(node)[i, layer].ravel()
        self.nodes.append(node)

    @precondition(lambda self: len(self.free_host) >= 2)
    @rule(
        pages=st.integers(1, 2),
        fits=st.tuples(st.booleans(), st.booleans()),
        then=st.sampled_from(["nothing", "loaded", "freed"]),
    )
    def recomputed(self, pages: int, fits: tuple[bool, bool], then: str) -> None:
        """Front pages of a prefetch: for HiCache they are in host memory from now on."""
        self.sequences += 1
        taken, self.free_host = self.free_host[-pages:], self.free_host[:-pages]  # as they were
        node = Node(self.sequences, 0, None, taken, backup_done=True)
        host, positions = ids(*taken), np.arange(pages * SIZE)
        self.arena.recomputed(host, positions, positions + 1000 * node.sequence)
        assert not self.arena.unfit(host).any()
        for i, physical in enumerate(self.arena.physical(host).tolist()):
            rows = self.expected(node)[i]
            for layer in range(2):  # the device may do so at once
                segment = self.arena.memory[physical][LAYOUT.segment(layer)]
                segment[:] = rows[layer].ravel() if fits[i] else 0xA5
        self.coming.append((host, np.array(fits[:pages])))
        self.recomputing |= dict.fromkeys(taken, host)
        if then == "freed":
            self.free_host_pages(taken)
            return
        self.nodes.append(node)
        if then == "loaded" and len(self.free_device) >= pages:
            node.device = self.allocate(pages)
            self.arena.loaded(slots_of(node.device), host)

    @precondition(lambda self: self.coming)
    @rule()
    def arrived(self) -> None:
        """Also of pages that were loaded, or freed and used for others, meanwhile."""
        self.tell(*self.coming.pop(0))

    def tell(self, host: np.ndarray, fits: np.ndarray) -> None:
        still = [self.recomputing.get(page) is host for page in host.tolist()]
        wanted = host[~fits & still].tolist()
        self.arena.mark_saved(host, fits)
        assert self.arena.unfit(ids(*wanted)).all()
        for node in self.nodes:
            lost = [i for i, page in enumerate(node.host or ()) if page in wanted]
            node.written = node.written and not lost
            for i in lost if node.device is not None else ():
                problem = self.arena.problem(slots_of(node.device[i : i + 1]))
                assert problem == "rows not valid", "rows count that do not fit"
        for page in host[still].tolist():
            del self.recomputing[page]

    @rule()
    def flush(self) -> None:
        self.drain()  # the host pool waits for the transfers
        self.arena.clear()
        self.recomputing.clear()
        self.free_device, self.free_host = list(range(DEVICE_PAGES)), list(range(HOST_PAGES))
        self.nodes.clear()

    # ---- what must hold ----

    @invariant()
    def integrity(self) -> None:
        assert_sound_arena(self.arena)
        assert len(set(self.free_host)) == len(self.free_host)

    @invariant()
    def finished_host_pages_are_what_their_node_is(self) -> None:
        for node in self.nodes:
            if node.host is None or not node.backup_done:
                continue
            for i, physical in enumerate(self.arena.physical(ids(*node.host)).tolist()):
                page = self.arena.memory[physical]
                if node.host[i] in self.recomputing:
                    assert not LAYOUT.is_stamped(page), "it counts before it is there"
                    continue
                if LAYOUT.namespace_of(page) != NAMESPACE:
                    assert not (node.written and node.encodable), "a backup was lost"
                    continue
                first = node.first + i * SIZE
                assert LAYOUT.positions(page).tolist() == list(range(first, first + SIZE))
                assert (LAYOUT.token_ids(page) // 1000 == node.sequence).all()
                if self.arena.unfit(ids(node.host[i])).item():
                    assert not (node.written and node.encodable), "a page was lost"
                    continue  # no load takes it
                for layer in range(2):
                    got = page[LAYOUT.segment(layer)].reshape(SIZE, 8)
                    assert (got == self.expected(node)[i, layer]).all(), "wrong rows"


TestScriptedScheduler = ScriptedScheduler.TestCase
TestScriptedScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
