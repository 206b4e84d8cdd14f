"""A shared tier that hangs, fails or is slow, and pages that wait for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from hcache_backend.sglang.runtime import Runtime
from hcache_backend.tiers import tier as shared_tier
from tests.engine.in_process.shared.machines import (
    SECONDS,
    Machine,
    counted,
    held,
    until,
    value_of,
    values,
    wait_for_values,
)
from tests.engine.in_process.test_storage import KEYS


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever opens ``path`` waits until the end of the block."""
    data = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    try:
        yield
    finally:
        writer = os.open(path, os.O_RDWR)  # whoever waits goes on, and reads less than it wants
        path.unlink()
        path.write_bytes(data)
        os.write(writer, b"x")
        os.close(writer)


def test_a_read_that_hangs_is_a_miss_and_the_backend_is_left_alone(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound the read would never return."""
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 0.0)
    first = machine("first")
    second = machine("second", shared={"read_seconds": 0.2})
    given = first.share(0, 1)
    with hanging(value_of(shared, 0)):
        assert second.read(0) == [False]
        before = counted("not_asked")
        assert second.read(1) == [False], "it is still at the first one"
        assert second.storage.batch_exists(KEYS[:2]) == 0
        assert counted("not_asked") == before + 3
    until(lambda: second.read(0, 1) == [True, True], "the backend to be asked again")
    assert torch.equal(second.pool.data[:, :2], given)


def test_what_arrives_late_goes_nowhere(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the page has been given to another one by then."""
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 0.0)
    first, second = machine("first"), machine("second", shared={"read_seconds": 0.2})
    first.share(0)
    late, read = threading.Event(), HiCacheFile.get

    def get(*args: Any) -> Any:
        assert late.wait(SECONDS)
        return read(*args)

    monkeypatch.setattr(HiCacheFile, "get", get)
    assert second.read(0) == [False]
    mine = second.pool.data.clone()
    late.set()
    until(lambda: second.storage.batch_exists(KEYS[:1]) == 1, "the late read to end")
    assert torch.equal(second.pool.data, mine)


def test_after_a_failure_the_backend_is_left_alone_for_a_while(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 1e6)
    first, second = machine("first"), machine("second")
    first.share(0)

    def fail(*args: Any) -> Any:
        raise OSError("stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(HiCacheFile, "batch_exists", fail)
        assert second.storage.batch_exists(KEYS[:1]) == 0
    assert second.storage.batch_exists(KEYS[:1]) == 0
    second.storage._tier._shared._rests_until = 0.0
    assert second.storage.batch_exists(KEYS[:1]) == 1


def test_writes_wait_in_bounded_memory_and_what_is_too_much_is_dropped(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, go_on = held(monkeypatch, HiCacheFile, "set")
    monkeypatch.setattr(shared_tier, "WRITE_SECONDS", 0.1)
    first = machine("first", shared={"buffer_bytes": 3 * 3 * 8192})  # three pages each
    before = counted("dropped_full")
    given = first.write(*range(8))
    assert counted("dropped_full") == before + 5
    first.pool.data.zero_()
    go_on.set()
    wait_for_values(shared, 3)
    second = machine("second")
    assert second.read(0, 1, 2) == [True] * 3, "what the pages were when they were written"
    assert torch.equal(second.pool.data[:, :3], given[:, :3])


def test_a_backend_that_hangs_is_closed_all_the_same(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "CLOSE_SECONDS", 0.2)
    first, second = machine("first"), machine("second", shared={"read_seconds": 0.2})
    first.share(0)
    with hanging(value_of(shared, 0)):
        assert second.read(0) == [False]
        tier = second.storage._tier._shared
        second.storage.close()
        assert tier._reading.hangs


def test_a_long_look_up_stops_in_time_and_what_it_found_is_read(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part would not come in time."""
    monkeypatch.setattr(shared_tier, "_LOOK_UP_PAGES", 1)
    first, second = machine("first"), machine("second")
    first.share(0, 1)
    asked, exists = [], HiCacheFile.batch_exists
    now, clock = [0.0], time.monotonic

    def slow(*args: Any) -> Any:
        asked.append(args)
        now[0] += 0.7 * SECONDS
        return exists(*args)

    monkeypatch.setattr(HiCacheFile, "batch_exists", slow)
    monkeypatch.setattr(shared_tier.time, "monotonic", lambda: clock() + now[0])
    assert second.storage.batch_exists(KEYS[:2]) == 1
    assert len(asked) == 1
    assert second.read(0) == [True]


def test_nothing_is_promised_after_a_look_up_that_failed(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine("first"), machine("second")
    first.share(0, 1)
    monkeypatch.setattr(shared_tier, "_LOOK_UP_PAGES", 1)
    exists = HiCacheFile.batch_exists

    def fail_second(backend: Any, names: Any, *args: Any) -> Any:
        if KEYS[1] in names[0]:
            raise OSError("stale file handle")
        return exists(backend, names, *args)

    monkeypatch.setattr(HiCacheFile, "batch_exists", fail_second)
    assert second.storage.batch_exists(KEYS[:2]) == 0


def test_a_read_is_divided_into_parts_that_have_their_own_time(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row takes 8192 bytes here. What came before the part that hangs counts."""
    monkeypatch.setattr(shared_tier, "_PART_BYTES", 2 * 8192)
    first, second = machine("first"), machine("second", shared={"read_seconds": 3.0})
    given = first.share(*range(6))
    with hanging(value_of(shared, 4)):
        assert second.read(*range(6)) == [True] * 4 + [False] * 2
    assert torch.equal(second.pool.data[:, :4], given[:, :4])


def test_a_batch_of_more_pages_than_there_is_room_for_is_written_whole(
    machine: Callable[..., Machine], shared: Path
) -> None:
    """As long as the backend takes them."""
    first = machine("first", shared={"buffer_bytes": 3 * 2 * 8192})  # two pages each
    before = counted("dropped_full")
    first.storage.batch_set_v1(KEYS, first.pool.fill(range(8)))
    wait_for_values(shared, 8)
    assert counted("dropped_full") == before
    second = machine("second")
    assert second.read(*range(8)) == [True] * 8
    assert torch.equal(second.pool.data[:, :8], first.pool.data[:, :8])


def test_what_is_distrusted_while_it_is_stored_is_not_shared(
    machine: Callable[..., Machine],
    shared: Path,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = machine("first")
    tier = first.storage._tier.local
    put = tier.put

    def distrusted(*args: Any, **options: Any) -> Any:
        stored = put(*args, **options)
        runtime.begin_quarantine("K and V differ")
        until(lambda: "that this server wrote were deleted" in caplog.text, "pages to be deleted")
        return stored

    monkeypatch.setattr(tier, "put", distrusted)
    first.write(0)
    first.storage.close()
    assert values(shared) == []
    assert "Delete the values there whose names begin with hcache-" in caplog.text
