"""Nodes of L2 that L3 has lost pages of are given to it again: which ones, when, and how many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.engine import repairs as repairs_module
from hcache_backend.engine.repairs import TURNS, Repairs
from hcache_backend.page import key_bytes
from hcache_backend.store import Gap

KEYS = [f"{i:064x}" for i in range(400)]
NODE = 50  # pages
TIME = 10**18


class Store:
    """Says what is missing, as a page store does."""

    def __init__(self) -> None:
        self.gaps: list[Gap] = []

    def take_gaps(self) -> list[Gap]:
        taken, self.gaps = self.gaps, []
        return taken

    def lacks(self, *places: int) -> None:
        self.gaps.append(Gap([key_bytes(key) for key in KEYS], list(places), TIME))


class Cache:
    """A radix tree with one branch: node i has the i-th fifty of the pages."""

    def __init__(self) -> None:
        self.ongoing_backup: dict[int, Any] = {}
        self.nodes = {i: KEYS[i * NODE : (i + 1) * NODE] for i in range(8)}
        self.tree_core = SimpleNamespace(get_hash_values=self.nodes.__getitem__)
        self.on_device_only: set[int] = set()
        self.written: list[int] = []
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_load_back: dict[int, Any] = {}
        self.ongoing_prefetch: dict[int, Any] = {}
        self.turns = 0

    def check_hicache_events(self) -> None:
        self.turns += 1
        if self.turns == 3:
            self.ongoing_backup.clear()

    def _all_reduce_attn_groups(self, flags: Any, op: Any) -> None:
        pass

    def get_last_hash_value(self, node: int) -> str | None:
        return self.nodes[node][-1]

    def is_backuped(self, node: int) -> bool:
        return node not in self.on_device_only

    def write_backup_storage(self, node: int) -> None:
        self.written.append(node)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"put_again": 0, "not_put_again": 0}

    def count(event: str, number: int) -> None:
        counts[event] += number

    monkeypatch.setattr(repairs_module.metrics.PAGES, "count", count)
    return counts


def idle(repairs: Repairs, cache: Cache) -> list[int]:
    """The nodes that one look at what is missing puts."""
    cache.written = []
    for _ in range(TURNS):
        repairs.turn(cache)
    return cache.written


def seen(store: Store, cache: Cache, stages: int = 1) -> Repairs:
    repairs = Repairs(store.take_gaps, stages)
    for node in cache.nodes:
        repairs.saw(cache, node)
    return repairs


def test_nodes_are_put_in_the_order_of_the_sequence_and_some_at_a_time(
    counted: dict[str, int],
) -> None:
    store, cache = Store(), Cache()
    repairs = seen(store, cache)
    assert idle(repairs, cache) == []
    store.lacks(10, 60, 61, 110, 160)
    assert idle(repairs, cache) == [0, 1, 2]  # 150 pages
    assert [repairs.last_use([key]) for key in KEYS[:151]] == [*150 * [TIME], None]
    assert idle(repairs, cache) == [3]
    assert idle(repairs, cache) == []
    assert counted == {"put_again": 5, "not_put_again": 0}


def test_nodes_that_are_gone_or_on_the_device_only_are_counted(counted: dict[str, int]) -> None:
    store, cache = Store(), Cache()
    repairs = seen(store, cache)
    cache.on_device_only = {0}
    del cache.nodes[1]
    cache.nodes[2] = KEYS[:3]  # the number of another node by now
    for first in (10, 60, 110):
        store.lacks(first, 160)
    assert idle(repairs, cache) == []
    assert counted == {"put_again": 0, "not_put_again": 6}


def test_nothing_is_put_behind_a_page_that_no_known_node_has(counted: dict[str, int]) -> None:
    store, cache = Store(), Cache()
    repairs = Repairs(store.take_gaps, 1)
    repairs.saw(cache, 0)
    store.lacks(10, 60, 61)
    assert idle(repairs, cache) == [0]
    assert counted == {"put_again": 1, "not_put_again": 2}


def test_a_node_that_is_being_written_is_waited_for(counted: dict[str, int]) -> None:
    store, cache = Store(), Cache()
    repairs = seen(store, cache)
    store.lacks(10)
    cache.ongoing_backup = {1: None}
    assert idle(repairs, cache) == []
    cache.ongoing_backup = {}
    assert idle(repairs, cache) == [0]


def test_pipeline_stages_which_would_have_to_agree_put_none(counted: dict[str, int]) -> None:
    store, cache = Store(), Cache()
    repairs = seen(store, cache, stages=2)
    store.lacks(10)
    assert idle(repairs, cache) == []


def test_backups_end_before_weights_change() -> None:
    cache = Cache()
    repairs = seen(Store(), cache)
    repairs.finish()
    assert cache.turns == 0
    cache.ongoing_backup = {1: None}
    repairs.finish()
    assert (cache.turns, cache.ongoing_backup) == (3, {})


def test_nobody_waits_for_a_backup_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(repairs_module, "_FINISH_SECONDS", 0.05)
    cache = Cache()
    cache.ongoing_write_through = {1: None}
    seen(Store(), cache).finish()
    assert cache.ongoing_write_through and "did not end" in caplog.text


@pytest.mark.parametrize(("stages", "busy"), [(1, True), (2, False)])
def test_requests_and_pipeline_stages_are_not_waited_for(stages: int, busy: bool) -> None:
    cache = Cache()
    cache.ongoing_backup = {1: None}
    cache.ongoing_prefetch = {2: None} if busy else {}
    seen(Store(), cache, stages).finish()
    assert cache.turns == 0


class Device(Cache):
    """The same branch under write_back, all on the device; backups end when events are checked."""

    is_write_back, page_size, tree_components, refused = True, 64, ("full",), False

    def __init__(self) -> None:
        super().__init__()
        self.backed_up: list[int] = []
        self.on_device_only = set(self.nodes)
        self.tree_core.snapshot_buffer_backup = self._snapshot

    def _snapshot(self, node: int, _prefix: bool) -> Any:
        before = None if node == 0 else self.nodes[node - 1][-1]
        return SimpleNamespace(
            hash_values=self.nodes[node],
            parent_is_root=node == 0,
            parent_node_id=node - 1,
            parent_last_hash=before,
        )

    def _execute_and_commit_kv_backup(self, action: Any) -> int:
        if self.refused:
            return 0
        self.backed_up += action.node_ids
        self.on_device_only -= set(action.node_ids)
        return NODE


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {"heads_put": 0, "heads_not_put": 0}

    def count(event: str, number: int) -> None:
        counts[event] += number

    monkeypatch.setattr(repairs_module.metrics.PAGES, "count", count)
    return counts


def test_what_is_before_a_written_node_is_put_from_its_beginning_on_some_at_a_time(
    heads: dict[str, int],
) -> None:
    cache, repairs = Device(), Repairs(list, 1)
    repairs.wrote(cache, 5)
    repairs.put_heads(cache)
    assert cache.backed_up == [0, 1, 2]  # 150 pages
    cache.ongoing_write_through = {2: None}
    repairs.put_heads(cache)
    assert cache.backed_up == [0, 1, 2]  # these are still on their way
    cache.ongoing_write_through = {}
    repairs.put_heads(cache)
    repairs.wrote(cache, 7)
    repairs.put_heads(cache)
    assert cache.backed_up == [0, 1, 2, 3, 4, 5, 6]
    assert heads == {"heads_put": 7 * NODE, "heads_not_put": 0}
    repairs.forget()  # L3 was cleared, and host memory has them: HiCache writes them no more
    repairs.wrote(cache, 7)
    repairs.put_heads(cache)
    assert len(cache.backed_up) == 7


def test_heads_without_room_in_host_memory_are_counted_and_tried_with_the_next_end(
    heads: dict[str, int],
) -> None:
    cache, repairs = Device(), Repairs(list, 1)
    cache.refused = True
    repairs.wrote(cache, 2)
    repairs.put_heads(cache)
    repairs.put_heads(cache)
    assert heads == {"heads_put": 0, "heads_not_put": 2 * NODE}
    cache.refused = False
    repairs.wrote(cache, 2)
    repairs.put_heads(cache)
    assert cache.backed_up == [0, 1]


@pytest.mark.parametrize("how", ["stages", "write_through", "pools"])
def test_heads_are_left_alone_where_not_all_ranks_would_put_the_same(how: str) -> None:
    cache, repairs = Device(), Repairs(list, 2 if how == "stages" else 1)
    cache.is_write_back = how != "write_through"
    cache.tree_components = ("full", "mamba") if how == "pools" else ("full",)
    repairs.wrote(cache, 5)
    repairs.put_heads(cache)
    assert cache.backed_up == []


def test_what_is_remembered_of_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs_module, "_NODES", 2)
    store, cache = Store(), Cache()
    repairs = seen(store, cache)
    assert list(repairs._nodes) == [key_bytes(cache.nodes[node][-1]) for node in (6, 7)]


def test_a_look_for_what_is_missing_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[Gap]:
        raise RuntimeError("a test's fault")

    cache = Cache()
    repairs = Repairs(broken, 1)
    repairs.saw(cache, 0)
    assert idle(repairs, cache) == []
    assert "pages that L3 lacks could not be looked for" in caplog.text


def test_without_repairs_nothing_is_waited_for_at_the_end() -> None:
    assert Repairs(Store().take_gaps, 2).stop(Cache()) is False
