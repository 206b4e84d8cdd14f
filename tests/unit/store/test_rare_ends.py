"""Disks that are full or read-only, few open files, and states that servers hardly leave."""

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_testing import (
    NAMESPACE,
    PAGE,
    assert_right_or_miss,
    assert_sound,
    broken,
    config,
    content,
    damage,
    ext4_image,
    failing,
    get,
    key,
    keys,
    look_after,
    memory,
    open_quiet,
    ops_that,
    page_files,
    put,
)

from hcache_backend.store import PageStore, file_ops, folder, maintenance, page_store
from hcache_backend.store.direct_io import BUFFERED, PageIO, find_alignment, reading_alignment
from hcache_backend.store.disk import Disk
from hcache_backend.store.file_ops import FileOps, FolderLock
from hcache_backend.store.folder import Folder, descriptors_of_each
from hcache_backend.store.maintenance import find_unknown_files, verify_folder


@pytest.fixture
def disk(store: PageStore) -> Disk:
    return store.disks[0]


@pytest.fixture
def held(disk: Disk) -> Iterator[Folder]:
    with disk.use() as held:
        yield held


@pytest.fixture
def page(store: PageStore, held: Folder) -> Path:
    """The file of page 1, the only one."""
    put(store, 1)
    [file] = page_files(held.path)
    return file


# ---- verification and recovery ----


def test_files_in_wrong_places_are_damaged(store: PageStore, held: Folder) -> None:
    put(store, 1, 2, 3)
    one, two, three = page_files(held.path)
    held.index.remove([entry.name for entry in held.index.entries()])
    shutil.copy(one, two)
    three.rename(one.with_name(three.name))
    assert (f"{one.parent.name}/{one.name}", "a page file") in verify_folder(held).unknown
    assert find_unknown_files(held, adopt=True, stop=lambda: True).pages == []
    found = find_unknown_files(held, adopt=True)
    assert {reason for _, reason in found.damaged} == {
        "its name is not the one in its header",
        "it stands in the wrong folder",
    }
    assert found.adopted == 1
    assert [entry.name.file for entry in held.index.entries()] == [one.name]


