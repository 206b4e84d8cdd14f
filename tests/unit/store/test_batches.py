"""Many pages in one call: what is done once for all of them, and what a time limit leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_testing import NAMESPACE, PAGE, Ops, content, key, memory, open_quiet, put


def test_pages_whose_turn_to_be_read_comes_too_late_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0

    class SlowOps(Ops):
        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal passed
            passed = 1e6
            return super().read(fd, buffers, offset)

    store = open_quiet(tmp_path / "store", ops=SlowOps())
    put(store, 1, 2)
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    monkeypatch.setattr("hcache_backend.store.disk.time", clock)
    targets = [[memory(PAGE)], [memory(PAGE)]]
    found = store.get(NAMESPACE, [key(1), key(2)], targets)
    assert found == [True, False], "what has begun is waited for"
    assert [bytes(target) for [target] in targets] == [content(key(1)), bytes(PAGE)]


def test_threads_wake_and_the_index_changes_once_for_many_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingOps(Ops):
        commits = 0

        def commit(self, transaction: Any) -> None:
            self.commits += 1
            super().commit(transaction)

    ops = CountingOps()
    store = open_quiet(tmp_path / "store", ops=ops, io_threads=2)
    disk, woken = store.disks[0], []
    for pool in (disk.readers, disk.writers):

        def submit(work: Any, start: Any = pool.submit) -> Any:
            woken.append(work)
            return start(work)

        monkeypatch.setattr(pool, "submit", submit)
    ops.commits = 0
    assert put(store, *range(64)) == [True] * 64
    assert ops.commits == 1
    keys = [key(number) for number in range(64)]
    targets = [[memory(PAGE)] for _ in keys]
    assert store.get(NAMESPACE, keys, targets) == [True] * 64
    assert [bytes(target) for [target] in targets] == [content(name) for name in keys]
    assert len(woken) == 4, "two threads write, two read"
