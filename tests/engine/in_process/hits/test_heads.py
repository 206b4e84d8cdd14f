"""Heads that write_back would not write, and the backups that are waited for."""

from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch

from hcache_backend.sglang import backups as backups_module
from hcache_backend.sglang import scheduler
from hcache_backend.sglang.backups import Backups

KEYS = [f"{i:064x}" for i in range(400)]
NODE = 50  # pages


class Cache:
    """A radix tree with one branch, all on the device: node i has the i-th fifty of the pages.
    Backups to L3 end in the third look at events."""

    is_write_back, page_size, tree_components, refused = True, 64, ("full",), False

    def __init__(self) -> None:
        self.ongoing_backup: dict[int, Any] = {}
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_load_back: dict[int, Any] = {}
        self.ongoing_prefetch: dict[int, Any] = {}
        self.nodes = {i: KEYS[i * NODE : (i + 1) * NODE] for i in range(8)}
        self.tree_core = SimpleNamespace(snapshot_buffer_backup=self._snapshot)
        self.backed_up: list[int] = []
        self.turns = 0

    def check_hicache_events(self) -> None:
        self.turns += 1
        if self.turns == 3:
            self.ongoing_backup.clear()

    def _all_reduce_attn_groups(self, flags: Any, op: Any) -> None:
        pass

    def is_backuped(self, node: int) -> bool:
        return node in self.backed_up

    def _snapshot(self, node: int, _prefix: bool) -> Any:
        return SimpleNamespace(
            hash_values=self.nodes[node],
            parent_is_root=node == 0,
            parent_node_id=node - 1,
            parent_last_hash=None if node == 0 else self.nodes[node - 1][-1],
        )

    def _execute_and_commit_kv_backup(self, action: Any) -> int:
        if self.refused:
            return 0
        self.backed_up += action.node_ids
        return NODE


def finish(cache: Cache, stages: int = 1) -> None:
    backups = Backups(stages)
    backups.put_heads(cache)
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
    backups.put_heads(cache)
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


def test_heads_are_put_from_their_beginning_on_some_at_a_time(heads: dict[str, int]) -> None:
    cache, backups = Cache(), Backups(1)
    backups.wrote(cache, 5)
    backups.put_heads(cache)
    assert cache.backed_up == [0, 1, 2]  # 150 pages
    cache.ongoing_write_through = {2: None}
    backups.put_heads(cache)
    assert cache.backed_up == [0, 1, 2]  # these are still on their way
    cache.ongoing_write_through = {}
    backups.put_heads(cache)
    backups.wrote(cache, 7)
    backups.put_heads(cache)
    assert cache.backed_up == [0, 1, 2, 3, 4, 5, 6]
    assert heads == {"heads_put": 7 * NODE, "heads_not_put": 0}
    backups.forget()  # L3 was cleared, and host memory has them: HiCache writes them no more
    backups.wrote(cache, 7)
    backups.put_heads(cache)
    assert len(cache.backed_up) == 7


def test_heads_without_room_in_host_memory_are_tried_with_the_next_end(
    heads: dict[str, int],
) -> None:
    cache, backups = Cache(), Backups(1)
    cache.refused = True
    backups.wrote(cache, 2)
    backups.put_heads(cache)
    backups.put_heads(cache)
    assert heads == {"heads_put": 0, "heads_not_put": 2 * NODE}
    cache.refused = False
    backups.wrote(cache, 2)
    backups.put_heads(cache)
    assert cache.backed_up == [0, 1]


@pytest.mark.parametrize("how", ["stages", "write_through", "pools"])
def test_heads_are_left_alone_where_not_all_ranks_would_put_the_same(how: str) -> None:
    cache, backups = Cache(), Backups(2 if how == "stages" else 1)
    cache.is_write_back = how != "write_through"
    cache.tree_components = ("full", "mamba") if how == "pools" else ("full",)
    backups.wrote(cache, 5)
    backups.put_heads(cache)
    assert cache.backed_up == []
