"""Disks that are full or read-only, and processes that may open few files."""

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_testing import (
    NAMESPACE,
    assert_sound,
    broken,
    content,
    ext4_image,
    failing,
    get,
    key,
    open_quiet,
    ops_that,
    page_files,
    put,
)

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
    tmp_path: Path, code: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [get(store, n) is not None for n in range(16)].count(True) == 16 - gone
    monkeypatch.setattr("hcache_backend.store.disk._REST_SECONDS", 0.0)
    refuses.clear()
    [disk] = store.disks
    disk._rest_until[True] = 0.0  # it has rested
    assert put(store, 200) == [True]
    assert get(store, 200) == content(key(200))
    assert_sound(store)


def test_a_folder_that_cannot_be_read_is_not_written_either(tmp_path: Path) -> None:
    unreadable: list[int] = []
    ops = ops_that(read=broken(errno.EIO, lambda *arguments: bool(unreadable)))
    store = open_quiet(tmp_path / "store", ops=ops)
    put(store, *range(10))
    unreadable.append(1)
    assert not any(get(store, number) for number in range(10))
    assert put(store, 20) == [False]
    assert store.stats.pages_dropped_offline == 1


# ---- real file systems ----


Mount = Callable[..., Path]


def test_a_file_system_without_inodes_goes_on_with_new_pages(mount: Mount) -> None:
    disk = mount("-t", "tmpfs", "-o", "size=100m,nr_inodes=500", "tmpfs")
    store = open_quiet(disk / "store", io_threads=4)
    for start in range(0, 400, 8):
        put(store, *range(start, start + 8))
    assert store.stats.pages_evicted > 100
    assert store.stats.pages_dropped_full < 20
    newest = [get(store, number) for number in range(380, 400)]
    right = [found == content(key(number)) for number, found in enumerate(newest, 380)]
    assert right.count(True) >= 15
    assert_sound(store)


def test_an_ext4_without_inodes_goes_on_with_new_pages(mount: Mount, tmp_path: Path) -> None:
    disk = mount("-o", "loop", str(ext4_image(tmp_path / "image", 64, "-N", "480")))
    store = open_quiet(disk / "store")
    for start in range(0, 600, 8):
        put(store, *range(start, start + 8))
    assert store.stats.pages_evicted > 0
    assert get(store, 599) == content(key(599))
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
        assert [get(store, number) for number in range(10)] == [content(key(n)) for n in range(10)]
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
