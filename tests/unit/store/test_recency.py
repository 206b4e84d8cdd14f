"""What a full folder loses: ends of sequences, those of the least recently used first."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from store_testing import (
    FILE,
    NAMESPACE,
    PAGE,
    WRITER,
    Ops,
    content,
    key,
    keys,
    memory,
    open_quiet,
    ops_that,
    payload,
    put,
    there,
)

from hcache_backend.format.envelope import PageName
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, Shard
from hcache_backend.store import PageStore, file_ops
from hcache_backend.store.index import Entry

HOUR = 3600 * 10**9


def store_sequence(store: PageStore, numbers: Sequence[int], known: int = 0) -> None:
    """Store pages of a sequence behind its first ``known`` ones."""
    assert all(put(store, *numbers[known:], prefix=keys(numbers[:known])))


def found(store: PageStore, numbers: Sequence[int]) -> int:
    """How many pages of a sequence can be used, from its first one on."""
    present = there(store, *numbers)
    return [*present, False].index(False)


@pytest.fixture(autouse=True)
def low_water(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcache_backend.store.eviction.LOW_WATER", 0.95)


@pytest.fixture(params=[1, 3], ids=["one folder", "three folders"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return [tmp_path / str(number) for number in range(request.param)]


def bounded(folders: Sequence[Path], pages: int) -> PageStore:
    quota = -(-pages // len(folders)) * FILE
    return open_quiet(*folders, quota_bytes=quota)


def test_a_shared_prompt_stays_while_anybody_uses_it(folders: list[Path]) -> None:
    store = bounded(folders, 60)
    shared = range(5)
    users = [[*shared, *range(100 * u, 100 * u + 10)] for u in range(1, 11)]
    for pages in users:
        store_sequence(store, pages, known=5 if found(store, shared) == 5 else 0)
    assert found(store, users[-1]) == 15


def test_states_at_which_no_hit_ends_go_first(folders: list[Path]) -> None:
    """Each stands for all tokens before it. A state that is there and is written again is used."""
    store = bounded(folders, 24)
    states, pages = keys(range(9)), range(100, 106)
    for number in range(9):
        page, before = [[memory(content(states[number]))]], states[:number]
        assert store.put(NAMESPACE, states[number : number + 1], page, prefix=before, alone=True)
    store_sequence(store, pages)
    store.use(NAMESPACE, states, 8)
    store.put(NAMESPACE, states[3:4], [[memory(content(states[3]))]], prefix=states[:3], alone=True)
    for user in range(2, 4):
        store_sequence(store, range(100 * user, 100 * user + 6))
    assert found(store, pages) == 6
    left = there(store, *range(9))
    assert left[3] and left[8] and sum(left) <= 7


class Meeting(Ops):
    """While the first page is written, or its folder's room looked at, ``others`` do their work."""

    def __init__(self, looking: bool) -> None:
        super().__init__()
        self._looking, self._written = looking, False
        self.others: Callable[[], object] | None = None

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self._written = True
        if not self._looking:
            self._meet()
        return super().write(fd, buffers, offset)

    def free_bytes(self, fd: int) -> int:
        free = super().free_bytes(fd)
        if self._looking and self._written:
            self._meet()
        return free

    def _meet(self) -> None:
        others, self.others, self._written = self.others, None, False
        if others is not None:
            meeting = threading.Thread(target=others)
            meeting.start()
            meeting.join(1.0)  # they may have to wait for a lock that is held here


@pytest.mark.parametrize("when", ["writing", "looking for room", "after each other"])
def test_two_ranks_that_store_their_shares_lose_the_same_pages(
    folders: list[Path], when: str
) -> None:
    table, ops = SegmentTable((Segment(PAGE, 8),)), Meeting(when == "looking for room")
    quota = -(-52 // len(folders)) * (PAGE // 2 + 4096)
    stores = [open_quiet(*folders, quota_bytes=quota, ops=ops) for ops in (ops, None)]
    sequences = [range(15), range(100, 115)]
    stored = threading.Semaphore(0)

    def put_shares(rank: int, names: Sequence[bytes]) -> None:
        shard = Shard(rank, 2)
        parts = [[memory(payload(content(name), table, shard))] for name in names]
        assert all(stores[rank].put(NAMESPACE, names, parts, shard=shard, table=table))
        stored.release()

    for number, names in enumerate(map(keys, sequences)):
        if when == "after each other":
            for rank in (number, 1 - number):
                put_shares(rank, names)
        else:
            ops.others = partial(put_shares, 1, names)
            put_shares(0, names)
        for _ in stores:
            assert stored.acquire(timeout=60)
    assert found(stores[0], sequences[1]) == 15
    assert found(stores[0], sequences[0]) >= 15 - 2 * 3


def test_a_history_of_thousands_of_pages_takes_a_few_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_ops, "_HELD_SECONDS", inf)  # so batches are 128, 256, 256...
    commits: list[object] = []
    store = open_quiet(tmp_path / "store", ops=ops_that(commit=commits.append))
    names, hour_ago = keys(range(2000)), time.time_ns() - HOUR
    ranks = {name: hour_ago - place for place, name in enumerate(names)}
    ranks[key(5000)] = hour_ago - 10**12  # of no history
    with store.disks[0].use() as folder:
        folder.index.insert(
            Entry(PageName(NAMESPACE, name, WHOLE), 4096, PAGE, WRITER, rank)
            for name, rank in ranks.items()
        )
        statements: list[str] = []
        for connection in folder.index._connections:
            assert connection is not None
            connection.set_trace_callback(statements.append)

    def cost(work: Callable[[], object]) -> tuple[int, int]:
        """How many look-ups, and how many changes of the index."""
        commits.clear()
        statements.clear()
        work()
        return sum("SELECT" in statement for statement in statements), len(commits)

    assert cost(lambda: store.exists(NAMESPACE, names)) == (1, 0)
    assert cost(lambda: store.use(NAMESPACE, names)) == (0, 0)
    # How old the oldest page is, how old the last one is, all of them; all again and the totals, a
    # batch at a time, to change their ranks.
    assert cost(store.flush) == (3 + 2 * 9, 9)
    store.use(NAMESPACE, names)
    assert cost(store.flush) == (2, 0)


