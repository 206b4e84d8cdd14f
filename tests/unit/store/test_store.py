"""What the store promises to the engine. ``test_model.py`` compares any calls with a dictionary."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_testing import (
    FILE,
    NAMESPACE,
    PAGE,
    WRITER,
    assert_sound,
    broken,
    config,
    content,
    failing,
    get,
    key,
    keys,
    memory,
    names,
    open_quiet,
    ops_that,
    page_files,
    put,
    there,
)

from hcache_backend.store import PageStore

WRITE_SECONDS = "hcache_backend.store.page_store.WRITE_SECONDS"
LOW_WATER = "hcache_backend.store.eviction.LOW_WATER"


def test_the_background_looks_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcache_backend.store.maintenance._PAUSE_SECONDS", 0.05)
    store = PageStore(config(tmp_path / "store"), WRITER)
    put(store, 1)
    deadline = time.monotonic() + 240
    while not store.stats.syncs:
        assert time.monotonic() < deadline, "the batch was never synced"
        time.sleep(0.01)
    before = threading.active_count()
    store.close()
    store.close()
    assert threading.active_count() < before
    assert there(store, 1) == [False], "a closed store has only misses"
    assert put(store, 1) == [False]


def test_memory_may_change_after_a_put_that_ran_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    gate.set()
    ops = ops_that(write=broken(errno.EIO, lambda *arguments: not gate.wait(240)))
    monkeypatch.setattr(WRITE_SECONDS, 0.2)
    store = open_quiet(tmp_path / "store", ops=ops)
    gate.clear()
    view = memory(content(key(1)))
    assert store.put(NAMESPACE, keys([1, 2]), [[view], [view]]) == [False, False]
    assert store.stats.pages_dropped_late == 2, "the time limit holds: the gate is closed"
    view[:] = bytes(PAGE)
    gate.set()
    store.disks[0].writers.shutdown(wait=True)
    assert get(store, 1) is None, "what was written too late is no page"
    assert_sound(store)


def test_a_bug_below_is_a_miss_not_a_hanging_thread(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    for method in ("read_page", "write_page"):
        bug = failing(RuntimeError("a bug"))
        monkeypatch.setattr(f"hcache_backend.store.folder.Folder.{method}", bug)
    assert get(store, 1) is None
    assert put(store, 2) == [False]


def test_neighbours_go_to_different_folders(tmp_path: Path) -> None:
    store = open_quiet(*(tmp_path / name for name in "abcd"))
    put(store, *range(128))
    found = [disk.lookup(NAMESPACE, keys(range(128))) for disk in store.disks]
    for start in range(0, 128, 4):
        assert all(sum(map(bool, pages[start : start + 4])) == 1 for pages in found)


# ---- bounds ----


def test_the_quota_holds_and_the_least_recently_used_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOW_WATER, 0.7)
    store = open_quiet(tmp_path / "store", quota_bytes=10 * FILE)
    for number in range(10):
        put(store, number)
    assert store.stats.pages_evicted == 0
    for number in (0, 1, 2):
        store.use(NAMESPACE, [key(number)])
    put(store, 10)
    assert store.stats.pages_evicted == 4, "down to the low water mark, the new page included"
    assert there(store, *range(11)) == [True] * 3 + [False] * 4 + [True] * 4
    assert len(page_files(tmp_path / "store")) == 7
    assert_sound(store)


def test_recency_survives_reopening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, *range(10))
    store.use(NAMESPACE, [key(0)])
    store.close()
    monkeypatch.setattr(LOW_WATER, 0.2)
    store = open_quiet(tmp_path / "store", quota_bytes=10 * FILE)
    put(store, 10)
    assert there(store, 0, 10) == [True, True]
    assert len(page_files(tmp_path / "store")) == 2


def small_disk(folder: Path, room: int) -> Any:
    """A disk of so many bytes."""
    used = lambda fd: sum(path.stat().st_size for path in page_files(folder))  # noqa: E731
    return ops_that(free_bytes=lambda fd: room - used(fd))


def test_free_space_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = small_disk(tmp_path / "store", 10 * FILE)
    store = open_quiet(tmp_path / "store", ops=disk, min_free_bytes=4 * FILE)
    for number in range(20):
        assert put(store, number) == [True]
        assert len(page_files(tmp_path / "store")) <= 6
    assert get(store, 19) == content(key(19))
    store.close()
    store = open_quiet(tmp_path / "store", ops=disk, min_free_bytes=100 * FILE)
    assert put(store, 30) == [False]
    assert store.stats.pages_dropped_full == 1
    assert caplog.messages == [
        f"hcache: {tmp_path / 'store'} is full: option 'min_free_bytes' keeps {100 * FILE:,} bytes "
        f"of its file system free, and with {FILE:,} more {9 * FILE:,} would be; new pages are not "
        "stored"
    ]


QUOTA_TOLD = (
    f"can hold no page: option 'quota_bytes' allows {FILE - 1:,} bytes of page files, and with "
    f"{FILE:,} more there would be {FILE:,}"
)
RESERVE_TOLD = (
    f"can hold no page: option 'min_free_bytes' keeps {2 * FILE + 1:,} bytes of its file system "
    f"free, and with {FILE:,} more {2 * FILE:,} would be"
)


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"quota_bytes": FILE, "min_free_bytes": 2 * FILE}, []),
        ({"quota_bytes": FILE - 1}, [QUOTA_TOLD]),
        ({"min_free_bytes": 2 * FILE + 1}, [RESERVE_TOLD]),
    ],
)
def test_a_folder_that_can_hold_no_page_is_named_with_its_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bounds: dict[str, int], told: list[str]
) -> None:
    folder = tmp_path / "store"
    put(open_quiet(folder), 0, 1, 2)
    open_quiet(folder, ops=small_disk(folder, 3 * FILE), **bounds).check_room(PAGE)
    assert [line.removeprefix(f"hcache: {folder} ") for line in caplog.messages] == told


def test_a_folder_is_out_of_use_for_now_only_where_others_are_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    blocked = [tmp_path / "file" / name for name in "ab"]
    with pytest.raises(NotADirectoryError):
        open_quiet(*blocked)
    assert caplog.messages == []
    store = open_quiet(tmp_path / "store", *blocked)
    assert [line.split(":")[1] for line in caplog.messages] == [
        f" {path} cannot be used for now" for path in blocked
    ]
    assert put(store, 1, 2) == [True, True]
    assert get(store, 2) == content(key(2))


def test_a_file_that_cannot_be_removed_does_not_stop_eviction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [key(0).hex()]
    ops = ops_that(unlink=broken(errno.EPERM, lambda name, fd: any(one in name for one in kept)))
    store = open_quiet(tmp_path / "store", ops=ops, quota_bytes=5 * FILE)
    for number in range(30):
        assert put(store, number) == [True]
    assert get(store, 0) == content(key(0)), "it stays a page"
    assert store.stats.evict_errors > 0
    assert_sound(store)
    kept.append(".page")  # all of them
    assert put(store, *range(30, 36)).count(False) > 0
    assert f"is full: option 'quota_bytes' allows {5 * FILE:,} bytes of page files" in caplog.text
    assert_sound(store)


# ---- meanwhile ----


def test_a_page_that_is_evicted_while_it_is_read_is_still_right(tmp_path: Path) -> None:
    during: list[Callable[[], object]] = []

    def read(*arguments: object) -> None:
        if during:
            during.pop()()

    store = open_quiet(tmp_path / "store", ops=ops_that(read=read))
    put(store, 1)
    during.append(lambda: (store.drop(NAMESPACE), put(store, *range(50, 55))))
    assert get(store, 1) == content(key(1))
    assert not during and get(store, 1) is None


@pytest.mark.parametrize("left", [0, 4096, 4096 + PAGE // 2])
def test_a_page_that_is_cut_while_it_is_read_is_a_miss(tmp_path: Path, left: int) -> None:
    cuts: list[int] = []

    def cut(fd: int, *arguments: object) -> None:
        for length in cuts:
            os.truncate(f"/proc/self/fd/{fd}", length)

    store = open_quiet(tmp_path / "store", ops=ops_that(read=cut))
    put(store, 1, 2)
    cuts.append(left)
    assert get(store, 1) is None
    assert store.stats.read_errors == 1
    cuts.clear()
    assert get(store, 2) == content(key(2))


# ---- many pages in one call ----


def test_pages_whose_turn_to_be_read_comes_too_late_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[float] = []
    ops = ops_that(read=lambda *arguments: passed.append(1e6))
    store = open_quiet(tmp_path / "store", ops=ops)
    put(store, 1, 2)
    passed.clear()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr("hcache_backend.store.disk.time", clock)
    first, second = memory(PAGE), memory(PAGE)
    found = store.get(NAMESPACE, keys([1, 2]), [[first], [second]])
    assert found == [True, False], "what has begun is waited for"
    assert (bytes(first), bytes(second)) == (content(key(1)), bytes(PAGE))


def test_threads_wake_and_the_index_changes_once_for_many_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[Any] = []
    woken: list[Any] = []
    store = open_quiet(tmp_path / "store", ops=ops_that(commit=commits.append), io_threads=2)
    disk = store.disks[0]
    for pool in (disk.readers, disk.writers):

        def submit(work: Any, *items: Any, start: Any = pool.submit) -> Any:
            woken.append(work)
            return start(work, *items)

        monkeypatch.setattr(pool, "submit", submit)
    commits.clear()
    assert put(store, *range(64)) == [True] * 64
    assert len(commits) == 1
    targets = [[memory(PAGE)] for _ in range(64)]
    assert store.get(NAMESPACE, keys(range(64)), targets) == [True] * 64
    assert [bytes(target) for [target] in targets] == [content(name) for name in keys(range(64))]
    assert len(woken) == 4, "two threads write, two read"


def test_what_dead_sessions_left_is_removed_also_that_of_earlier_versions(tmp_path: Path) -> None:
    """Earlier versions wrote beside the lock file; what a living store writes stays."""
    sessions = tmp_path / "store" / "sessions"
    alive = open_quiet(tmp_path / "store")
    put(alive, 1)
    for token in ("dead", "earlier", "torn"):
        (sessions / token / "lane3").mkdir(parents=True)
        (sessions / token / "lane3" / "67").write_bytes(b"half a page")
    (sessions / "dead" / "lock").touch()
    (sessions / "earlier" / "lock").touch()
    (sessions / "earlier" / "17").write_bytes(b"half a page")
    with alive.disks[0].use() as opened:
        unfinished, name = opened.session.new_file()
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=unfinished))
        token = opened.session.token
    store = open_quiet(tmp_path / "store")
    with store.disks[0].use() as opened:
        assert set(names(sessions)) == {token, opened.session.token}
    assert len(list((sessions / token).rglob("*"))) > 2, "it is still being written"
    store.close()
    alive.close()
    assert names(sessions) == []