@pytest.mark.parametrize("change", [Path.unlink, damage])
def test_a_page_that_is_evicted_while_it_is_verified_is_no_finding(
    page: Path, held: Folder, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(held.index.entries())
    monkeypatch.setattr(held.index, "entries", lambda: iter(entries))
    monkeypatch.setattr(held.index, "check", list)
    held.index.remove([entry.name for entry in entries])
    change(page)
    found = verify_folder(held)
    assert (found.pages, found.missing, found.damaged) == (0, [], [])


def test_a_damaged_file_that_cannot_be_deleted_stays_in_the_index(
    page: Path, held: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(page)
    monkeypatch.setattr(held.ops, "unlink", broken(errno.EROFS))
    found = verify_folder(held, repair=True)
    assert (len(found.damaged), found.repaired) == (1, 0)
    assert held.index.totals().files == 1


def test_a_page_that_was_replaced_meanwhile_is_not_deleted(page: Path, held: Folder) -> None:
    [entry] = held.index.entries()
    before = page.stat()
    os.utime(page, ns=(1, 1))
    assert not held.delete_page(entry.name, before)
    assert page.exists()


def test_what_fails_in_the_care_of_a_folder_is_logged_and_goes_on(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopping, calls = threading.Event(), []

    def look() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            stopping.set()
        raise RuntimeError("a test's fault")

    monkeypatch.setattr(disk, "look_after", look)
    monkeypatch.setattr(maintenance, "_PAUSE_SECONDS", 0.001)
    recency: Any = SimpleNamespace(save=lambda: None)
    maintenance.maintain(disk, recency, config(disk.path), stopping)
    assert len(calls) == 2
    [line] = [line for line in caplog.messages if "maintenance failed" in line]
    assert str(disk.path) in line and "a test's fault" in line


# ---- the index ----


def test_what_is_inconsistent_in_an_index_is_told(store: PageStore, held: Folder) -> None:
    put(store, 1, 2, 3)
    writer: Any = held.index._writer
    assert held.index.check() == []
    pages = [page for (page,) in writer.execute("SELECT page FROM pages ORDER BY page")]
    writer.execute("UPDATE pages SET files = x'00' WHERE page = ?", (pages[0],))
    writer.execute("DELETE FROM recency WHERE mark = (SELECT mark FROM recency LIMIT 1)")
    said = " ".join(held.index.check())
    assert f"page {pages[0].hex()} has a record of 1 bytes" in said
    assert "totals are" in said
    writer.execute("DELETE FROM recency")
    said = " ".join(held.index.check())
    assert "recency has 0 entries, of other pages or last uses" in said


def test_an_index_that_is_looked_at_is_not_written(disk: Disk) -> None:
    with (
        closing(Folder(disk.path, FileOps(), readonly=True)) as view,
        pytest.raises(sqlite3.OperationalError, match="opened to read"),
    ):
        view.mark_index_complete()


def test_an_index_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "Index", failing(sqlite3.OperationalError("disk I/O error")))
    with pytest.raises(OSError, match="its index cannot be opened: disk I/O error"):
        open_quiet(tmp_path / "store")


def test_a_damaged_index_is_made_anew_when_it_can_be(
    store: PageStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.note_failure("index", sqlite3.DatabaseError("database disk image is malformed"))
    with disk.use() as held:
        monkeypatch.setattr(held, "set_index_aside", broken(errno.EIO))
    look_after(store)
    assert disk.is_online()


def test_an_index_that_cannot_be_looked_at_is_taken_for_there(
    held: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "path", held.path / ("x" * 300))  # too long a name
    assert not held.index_file_is_gone()


def test_a_boot_that_is_not_known_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_BOOT_ID", Path("/nowhere"))
    assert folder._boot_id() == b"unknown"


# ---- system calls ----


def test_a_lock_is_waited_for_by_threads_and_by_none_that_only_looks(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        lock = FolderLock(file.fileno())
        with lock.hold(1), pytest.raises(TimeoutError), lock.hold(0.0):
            pass
        with FolderLock(None).hold(0.0):
            pass


def test_batches_follow_the_time_that_they_take_and_let_others_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sleeps = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock[0] += seconds

    instead = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(file_ops, "time", instead)
    with (tmp_path / "lock").open("w") as file:
        lock = FolderLock(file.fileno())

        def batch_after(size: int, seconds: float, *, idle: float = 1.0) -> int:
            clock[0] += idle
            with lock.hold(1, batch=size):
                clock[0] += seconds
            return lock.batch

        assert [batch_after(lock.batch, 0.005) for _ in range(2)] == [256, 256]
        assert batch_after(256, 0.015) == 256
        assert batch_after(8, 0.005) == 256
        assert batch_after(0, 5.0) == 256
        assert [batch_after(lock.batch, 0.021) for _ in range(6)] == [128, 64, 32, 16, 8, 8]
        assert not sleeps
        batch_after(8, 0.015, idle=0.0)
        assert sleeps == [pytest.approx(0.003)]
        batch_after(0, 0.015, idle=0.0)
        assert len(sleeps) == 1


def test_system_calls_that_fail_or_do_nothing_are_errors() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        FileOps().sync(-1)
    nothing = ops_that(write=lambda *arguments: 0)
    with pytest.raises(OSError, match="moved too little"):
        PageIO(nothing, BUFFERED, PAGE).write(0, [memory(b"x")])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_alignment_is_tried_and_other_errors_are_told(code: int, tmp_path: Path) -> None:
    ops = ops_that(write=broken(code), read=broken(code))
    (tmp_path / "file").write_bytes(b"x" * 4096)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        if code == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                reading_alignment(ops, fd, "file")
        else:
            assert not reading_alignment(ops, fd, "file").flags
            assert not find_alignment(ops, fd, "probe").flags
    finally:
        os.close(fd)


def test_limits_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    most = descriptors_of_each(2)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 64))
    assert 1 <= descriptors_of_each(100) < most


# ---- calls, and the state of a disk ----


def test_many_pages_are_written_in_groups(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store, "_GROUP_BYTES", 2 * PAGE)
    assert put(store, *range(5)) == [True] * 5
    assert assert_right_or_miss(store, *range(5)) == 5
    assert_sound(store)
    for call in (store.put, store.get):
        with pytest.raises(ValueError, match="1 pages for 2 keys"):
            call(NAMESPACE, keys([1, 2]), [[memory(PAGE)]])


def test_too_many_open_files_are_no_fault_of_the_disk(disk: Disk) -> None:
    for _ in range(20):
        disk.note_failure("use", OSError(errno.EMFILE, "too many open files"))
    assert disk.is_online()


def test_a_folder_that_is_away_or_cannot_be_used_costs_its_pages_until_it_works(
    store: PageStore, disk: Disk, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.detach()
    assert put(store, 2, 3) == [False, False]
    assert store.stats.pages_dropped_offline == 2
    monkeypatch.setattr(disk, "attach", broken(errno.EIO))
    look_after(store)
    assert get(store, 1) is None
    monkeypatch.undo()
    look_after(store)
    assert get(store, 1) == content(key(1))


def test_work_behind_the_end_of_a_store_is_done_by_the_caller(store: PageStore) -> None:
    [disk] = store.disks
    store.close()
    [done] = disk._start(disk.readers, lambda items: (*items, threading.get_ident()), [1])
    assert done.result() == (1, threading.get_ident())


NO_SPACE = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
ROOM = 12
"""Page files that a small disk has room for."""


def small_disk(folder: Path, operation: str, code: int) -> Any:
    """A disk that refuses one operation while it has ``ROOM`` page files or more.

    As inodes and users' quotas do: no file system tells that its room is gone before it is.
    """
    error: Exception = OSError(code, os.strerror(code))
    if operation == "commit":
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
    meant: dict[str, Callable[..., bool]] = {
        "open": lambda name, flags, fd: bool(flags & os.O_CREAT) and name != "lock",
        "rename": lambda source, source_fd, target, target_fd: target.endswith(".page"),
        "make_folder": lambda name, fd: len(name) == 2,  # a bucket
    }
    refuses = meant.get(operation, lambda *arguments: True)
    full = lambda *a: refuses(*a) and len(page_files(folder)) >= ROOM  # noqa: E731
    return ops_that(**{operation: failing(error, full)})


@pytest.mark.parametrize("code", NO_SPACE.values(), ids=NO_SPACE)
@pytest.mark.parametrize("operation", ["open", "write", "rename", "make_folder", "commit"])
def test_a_disk_that_refuses_for_want_of_room_gets_room(
    memory_path: Path, operation: str, code: int
) -> None:
    folder = memory_path / "store"
    store = open_quiet(folder, ops=small_disk(folder, operation, code))
    stored = [put(store, number) for number in range(ROOM)]
    assert stored == [[True]] * ROOM
    # One by one, and several at once. What is new is there, what is old has gone for it.
    assert [put(store, number) for number in range(ROOM, 2 * ROOM)] == [[True]] * ROOM
    assert put(store, *range(2 * ROOM, 2 * ROOM + 4)).count(True) >= 3
    assert get(store, 2 * ROOM - 1) == content(key(2 * ROOM - 1))
    assert get(store, 0) is None
    assert len(page_files(folder)) <= ROOM + 4  # files get their names together
    assert store.stats.pages_evicted >= ROOM
    assert store.stats.write_errors == 0
    assert_sound(store)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EIO"])
def test_failed_writes_rest_writing_and_reads_go_on(
    tmp_path: Path,
    code: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SimpleNamespace(now=time.monotonic(), monotonic=lambda: clock.now)
    monkeypatch.setattr("hcache_backend.store.disk.time", clock)
    refuses: list[int] = []
    ops = ops_that(write=broken(getattr(errno, code), lambda *arguments: bool(refuses)))
    store = open_quiet(tmp_path / "store", ops=ops, io_threads=threads)
    put(store, *range(16))
    refuses.append(1)
    for start in range(100, 150, 10):
        assert not any(put(store, *range(start, start + 10)))
    # Room that is no help is made three times, for a page each here, and then no more.
    gone = 3 if code in NO_SPACE else 0
    assert store.stats.pages_evicted == gone
    assert assert_right_or_miss(store, *range(16)) == 16 - gone
    assert len(caplog.records) <= 4, "one line per kind of problem"
    assert store.stats.write_errors < 50, "it rests instead of failing again and again"
    refuses.clear()
    assert put(store, 200) == [code in NO_SPACE], "a full disk works, a failing one rests"
    clock.now += 5.0
    assert put(store, 200) == [True]
    assert get(store, 200) == content(key(200))
    assert_sound(store)


def test_a_folder_that_cannot_be_read_is_not_written_either(
    store: PageStore, held: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *range(10))
    monkeypatch.setattr(held.ops, "read", broken(errno.EIO))
    assert assert_right_or_miss(store, *range(10)) == 0
    assert put(store, 20) == [False]
    assert store.stats.pages_dropped_offline == 1


# ---- real file systems ----


Mount = Callable[..., Path]


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_without_inodes_goes_on_with_new_pages(
    kind: str, mount: Mount, tmp_path: Path
) -> None:
    if kind == "tmpfs":
        disk = mount("-t", "tmpfs", "-o", "size=100m,nr_inodes=500", "tmpfs")
    else:
        disk = mount("-o", "loop", str(ext4_image(tmp_path / "image", 64, "-N", "480")))
    store = open_quiet(disk / "store", io_threads=4)
    for start in range(0, 600, 8):
        put(store, *range(start, start + 8))
    assert store.stats.pages_evicted > 100
    assert store.stats.pages_dropped_full < 20
    assert get(store, 599) == content(key(599))
    assert assert_right_or_miss(store, *range(580, 600)) >= 15
    assert_sound(store)
    store.close()


def test_a_file_system_that_becomes_read_only_is_read_until_it_is_writable(mount: Mount) -> None:
    disk = mount("-t", "tmpfs", "-o", "size=100m", "tmpfs")
    outside = open_quiet(disk / "store")
    put(outside, *range(10))
    outside.close()
    store = open_quiet(disk / "store")
    refused = subprocess.run(
        ["mount", "-o", "remount,ro", str(disk)], capture_output=True, text=True, check=False
    )
    if not refused.returncode:
        assert put(store, *range(20, 40)) == [False] * 20
        assert assert_right_or_miss(store, *range(10)) == 10
        store.use(NAMESPACE, [key(0)])
        store.flush()
        assert get(store, 3) == content(key(3)), "uses that cannot be saved rest no reads"
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    else:
        assert "busy" in refused.stderr
    store.disks[0]._rest_until[True] = 0.0  # it has rested
    assert put(store, 50) == [True]


# ---- descriptors ----


FEW_FILES = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store_testing import content, get, key, names, open_quiet, put
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
taken = [open("/dev/null") for _ in range(200)]  # as a server has
store = open_quiet(Path(sys.argv[2]), Path(sys.argv[3]), io_threads=8)
stored = [put(store, number)[0] for number in range(600)]
right = [get(store, number) == content(key(number)) for number in range(600)]
print(stored.count(True), right.count(True), len(names(Path(sys.argv[2]) / "pages")))
store.close()
"""


@pytest.mark.slow
def test_a_process_that_may_open_few_files_finds_every_page(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(Path(__file__).parent), *folders],
        capture_output=True,
        text=True,
        check=True,
    )
    stored, right, buckets = map(int, done.stdout.split())
    assert (stored, right) == (600, 600), done.stderr
    assert buckets > 150, "pages must be spread over more folders than stay open"