class Uses(RuleBasedStateMachine):
    """A tree of sequences over three folders; uses, new pages and pauses in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.store = open_quiet(*(self.root / name for name in "abc"))
        self.clock = mock.patch("hcache_backend.store.eviction.time.time_ns", self.now)
        self.clock.start()
        self.time = 10**18
        self.sequences: list[list[int]] = [[0]]
        self.fresh = 1
        store_sequence(self.store, [0])

    def now(self) -> int:
        return self.time

    @rule(nanoseconds=st.sampled_from([1, 10**6, 10**9, 10**12]))
    def pause(self, nanoseconds: int) -> None:
        self.time += nanoseconds

    @rule()
    def save(self) -> None:
        self.store.flush()

    @rule(data=st.data(), behind=st.floats(0, 1), pages=st.integers(1, 5))
    def store_more(self, data: st.DataObject, behind: float, pages: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        prefix = sequence[: 1 + int(behind * (len(sequence) - 1))]
        longer = [*prefix, *range(self.fresh, self.fresh + pages)]
        self.fresh += pages
        store_sequence(self.store, longer, known=len(prefix))
        self.sequences.append(longer)

    @rule(data=st.data(), part=st.floats(0, 1))
    def use(self, data: st.DataObject, part: float) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        used = sequence[: 1 + int(part * (len(sequence) - 1))]
        self.store.use(NAMESPACE, keys(used))

    def teardown(self) -> None:
        self.clock.stop()
        self.store.flush()
        ranks = {}
        for disk in self.store.disks:
            with disk.use() as folder:
                ranks |= {entry.name.key: entry.rank for entry in folder.index.entries()}
        self.store.close()
        shutil.rmtree(self.root)
        for sequence in self.sequences:
            last = [ranks[key(number)] for number in sequence]
            assert last == sorted(set(last), reverse=True), "a page is newer than one before it"


TestUses = Uses.TestCase
TestUses.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def ten_users(store: PageStore, rounds: int = 3) -> list[int]:
    """How many of their 8 pages ten users find in the last round, each in turn storing the rest."""
    for _ in range(rounds):
        found = []
        for first in range(1000, 1080, 8):
            found.append(sum(there(store, *range(first, first + 8))))
            put(store, *range(first, first + 8))
    return found


@pytest.mark.parametrize("hours", [0, 1, 24, -24])
def test_a_clock_that_steps_changes_no_order_of_use(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A store is filled by a clock that is wrong by some hours, which is then set right."""
    real = time.time_ns
    quota = 100 * FILE // len(folders)

    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * HOUR)
    store = open_quiet(*folders, quota_bytes=quota)
    for start in range(0, 120, 8):
        put(store, *range(start, start + 8))
    monkeypatch.setattr(time, "time_ns", real)  # while it is open...
    assert ten_users(store) == [8] * 10
    store.close()

    store = open_quiet(*folders, quota_bytes=quota)  # ...and at the next opening
    for start in range(200, 320, 8):
        put(store, *range(start, start + 8))
    assert not any(there(store, *range(120))), "pages of the wrong time age like all others"
    assert ten_users(store) == [8] * 10


def test_processes_with_different_clocks_agree_on_the_order_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores share a folder; the clock was a day ahead when the second one was opened."""
    real = time.time_ns
    quota = 40 * FILE
    first = open_quiet(tmp_path / "store", quota_bytes=quota)
    monkeypatch.setattr(time, "time_ns", lambda: real() + 24 * HOUR)
    second = open_quiet(tmp_path / "store", quota_bytes=quota, writer=b"writer-2")
    monkeypatch.setattr(time, "time_ns", real)
    put(second, *range(32))
    for start in range(100, 196, 8):  # pages of the first go on top of those of the second
        put(first, *range(start, start + 8))
        assert all(there(first, *range(start, start + 8)))
    assert sum(there(first, *range(32))) == 0
    # Used by the first, stored by the second meanwhile: what was used last stays.
    put(second, *range(300, 308))
    first.use(NAMESPACE, keys(range(188, 196)))
    first.flush()
    put(second, *range(308, 324))
    assert all(there(first, *range(188, 196)))
