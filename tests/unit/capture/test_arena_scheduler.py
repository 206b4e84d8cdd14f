"""A scripted scheduler over the arenas of two ranks, or of two pipeline stages: no page is lost,
doubled or stale, and the table says of each what a model of it says, whatever the order."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hcache_backend.arena import NOT_ENCODABLE, RowState, ShadowChanges
from tests.integrity import assert_sound_arena
from tests.unit.capture.small_arena import (
    DEVICE_PAGES,
    HOST_PAGES,
    LAYOUT,
    SIZE,
    arena,
    ids,
    slots_of,
)

FATES = ["not written", "not encodable"]
FITS = st.lists(st.sampled_from([True] * 5 + [False]), min_size=4, max_size=4)  # two of a rank
SELDOM = st.sampled_from([False] * 4 + [True])


@dataclass(eq=False)
class Rows:
    """The model of a device page: the rows of its tokens."""

    due: int = 0  # whose proof is on its way
    lost: bool = False  # one is not there


@dataclass(eq=False)
class Content:
    """The model of a host page: what HiCache has it for."""

    weights: int | None = None  # which made it; None: not known yet
    waits: bool = False  # for a read, a save or recomputed rows
    rows: Rows = field(default_factory=Rows)  # that it was given
    lost: bool = False

    @property
    def usable(self) -> bool | None:
        if self.lost or self.rows.lost:
            return False
        return None if self.waits or self.rows.due else True


@dataclass
class Node:
    """Tokens of one sequence, whole pages; what a radix node is to HiCache."""

    sequence: int
    first: int  # position of the first token
    device: list[int] | None
    host: list[int] | None = None
    queued: bool = False  # its backup was not launched yet
    backup_done: bool = False
    prepared: bool = False  # its tokens were recomputed to the device while others were read

    @property
    def pages(self) -> int:
        return len(self.device or self.host or ())

    @property
    def tokens(self) -> np.ndarray:
        return self.first + np.arange(self.pages * SIZE) + 1000 * self.sequence


class Rank:
    """The arena of one rank, and its device, which works off a queue, in order and late: transfers
    use the device's own copy of the shadow table, which changes only when the queue gets there, as
    on a transfer stream."""

    def __init__(self, number: int) -> None:
        self.number, self.weights = number, 1
        self.arena = arena(self.namespace)
        self.table = self.arena.shadows
        self.queue: list[Callable[[], None]] = []
        self.rows = [Rows(lost=True) for _ in range(DEVICE_PAGES)]
        self.contents: dict[int, Content] = {}  # by host page
        self.written = [
            0
        ] * DEVICE_PAGES  # the last step that may write a page, and that was proven
        self.proven = 0
        self.linked: dict[int, int] = {}  # host pages that have the rows of these device pages
        # Saves under way: host pages, their tickets, and which of them fit.
        self.saves: list[tuple[list[int], np.ndarray, list[bool], list[Content]]] = []

    def namespace(self) -> bytes:
        return bytes([self.weights]) * 16

    def expected(self, node: Node) -> np.ndarray:
        """Rows of a node, uint8 ``[pages, layers, tokens, 8]``."""
        positions = node.first + np.arange(node.pages * SIZE).reshape(-1, 1, SIZE, 1)
        values = node.sequence * 37 + positions * 5 + np.arange(2).reshape(-1, 1, 1)
        values = np.broadcast_to(values + 101 * self.number, (node.pages, 2, SIZE, 8))
        return (values % 251).astype(np.uint8)

    def submit(self, changes: ShadowChanges) -> None:
        def apply() -> None:
            self.table[changes.device_pages] = changes.physical

        self.queue.append(apply)

    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    # ---- rows of the device ----

    def allocate(self, pages: list[int]) -> None:
        self.arena.note_allocated(slots_of(pages))
        self.refill(pages, lost=True)

    def refill(self, pages: list[int], *, lost: bool) -> None:
        """Device pages get other rows; a host page that waits for theirs never gets them."""
        for page in pages:
            self.unlink(page)
            self.rows[page] = Rows(lost=lost)

    def unlink(self, page: int) -> None:
        """The rows that a host page has are those of a device page no more."""
        if (host := self.linked.pop(page, None)) is not None:
            self.contents[host].lost |= self.rows[page].due > 0
            self.rows[page] = Rows(lost=True)

    def unlink_host(self, page: int) -> None:
        for device_page, host in [*self.linked.items()]:
            if host == page:
                self.unlink(device_page)

    def step(self, node: Node, start: int, end: int, fate: str) -> None:
        """A forward pass over a chunk, which may end inside a page."""
        assert node.device is not None
        part, tokens = slots_of(node.device)[start:end], node.tokens[start:end]
        promised = fate != "no promise"
        ticket = self.arena.begin_step(
            part, tokens - 1000 * node.sequence, tokens, promised=promised
        )
        rows = [self.rows[page] for page in (part // SIZE).tolist()]
        for page in (part // SIZE).tolist():
            self.written[page] = ticket
        for row in rows:
            row.lost, row.due = not promised, row.due + promised
        if not promised:
            return
        values, verdicts = self.expected(node), np.ones(end - start, np.uint8)
        if fate == "not written":
            verdicts[:] = RowState.VOID
        if fate == "not encodable":
            verdicts[0] = RowState.UNFIT
            values[start // SIZE, :, start % SIZE] = 0xA5

        def apply() -> None:
            for i, slot in enumerate(part.tolist()):
                page, token = divmod(start + i, SIZE)
                memory = self.arena.memory[self.table[slot // SIZE]]
                for layer in range(2):
                    row = memory[LAYOUT.segment(layer)].reshape(SIZE, 8)
                    row[slot % SIZE] = values[page, layer, token]
            self.arena.end_step(part, ticket, verdicts)
            self.proven = ticket
            for row, verdict in zip(rows, verdicts.tolist(), strict=True):
                row.due -= 1
                row.lost |= verdict != RowState.VALID
            for page in [page for page in self.linked if self.rows[page].lost]:
                self.unlink(page)

        self.queue.append(apply)

    # ---- host pages ----

    def expect(self, pages: list[int], *, weights: bool = True) -> int:
        made_by = self.weights if weights else None
        self.contents |= {page: Content(made_by, waits=True) for page in pages}
        return self.arena.expect(ids(*pages), *[self.namespace()] * weights)

    def launch(self, node: Node, fits: list[bool]) -> None:
        """The backup of a node: rows change places, and K and V are copied."""
        assert node.device is not None and node.host is not None
        host, slots = ids(*node.host), slots_of(node.device)
        problem = self.arena.problem(slots)
        lost = any(self.rows[page].lost for page in node.device)
        assert lost == (problem is not None), "rows got lost, or count that are not there"
        if problem is None:
            before = self.arena.memory[:, LAYOUT.header_bytes :].copy()
            self.submit(self.arena.swap(slots, host))
            assert (self.arena.memory[:, LAYOUT.header_bytes :] == before).all(), "a swap copied"
            for page, device_page in zip(node.host, node.device, strict=True):
                self.contents[page].rows = self.rows[device_page]
                self.contents[page].weights = self.weights
                self.linked[device_page] = page
        else:
            self.arena.free(host)
            if problem == NOT_ENCODABLE:
                self.arena.mark_unfit(host)
            for page in node.host:
                self.contents[page].lost = True
        self.save(node.host, fits)
        if all(fits):  # as without K and V: only rows are waited for
            self.arrive(-1)

    def save(self, pages: list[int], fits: list[bool]) -> None:
        """Copies to host pages are on their way; :meth:`arrive` tells of them."""
        contents = [self.contents[page] for page in pages]
        self.saves.append((pages, self.arena.tickets(ids(*pages)), fits[: len(pages)], contents))

    def arrive(self, number: int = 0) -> None:
        """Also of pages that were loaded, or freed and used for others, meanwhile."""
        pages, tickets, fits, contents = self.saves.pop(number)
        wanted = [
            page
            for page, content, fit in zip(pages, contents, fits, strict=True)
            if self.contents.get(page) is content and content.usable is not False and not fit
        ]
        assert self.arena.settle(ids(*pages), tickets, np.array(fits)).tolist() == wanted
        for page, content, fit in zip(pages, contents, fits, strict=True):
            content.waits, content.lost = False, content.lost or not fit
            if page in wanted:
                self.unlink_host(page)

    def free(self, pages: list[int]) -> None:
        """Rows that are being recomputed have been copied, and it is known what fits."""
        while any(self.contents[page].waits for page in self.linked.values() if page in pages):
            self.arrive()
        self.submit(self.arena.take_back(ids(*pages)))
        for page in [page for page, host in self.linked.items() if host in pages]:
            if self.written[page] <= self.proven:
                del self.linked[page]
            else:
                self.unlink(page)
        for page in pages:
            del self.contents[page]
        assert self.arena.usable(ids(*pages)) is False
        for physical in self.arena.physical(ids(*pages)).tolist():
            self.arena.memory[physical] = 0xEE  # whoever gets it next writes at once

    def fill(self, node: Node, fits: list[bool]) -> None:
        """The rows of a node come to its host pages in another way than by capture."""
        assert node.host is not None
        for i, physical in enumerate(self.arena.physical(ids(*node.host)).tolist()):
            for layer in range(2):
                segment = self.arena.memory[physical][LAYOUT.segment(layer)]
                segment[:] = self.expected(node)[i, layer].ravel() if fits[i] else 0xA5

    def load(self, node: Node) -> None:
        assert node.device is not None and node.host is not None
        self.arena.note_loaded(
            slots_of(node.device), ids(*node.host), self.arena.tickets(ids(*node.host))
        )
        for page, device_page in zip(node.host, node.device, strict=True):
            lost = self.contents[page].usable is False
            self.refill([device_page], lost=lost)
            self.unlink_host(page)
            if not lost:
                self.linked[device_page] = page

    def may_load(self, node: Node) -> bool | None:
        assert node.host is not None
        usable = self.arena.usable(ids(*node.host))
        known = self.arena.namespaces(ids(*node.host))
        return usable and known == [self.namespace()] * node.pages

    def change_weights(self) -> None:
        self.arena.forget()
        self.weights += 1
        for content in self.contents.values():
            content.lost |= content.rows.due > 0
        self.linked.clear()
        self.rows = [Rows(lost=True) for _ in range(DEVICE_PAGES)]


class ScriptedScheduler(RuleBasedStateMachine):
    """Plays scheduler and L3 against the arenas."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [Rank(number) for number in range(2)]
        self.stages = False  # the ranks are pipeline stages, which cannot agree on a backup
        self.free_device = list(range(DEVICE_PAGES))
        self.free_host = list(range(HOST_PAGES))
        self.nodes: list[Node] = []
        self.sequences = 0

    @initialize(stages=st.booleans())
    def begin(self, stages: bool) -> None:
        self.stages = stages

    @rule(rank=st.integers(0, 1), steps=st.integers(1, 3))
    def device_gets_on(self, rank: int, steps: int) -> None:
        for work in self.ranks[rank].queue[:steps]:
            work()
        del self.ranks[rank].queue[:steps]

    @rule(fits=FITS)
    def all_gets_done(self, fits: list[bool]) -> None:
        while any(node.queued for node in self.nodes):
            self.launch(fits)
        for rank in self.ranks:
            rank.drain()
            while rank.saves:
                rank.arrive()
        for node in self.nodes:
            node.backup_done = node.host is not None

    # ---- requests ----

    def allocate(self, pages: int) -> list[int]:
        taken, self.free_device = self.free_device[:pages], self.free_device[pages:]
        for rank in self.ranks:
            rank.allocate(taken)
        return taken

    @precondition(lambda self: len(self.free_device) >= 2)
    @rule(
        pages=st.integers(1, 2),
        cut=st.integers(1, 7),
        fate=st.sampled_from(["fine"] * 6 + ["no promise", *FATES, "retracted"]),
        other=st.sampled_from(["fine"] * 6 + FATES),
        fits=st.none() | FITS,
    )
    def request(self, pages: int, cut: int, fate: str, other: str, fits: list[bool] | None) -> None:
        """Two chunks; a chunk may end inside a page. Ranks may have other fates. With ``fits`` it
        is backed up at once."""
        self.sequences += 1
        node = Node(self.sequences, 8 * SIZE, self.allocate(pages))
        ends = sorted({min(cut, pages * SIZE), pages * SIZE})
        for start, end in zip([0, *ends], ends, strict=False):
            for rank, its in zip(self.ranks, (fate, other), strict=True):
                rank.step(node, start, end, its)
            if fate == "retracted":
                assert node.device is not None
                self.free_device += node.device
                return
        self.nodes.append(node)
        if fits is not None:
            self.queue_backup(node, fits)

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

    @rule(data=st.data(), fits=st.none() | FITS)
    def back_up(self, data: st.DataObject, fits: list[bool] | None) -> None:
        self.queue_backup(self.pick(data, lambda n: n.host is None), fits)

    def queue_backup(self, node: Node | None, fits: list[bool] | None) -> None:
        """A node gets host pages before it is known whether its rows are there."""
        if node is None or len(self.free_host) < node.pages:
            return  # exhaustion: the node stays without a host copy
        assert node.device is not None
        problems = [rank.arena.problem(slots_of(node.device)) for rank in self.ranks]
        if any(problems) and not self.stages:
            return
        node.host, self.free_host = self.free_host[: node.pages], self.free_host[node.pages :]
        node.queued, node.backup_done = True, False
        for rank in self.ranks:
            rank.expect(node.host, weights=False)
        if fits is not None:
            self.launch(fits)

    @rule(fits=FITS)
    def launch(self, fits: list[bool]) -> None:
        for node in self.nodes:
            if node.queued:
                node.queued = False
                for number, rank in enumerate(self.ranks):
                    rank.launch(node, fits[2 * number :])
                return

    @rule(rank=st.integers(0, 1))
    def arrived(self, rank: int) -> None:
        if self.ranks[rank].saves:
            self.ranks[rank].arrive()

    def drop(self, node: Node) -> None:
        assert node.host is not None
        for rank in self.ranks:
            rank.free(node.host)
        self.free_host += node.host
        node.host, node.backup_done = None, False

    @rule(data=st.data())
    def reclaim_the_host_copy(self, data: st.DataObject) -> None:
        """``write_back`` frees host copies of nodes that are still on the device."""
        node = self.pick(data, lambda n: n.device is not None and n.backup_done)
        if node is not None:
            self.drop(node)

    @rule(data=st.data())
    def evict_from_device(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is not None and (n.host is None or n.backup_done))
        if node is not None:
            assert node.device is not None
            self.free_device += node.device
            node.device = None
            if node.host is None:
                self.nodes.remove(node)

    @rule(data=st.data())
    def evict_from_host(self, data: st.DataObject) -> None:
        node = self.pick(data, lambda n: n.device is None)
        if node is not None:
            self.drop(node)
            self.nodes.remove(node)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """A node can be loaded, or is removed: else it would be a miss for ever."""
        node = self.pick(data, lambda n: n.device is None)
        if node is None or len(self.free_device) < node.pages:
            return
        may = [True] if node.prepared else [rank.may_load(node) for rank in self.ranks]
        if None in may:
            return
        if not all(may):
            self.drop(node)
            self.nodes.remove(node)
            return
        node.device, node.prepared = self.allocate(node.pages), False
        for rank in self.ranks:
            rank.load(node)

    @precondition(lambda self: len(self.free_host) >= 2)
    @rule(pages=st.integers(1, 2), there=st.integers(0, 2), weights=SELDOM)
    def prefetch_from_l3(self, pages: int, there: int, weights: bool) -> None:
        """Some of the pages are there; meanwhile the weights may change."""
        self.sequences += 1
        taken, self.free_host = self.free_host[:pages], self.free_host[pages:]
        node = Node(self.sequences, 0, None, taken, backup_done=True)
        tickets = [rank.expect(taken) for rank in self.ranks]
        self.change_weights(weights)
        there = min(there, pages)
        for rank, ticket in zip(self.ranks, tickets, strict=True):
            assert rank.arena.usable(ids(*taken)) is None
            rank.fill(node, [True] * pages)
            physical = rank.arena.physical(ids(*taken))
            tokens = node.tokens.reshape(-1, SIZE)
            LAYOUT.positions(rank.arena.memory)[physical] = tokens - 1000 * node.sequence
            LAYOUT.token_ids(rank.arena.memory)[physical] = tokens
            rank.arena.settle(ids(*taken[:there]), ticket)
            for page in taken[:there]:
                rank.contents[page].waits = False
        if there < pages:
            for rank in self.ranks:
                rank.free(taken[there:])
            self.free_host += taken[there:]
            node.host = taken[:there]
        if there:
            self.nodes.append(node)

    @precondition(lambda self: len(self.free_host) >= 2)
    @rule(
        pages=st.integers(1, 2),
        fits=FITS,
        then=st.sampled_from(["nothing", "loaded", "saved and loaded", "freed"]),
    )
    def recomputed(self, pages: int, fits: list[bool], then: str) -> None:
        """Front pages of a prefetch: for HiCache they are in host memory from now on."""
        self.sequences += 1
        taken, self.free_host = self.free_host[-pages:], self.free_host[:-pages]  # as they were
        node = Node(self.sequences, 0, None, taken, backup_done=True, prepared=True)
        positions = np.arange(pages * SIZE)
        for number, rank in enumerate(self.ranks):
            rank.contents |= {page: Content(rank.weights, waits=True) for page in taken}
            rank.arena.expect_recomputed(ids(*taken), positions, node.tokens)
            assert not rank.arena.unfit(ids(*taken)).any()
            rank.fill(node, fits[2 * number :])  # the device may do so at once
            rank.save(taken, fits[2 * number :])
            if then == "saved and loaded":
                rank.arrive(-1)
        self.nodes.append(node)
        if then == "freed":
            self.drop(node)
            self.nodes.remove(node)
        elif then != "nothing" and len(self.free_device) >= pages:
            node.device, node.prepared = self.allocate(pages), False
            for rank in self.ranks:
                rank.load(node)

    @rule(do=SELDOM)
    def change_weights(self, do: bool) -> None:
        for rank in self.ranks if do else ():
            rank.change_weights()
        for node in self.nodes:
            node.prepared &= not do

    @rule(do=SELDOM)
    def flush(self, do: bool) -> None:
        if not do:
            return
        for rank in self.ranks:
            rank.drain()  # the host pool waits for the transfers
            rank.arena.clear()
            rank.contents.clear()
            rank.linked.clear()
            rank.rows = [Rows(lost=True) for _ in range(DEVICE_PAGES)]
        self.free_device, self.free_host = list(range(DEVICE_PAGES)), list(range(HOST_PAGES))
        self.nodes.clear()

    # ---- what must hold ----

    @invariant()
    def integrity(self) -> None:
        for rank in self.ranks:
            assert_sound_arena(rank.arena)
        assert len(set(self.free_host)) == len(self.free_host)

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        for rank in self.ranks:
            table = [rank.arena.usable(ids(page)) for page in range(HOST_PAGES)]
            model = [rank.contents.get(page, Content(lost=True)) for page in range(HOST_PAGES)]
            assert table == [content.usable for content in model]

    @invariant()
    def rows_are_what_the_model_says(self) -> None:
        for rank in self.ranks:
            links = rank.arena._host_page.tolist()
            assert links == [rank.linked.get(page, -1) for page in range(DEVICE_PAGES)]
            for page in [page for node in self.nodes for page in node.device or ()]:
                proven = (rank.arena._rows[slots_of([page])] == RowState.VALID).all()
                assert proven == (not rank.rows[page].lost and not rank.rows[page].due)

    @invariant()
    def usable_pages_are_what_their_node_is(self) -> None:
        for node in self.nodes:
            for i, host in enumerate(node.host or ()):
                for rank in self.ranks:
                    if not rank.contents[host].usable:
                        continue
                    [page] = rank.arena.pages(ids(host))
                    tokens = node.tokens[i * SIZE : (i + 1) * SIZE]
                    assert np.array_equal(LAYOUT.token_ids(page), tokens)
                    assert np.array_equal(LAYOUT.positions(page), tokens - 1000 * node.sequence)
                    weights = rank.contents[host].weights
                    assert rank.arena.namespaces(ids(host)) == [bytes([weights or 0]) * 16]
                    for layer in range(2):
                        got = page[LAYOUT.segment(layer)].reshape(SIZE, 8)
                        assert (got == rank.expected(node)[i, layer]).all(), "wrong rows"


TestScriptedScheduler = ScriptedScheduler.TestCase
TestScriptedScheduler.settings = settings(
    max_examples=150, stateful_step_count=80, deadline=None, derandomize=True
)
