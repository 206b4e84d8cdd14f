"""Beginnings of conversations that L3 lacks, and the backups that are waited for."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch

from hcache_backend.ranks import Turn
from hcache_backend.sglang import backups as backups_module
from hcache_backend.sglang import scheduler
from hcache_backend.sglang.backups import Backups
from tests.kit.turns import work

KEYS = [f"{i:064x}" for i in range(400)]
NODE = 50  # pages


class Cache:
    """A radix tree with one branch: node i has the i-th fifty of the pages. The device has all of
    them, but for those of ``evicted``. Backups to L3 end in the third look at events.

    Attributes:
        l3: Nodes that L3 has.
        given: Nodes in the order in which HiCache gave them to L3.
    """

    page_size, refused, full, buffer_pipeline = 64, False, False, None
    is_write_back = True

    def __init__(self) -> None:
        self.ongoing_backup: dict[int, Any] = {}
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_load_back: dict[int, Any] = {}
        self.ongoing_prefetch: dict[int, Any] = {}
        self.nodes = {i: KEYS[i * NODE : (i + 1) * NODE] for i in range(8)}
        self.evicted, self.in_host_memory = set[int](), set[int]()
        self.l3, self.given = set[int](), list[int]()
        self.held = set[int]()  # nodes whose copy to host memory takes longer
        self.tree_core = SimpleNamespace(
            snapshot_buffer_backup=self._snapshot, get_hash_values=self.nodes.__getitem__
        )
        self.turns = 0
        self.backups: Backups | None = None

    def check_hicache_events(self) -> None:
        self.turns += 1
        if self.turns == 3:
            self.ongoing_backup.clear()

    def _all_reduce_attn_groups(self, flags: Any, op: Any) -> None:
        pass

    def is_backuped(self, node: int) -> bool:
        return node in self.in_host_memory

    def _snapshot(self, node: int, _prefix: bool) -> Any:
        if node in self.evicted or node not in self.nodes:
            return None
        return SimpleNamespace(
            hash_values=self.nodes[node],
            parent_is_root=node == 0,
            parent_node_id=node - 1,
            parent_last_hash=None if node == 0 else self.nodes[node - 1][-1],
        )

    def _execute_and_commit_kv_backup(self, action: Any) -> int:
        if self.refused:
            return 0
        self.in_host_memory.update(action.node_ids)
        [node] = action.node_ids
        self.ongoing_write_through[node] = SimpleNamespace(publish_node_ids=[node])
        return NODE

    def write_backup_storage(self, node: int) -> None:
        self.given.append(node)
        self.ongoing_backup[len(self.given)] = (node, None)
        if self.backups is not None:
            self.backups.note_given(self, node)

    def turn(
        self, backups: Backups, agree: Callable[[Any, Any], None] = lambda numbers, op: None
    ) -> None:
        """The copies to host memory are there, and L3 has written what it may."""
        self.backups = backups
        for node in self.ongoing_write_through.keys() - self.held:
            del self.ongoing_write_through[node]
            self.write_backup_storage(node)
        for operation, (node, _) in self.ongoing_backup.items():
            lacks = [before for before in range(node) if before not in self.l3]
            if not lacks:
                self.l3 |= set() if self.full else {node}
            else:
                backups.missing_pages[operation] = lacks[0] * NODE
        backups.note_answers(
            self, [SimpleNamespace(id=operation) for operation in self.ongoing_backup]
        )
        self.ongoing_backup.clear()
        turn = Turn(self)
        backups.propose_missing_pages(turn)
        turn.agree(agree)
        backups.apply_missing_pages(self)


def finish(cache: Cache, stages: int = 1) -> None:
    backups = Backups(stages)
    backups.propose_missing_pages(
        Turn(cache)
    )  # a turn of the scheduler, before anything is written
    backups.finish()


def test_backups_end_before_weights_change() -> None:
    cache = Cache()
    finish(cache)
    assert cache.turns == 0
    cache.ongoing_backup = {1: None}
    finish(cache)
    assert (cache.turns, cache.ongoing_backup) == (3, {})


def test_backups_end_before_memory_is_released() -> None:
    """SGLang asserts that none runs, and its server would end."""
    cache: Any = Cache()
    released = list[int]()
    backups = Backups(1)
    backups.propose_missing_pages(
        Turn(cache)
    )  # a turn of the scheduler, before anything is written
    cache.ongoing_backup = {1: None}
    cache.cache_controller = SimpleNamespace(storage_backend=SimpleNamespace(backups=backups))

    def release(updater: Any, asked: str) -> str:
        released.append(len(cache.ongoing_backup))
        return asked

    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=cache))
    assert scheduler.before_release(release, updater, "kv_cache") == "kv_cache"
    assert (cache.turns, released) == (3, [0])
    cache.cache_controller = None  # another L3, or none
    updater.scheduler = None
    assert scheduler.before_release(release, updater, "weights") == "weights"


def test_nobody_waits_for_a_backup_that_does_not_end(monkeypatch: MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(backups_module, "_FINISH_SECONDS", 0.05)
    cache = Cache()
    cache.ongoing_write_through = {1: None}
    finish(cache)
    assert cache.ongoing_write_through and "did not end" in caplog.text


@pytest.mark.parametrize(("stages", "busy"), [(1, True), (2, False)])
def test_requests_and_pipeline_stages_are_not_waited_for(stages: int, busy: bool) -> None:
    cache = Cache()
    cache.ongoing_backup = {1: None}
    cache.ongoing_prefetch = {2: None} if busy else {}
    finish(cache, stages)
    assert cache.turns == 0
    assert stages == 1 or Backups(stages).stop(cache) is False


@pytest.fixture
def heads(monkeypatch: MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {"heads_put": 0, "heads_not_put": 0}

    def count(event: str, number: int) -> None:
        counts[event] += number

    monkeypatch.setattr(backups_module.metrics.PAGES, "count", count)
    return counts


def test_beginnings_are_put_first_and_some_at_a_time(heads: dict[str, int]) -> None:
    cache, backups = Cache(), Backups(1)
    cache.in_host_memory = {2, 5}
    cache.turn(backups)
    cache.write_backup_storage(5)
    given = []
    for _ in range(6):
        given.append(len(cache.given))
        cache.turn(backups)
    assert cache.l3 == {0, 1, 2, 3, 4, 5}
    assert cache.given == [5, 0, 1, 2, 3, 4, 5]
    assert given == [1, 1, 4, 7, 7, 7]  # node 2 waits until 0 and 1 are in host memory
    assert heads == {"heads_put": 5 * NODE, "heads_not_put": 0}


def test_nodes_that_the_device_evicts_one_after_the_other_are_put_from_the_first_one_on(
    heads: dict[str, int],
) -> None:
    """As ``write_back`` does: it begins with the end."""
    cache, backups = Cache(), Backups(1)
    cache.turn(backups)
    for node in reversed(range(4)):
        cache.in_host_memory.add(node)
        cache.write_backup_storage(node)
        cache.evicted.add(node)
    for _ in range(8):
        cache.turn(backups)
    assert cache.l3 == {0, 1, 2, 3}
    assert heads["heads_not_put"] == 0


def test_a_beginning_that_l3_lost_is_put_again(heads: dict[str, int]) -> None:
    cache, backups = Cache(), Backups(1)
    cache.in_host_memory = {0, 1, 2}
    cache.l3 = {1}
    cache.turn(backups)
    cache.write_backup_storage(2)
    for _ in range(3):
        cache.turn(backups)
    assert cache.l3 == {0, 1, 2}


def test_a_beginning_without_room_in_host_memory_is_tried_with_the_next_end(
    heads: dict[str, int],
) -> None:
    cache, backups = Cache(), Backups(1)
    cache.refused, cache.in_host_memory = True, {2, 3}
    cache.turn(backups)
    cache.write_backup_storage(2)
    for _ in range(4):
        cache.turn(backups)
    assert heads == {"heads_put": 0, "heads_not_put": 2 * NODE}
    assert cache.given == [2] and not cache.l3
    cache.refused = False
    cache.write_backup_storage(3)
    for _ in range(4):
        cache.turn(backups)
    assert cache.l3 == {0, 1, 2, 3}


@pytest.mark.parametrize("gone", ["the node", "its number is another's", "a node before it"])
def test_what_is_not_in_the_tree_any_more_is_not_put(gone: str, heads: dict[str, int]) -> None:
    cache, backups = Cache(), Backups(1)
    cache.in_host_memory = {0, 1, 2, 3}
    cache.turn(backups)
    cache.write_backup_storage(3)
    if gone == "a node before it":
        cache.evicted.add(1)
    else:
        cache.turn(backups)  # as many nodes as a turn puts
        if gone == "the node":
            del cache.nodes[3]
        else:
            cache.nodes[3] = cache.nodes[4]
    for _ in range(3):
        cache.turn(backups)
    assert cache.l3 == (set() if gone == "a node before it" else {0, 1, 2})


def test_while_l3_takes_nothing_beginnings_are_put_now_and_then(heads: dict[str, int]) -> None:
    cache, backups = Cache(), Backups(1)
    cache.in_host_memory = {0, 1}
    cache.turn(backups)
    cache.full = True
    for _ in range(300):
        cache.write_backup_storage(1)
        cache.turn(backups)
    begun = cache.given.count(0)
    assert 2 <= begun <= 300 / 50
    cache.full = False
    for _ in range(100):
        cache.write_backup_storage(1)
        cache.turn(backups)
    assert cache.l3 == {0, 1}


def test_a_node_whose_state_is_on_its_way_to_host_memory_is_put_behind_that() -> None:
    """L3 would keep the bytes that were there before."""
    cache, backups = Cache(), Backups(1)
    cache.in_host_memory = {0, 1}
    cache.turn(backups)
    cache.write_backup_storage(1)
    cache.ongoing_write_through[5] = SimpleNamespace(publish_node_ids=[0, 5])
    cache.held = {5}
    for _ in range(3):
        cache.turn(backups)
        assert cache.given == [1]
    cache.held = set()
    for _ in range(3):
        cache.turn(backups)
    assert cache.l3 >= {0, 1}


def test_ranks_put_what_one_of_them_lacks() -> None:
    cache, backups = Cache(), Backups(1)
    cache.in_host_memory = {0, 1, 2}
    cache.turn(backups)
    for node in (0, 1, 2):
        cache.write_backup_storage(node)

    def another_lacks_the_first(numbers: Any, _: Any) -> None:
        numbers[1] = min(int(numbers[1]), 0)

    cache.turn(backups, another_lacks_the_first)
    assert cache.given == [0, 1, 2, 0, 1]
    cache.turn(backups)
    assert not backups._answered and not backups._chains


class Fork(Cache):
    """Node 4 is behind node 1, as node 2 is."""

    def _snapshot(self, node: int, prefix: bool) -> Any:
        found = super()._snapshot(node, prefix)
        if node == 4:
            found.parent_node_id = 1
        return found


def test_a_beginning_of_two_ends_is_in_a_chain_until_both_are_put(heads: dict[str, int]) -> None:
    cache, backups = Fork(), Backups(1)
    cache.in_host_memory = {0, 1, 2, 4}
    cache.turn(backups)
    cache.write_backup_storage(2)
    cache.write_backup_storage(4)
    cache.turn(backups)  # the nodes of one end are put
    [chain] = backups._chains
    assert [node.node_id for node in chain] == [4, 1, 0]
    assert all(node in backups._chained for node in chain)
    assert +backups._chained == Counter(chain)
    cache.turn(backups)
    assert not backups._chains and not backups._chained


class Forest(Cache):
    """Trees of two nodes each, whose ends L3 does not take: it lacks their beginnings."""

    def __init__(self, trees: int) -> None:
        super().__init__()
        self.nodes.update({node: [f"{node:064x}"] for node in range(2 * trees)})
        self.in_host_memory = {*range(2 * trees)}
        self.ongoing_write_through[-1] = SimpleNamespace(publish_node_ids=[0])
        self.held = {-1}  # nothing is put before it is there

    def _snapshot(self, node: int, _prefix: bool) -> Any:
        first = node % 2 == 0
        found = SimpleNamespace(hash_values=self.nodes[node])
        found.parent_is_root, found.parent_node_id = first, node - 1
        return found


def test_a_turn_costs_the_same_however_many_beginnings_are_to_be_put() -> None:
    found = {}
    for trees in (64, 1024):
        cache, backups = Forest(trees + 64), Backups(1)
        cache.turn(backups)
        for tree in range(trees + 64):
            cache.write_backup_storage(2 * tree + 1)
        for _ in range(trees // 32):
            cache.turn(backups)
        assert len(backups._chains) == trees
        found[trees] = work(lambda cache=cache, backups=backups: cache.turn(backups))  # type: ignore[misc]
        assert len(backups._chains) == trees + 32
    assert len({*found.values()}) == 1, found


def test_the_oldest_known_node_is_forgotten(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(backups_module, "_NODES", 2)
    cache, backups = Cache(), Backups(1)
    for node in range(4):
        backups.note_given(cache, node)
    assert [*backups._given] == [2, 3]


def test_pipeline_stages_put_nothing() -> None:
    assert not Backups(2).enabled
