"""What the store promises to the engine."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_testing import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE,
    WRITER,
    Ops,
    assert_sound,
    config,
    content,
    get,
    key,
    memory,
    names,
    open_quiet,
    page_files,
    put,
)

from hcache_backend.store import PageStore
from hcache_backend.store.folder import LANES

FILE = PAGE + 4096


def test_pages_come_back_also_after_reopening(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    assert put(store, *range(20)) == [True] * 20
    assert get(store, 7) == content(key(7))
    store.close()
    store = open_quiet(tmp_path / "store")
    assert store.exists(NAMESPACE, [key(7), key(99)]) == [True, False]
    assert get(store, 7) == content(key(7))
    assert get(store, 7, OTHER_NAMESPACE) is None


def test_the_background_looks_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcache_backend.store.maintenance._PAUSE_SECONDS", 0.05)
    store = PageStore(config(tmp_path / "store"), WRITER)
    store.put(NAMESPACE, [key(1)], [[memory(content(key(1)))]])
    deadline = time.monotonic() + 240
    while not store.stats.syncs:
        assert time.monotonic() < deadline, "the batch was never synced"
        time.sleep(0.01)
    before = threading.active_count()
    store.close()
    store.close()
    assert threading.active_count() < before
    assert store.exists(NAMESPACE, [key(1)]) == [False], "a closed store has only misses"
    assert store.put(NAMESPACE, [key(1)], [[memory(PAGE)]]) == [False]


def test_memory_may_change_as_soon_as_put_returns(memory_path: Path) -> None:
    store = open_quiet(memory_path / "store", io_threads=4)
    views = [memory(PAGE, shift) for shift in (0, 0, 64, 0)]
    for round_number in range(1000):
        numbers = range(round_number * 4, round_number * 4 + 4)
        for number, view in zip(numbers, views, strict=True):
            view[:] = content(key(number))
        keys = [key(number) for number in numbers]
        assert all(store.put(NAMESPACE, keys, [[view] for view in views]))
        for view in views:
            view[:] = b"\xee" * PAGE
    for number in range(0, 4000, 7):
        assert get(store, number) == content(key(number))
    store.close()


def test_memory_may_change_after_a_put_that_ran_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowOps(Ops):
        gate = threading.Event()

        def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
            if not self.gate.wait(240):
                raise OSError(errno.EIO, "the test forgot the gate")
            return super().write(fd, buffers, offset)

    SlowOps.gate.set()
    monkeypatch.setattr("hcache_backend.store.page_store.WRITE_SECONDS", 0.2)
    store = open_quiet(tmp_path / "store", ops=SlowOps())
    SlowOps.gate.clear()
    view = memory(content(key(1)))
    assert store.put(NAMESPACE, [key(1), key(2)], [[view], [view]]) == [False, False]
    assert store.stats.pages_dropped_late == 2, "the time limit holds: the gate is closed"
    view[:] = bytes(PAGE)
    SlowOps.gate.set()
    store.disks[0].writers.shutdown(wait=True)
    assert get(store, 1) is None, "what was written too late is no page"
    assert_sound(store)


def test_a_bug_below_is_a_miss_not_a_hanging_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, 1)

    def raise_error(*ignored: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("hcache_backend.store.folder.Folder.read_page", raise_error)
    monkeypatch.setattr("hcache_backend.store.folder.Folder.write_page", raise_error)
    assert get(store, 1) is None
    assert put(store, 2) == [False]


def test_neighbours_go_to_different_folders(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    store = open_quiet(*folders)
    put(store, *range(128))
    assert [len(page_files(folder)) for folder in folders] == [32] * 4
    for start in range(0, 128, 4):
        places = []
        for number in range(start, start + 4):
            [place] = [
                place
                for place, disk in enumerate(store.disks)
                if disk.lookup(NAMESPACE, [key(number)])[0]
            ]
            places.append(place)
        assert sorted(places) == [0, 1, 2, 3]


def test_the_quota_holds_and_the_least_recently_used_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hcache_backend.store.eviction.LOW_WATER", 0.7)
    store = open_quiet(tmp_path / "store", quota_bytes=10 * FILE)
    for number in range(10):
        put(store, number)
    assert store.stats.pages_evicted == 0
    for number in (0, 1, 2):
        store.use(NAMESPACE, [key(number)])
    put(store, 10)
    assert store.stats.pages_evicted == 4, "down to the low water mark, the new page included"
    present = store.exists(NAMESPACE, [key(number) for number in range(11)])
    assert present == [True] * 3 + [False] * 4 + [True] * 4
    assert len(page_files(tmp_path / "store")) == 7
    assert_sound(store)


def test_recency_survives_reopening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, *range(10))
    store.use(NAMESPACE, [key(0)])
    store.close()
    monkeypatch.setattr("hcache_backend.store.eviction.LOW_WATER", 0.2)
    store = open_quiet(tmp_path / "store", quota_bytes=10 * FILE)
    put(store, 10)
    assert store.exists(NAMESPACE, [key(0), key(10)]) == [True, True]
    assert len(page_files(tmp_path / "store")) == 2


def test_free_space_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class SmallDisk(Ops):
        def free_bytes(self, fd: int) -> int:
            return 10 * FILE - sum(path.stat().st_size for path in page_files(tmp_path / "store"))

    store = open_quiet(tmp_path / "store", ops=SmallDisk(), min_free_bytes=4 * FILE)
    for number in range(20):
        assert put(store, number) == [True]
        assert len(page_files(tmp_path / "store")) <= 6
    assert get(store, 19) == content(key(19))
    store.close()
    store = open_quiet(tmp_path / "store", ops=SmallDisk(), min_free_bytes=100 * FILE)
    assert put(store, 30) == [False]
    assert store.stats.pages_dropped_full == 1
    assert caplog.messages == [
        f"hcache: {tmp_path / 'store'} is full: option 'min_free_bytes' keeps {100 * FILE:,} bytes "
        f"of its file system free, and with {FILE:,} more {9 * FILE:,} would be; new pages are not "
        "stored"
    ]


def test_a_quota_that_is_used_up_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class StuckOps(Ops):
        def unlink(self, name: str, dir_fd: int) -> None:
            if name.endswith(".page"):
                raise PermissionError(errno.EPERM, "Operation not permitted")
            super().unlink(name, dir_fd)

    store = open_quiet(tmp_path / "store", ops=StuckOps(), quota_bytes=2 * FILE + 1)
    assert put(store, 0, 1) == [True, True]
    assert put(store, 2) == [False]
    assert (
        f"hcache: {tmp_path / 'store'} is full: option 'quota_bytes' allows {2 * FILE + 1:,} bytes "
        f"of page files, and with {FILE:,} more there would be {3 * FILE:,}; new pages are not "
        "stored"
    ) in caplog.messages


def test_a_folder_that_can_hold_no_page_is_named_with_its_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SmallDisk(Ops):
        def free_bytes(self, fd: int) -> int:
            return 3 * FILE - sum(path.stat().st_size for path in page_files(tmp_path / "store"))

    def told(**bounds: int) -> list[str]:
        caplog.clear()
        store = open_quiet(tmp_path / "store", ops=SmallDisk(), **bounds)
        store.check_room(PAGE)
        store.close()
        return [line.removeprefix(f"hcache: {tmp_path / 'store'} ") for line in caplog.messages]

    put(open_quiet(tmp_path / "store"), 0, 1, 2)
    assert told(quota_bytes=FILE, min_free_bytes=2 * FILE) == []
    assert told(quota_bytes=FILE - 1) == [
        f"can hold no page: option 'quota_bytes' allows {FILE - 1:,} bytes of page files, and with "
        f"{FILE:,} more there would be {FILE:,}"
    ]
    assert told(min_free_bytes=2 * FILE + 1) == [
        f"can hold no page: option 'min_free_bytes' keeps {2 * FILE + 1:,} bytes of its file "
        f"system free, and with {FILE:,} more {2 * FILE:,} would be"
    ]


def test_a_folder_is_out_of_use_for_now_only_where_others_are_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    blocked = [tmp_path / "file" / name for name in "ab"]
    with pytest.raises(NotADirectoryError):
        open_quiet(*blocked)
    assert caplog.messages == []
    open_quiet(tmp_path / "store", *blocked)
    assert [line.split(":")[1] for line in caplog.messages] == [
        f" {path} cannot be used for now" for path in blocked
    ]


def test_a_file_that_cannot_be_removed_does_not_stop_eviction(tmp_path: Path) -> None:
    stuck = key(0).hex()

    class StuckOps(Ops):
        def unlink(self, name: str, dir_fd: int) -> None:
            if stuck in name:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            super().unlink(name, dir_fd)

    store = open_quiet(tmp_path / "store", ops=StuckOps(), quota_bytes=5 * FILE)
    for number in range(30):
        assert put(store, number) == [True]
    assert get(store, 0) == content(key(0)), "it stays a page"
    assert store.stats.evict_errors > 0
    assert_sound(store)


def test_a_page_that_is_evicted_while_it_is_read_is_still_right(tmp_path: Path) -> None:
    class EvictingOps(Ops):
        store: PageStore | None = None

        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.store is not None:
                self.store.drop(NAMESPACE)
                put(self.store, *range(50, 55))
            return super().read(fd, buffers, offset)

    ops = EvictingOps()
    store = open_quiet(tmp_path / "store", ops=ops)
    put(store, 1)
    ops.store = store
    assert get(store, 1) == content(key(1))
    ops.store = None
    assert get(store, 1) is None


@pytest.mark.parametrize("left", [0, 4096, 4096 + PAGE // 2])
def test_a_page_that_is_cut_while_it_is_read_is_a_miss(tmp_path: Path, left: int) -> None:
    class CuttingOps(Ops):
        cutting = False

        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.cutting:
                os.truncate(f"/proc/self/fd/{fd}", left)
            return super().read(fd, buffers, offset)

    ops = CuttingOps()
    store = open_quiet(tmp_path / "store", ops=ops)
    put(store, 1, 2)
    ops.cutting = True
    assert get(store, 1) is None
    assert store.stats.read_errors == 1
    ops.cutting = False
    assert get(store, 2) == content(key(2))


def test_drop_writer_deletes_what_one_server_run_wrote(tmp_path: Path) -> None:
    first = open_quiet(tmp_path / "store", writer=b"first---")
    second = open_quiet(tmp_path / "store", writer=b"second--")
    put(first, 1, 2)
    put(second, 3)
    put(second, 4, namespace=OTHER_NAMESPACE)
    assert second.drop_writer(b"first---") == 2
    assert second.exists(NAMESPACE, [key(1), key(2), key(3)]) == [False, False, True]
    assert first.drop_writer(b"second--") == 2
    assert first.exists(OTHER_NAMESPACE, [key(4)]) == [False]


@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_unaligned_memory_is_copied_and_counted(
    tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hcache_backend.store.folder.BUFFER_BYTES", 8192)
    store = open_quiet(tmp_path / "store")
    with store.disks[0].use() as folder:
        alignment = folder.io.alignment
    data = content(key(1), 40_000)
    view = memory(data, shift)
    assert store.put(NAMESPACE, [key(1)], [[view[:777], view[777:]]]) == [True]
    target = memory(40_000, shift)
    assert store.get(NAMESPACE, [key(1)], [[target]]) == [True]
    assert bytes(target) == data
    if alignment.flags:
        assert store.stats.bytes_copied > 80_000
    before = store.stats.bytes_copied
    aligned = memory(40_960)
    store.put(NAMESPACE, [key(2)], [[aligned[:4096], aligned[4096:]]])
    assert store.get(NAMESPACE, [key(2)], [[aligned]]) == [True]
    assert store.stats.bytes_copied == before, "aligned memory is not copied"


def test_memory_of_another_length_is_a_miss(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, 1)
    target = memory(PAGE + 8)
    assert store.get(NAMESPACE, [key(1)], [[target]]) == [False]
    assert store.get(NAMESPACE, [key(1)], [[target[:-9]]]) == [False]
    assert get(store, 1) == content(key(1)), "the page itself is fine"


def test_a_page_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "a", tmp_path / "b")
    put(store, *range(4))
    assert put(store, *range(6)) == [True] * 6
    assert store.stats.pages_written == 6
    assert store.stats.pages_already_stored == 4


def test_a_lock_that_is_never_free_costs_pages_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hcache_backend.store.page_store.WRITE_SECONDS", 0.3)
    store = open_quiet(tmp_path / "store")
    other = open_quiet(tmp_path / "store")
    with other.disks[0].use() as folder, folder.lock.held(1):
        assert put(store, 1) == [False]
    assert store.stats.pages_dropped_late == 1
    assert put(store, 1) == [True]
    assert_sound(store)


# ---- many pages in one call ----


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

        def submit(work: Any, *items: Any, start: Any = pool.submit) -> Any:
            woken.append(work)
            return start(work, *items)

        monkeypatch.setattr(pool, "submit", submit)
    ops.commits = 0
    assert put(store, *range(64)) == [True] * 64
    assert ops.commits == 1
    keys = [key(number) for number in range(64)]
    targets = [[memory(PAGE)] for _ in keys]
    assert store.get(NAMESPACE, keys, targets) == [True] * 64
    assert [bytes(target) for [target] in targets] == [content(name) for name in keys]
    assert len(woken) == 4, "two threads write, two read"


# ---- files before they have names ----


def test_files_are_made_in_folders_in_turn(tmp_path: Path) -> None:
    places = []

    class WatchingOps(Ops):
        def open(self, name: str, flags: int, dir_fd: int) -> int:
            if flags & os.O_EXCL and name.isdigit():
                places.append(Path(f"/proc/self/fd/{dir_fd}").readlink())
            return super().open(name, flags, dir_fd)

    store = open_quiet(tmp_path / "store", ops=WatchingOps())
    assert put(store, *range(2 * LANES)) == [True] * 2 * LANES
    assert len(set(places)) == LANES
    assert {place.parent.parent for place in places} == {tmp_path / "store" / "sessions"}
    assert_sound(store)
    store.close()
    assert names(tmp_path / "store" / "sessions") == []


def test_a_file_system_that_does_not_place_folders_apart_is_used_as_it_is(tmp_path: Path) -> None:
    class PlainOps(Ops):
        def spread_folders(self, fd: int) -> None:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    store = open_quiet(tmp_path / "store", ops=PlainOps())
    assert put(store, 1) == [True]
    assert get(store, 1) == content(key(1))


def test_what_dead_sessions_left_is_removed_also_that_of_earlier_versions(tmp_path: Path) -> None:
    """Earlier versions wrote beside the lock file; what a living store writes stays."""
    folder = tmp_path / "store"
    alive = open_quiet(folder)
    put(alive, 1)
    for token in ("dead", "earlier", "torn"):
        (folder / "sessions" / token / "lane3").mkdir(parents=True)
        (folder / "sessions" / token / "lane3" / "67").write_bytes(b"half a page")
    (folder / "sessions" / "dead" / "lock").touch()
    (folder / "sessions" / "earlier" / "lock").touch()
    (folder / "sessions" / "earlier" / "17").write_bytes(b"half a page")
    with alive.disks[0].use() as opened:
        unfinished, name = opened.session.new_file()
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=unfinished))
        token = opened.session.token
    store = open_quiet(folder)
    with store.disks[0].use() as opened:
        assert set(names(folder / "sessions")) == {token, opened.session.token}
    assert len(list((folder / "sessions" / token).rglob("*"))) > 2, "it is still being written"
    store.close()
    alive.close()
    assert names(folder / "sessions") == []
