"""Disks that are full or read-only, and processes that may open few files."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_testing import (
    NAMESPACE,
    Ops,
    assert_sound,
    content,
    get,
    key,
    open_quiet,
    page_files,
    put,
)

NO_SPACE = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
ROOM = 12
"""Page files that a small disk has room for."""


class SmallDisk(Ops):
    """A disk that refuses one operation while it has ``ROOM`` page files or more.

    As inodes and users' quotas do: no file system tells that its room is gone before it is.
    """

    def __init__(self, folder: Path, operation: str, code: int) -> None:
        super().__init__()
        self._folder = folder
        self._refused = operation, code

    def _check(self, operation: str) -> None:
        if self._refused[0] == operation and len(page_files(self._folder)) >= ROOM:
            if operation == "commit":
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            raise OSError(self._refused[1], os.strerror(self._refused[1]))

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        if flags & os.O_CREAT and name != "lock":
            self._check("open")
        return super().open(name, flags, dir_fd)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self._check("write")
        return super().write(fd, buffers, offset)

    def rename(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        if target.endswith(".page"):
            self._check("rename")
        super().rename(source, source_fd, target, target_fd)

    def make_folder(self, name: str, dir_fd: int) -> None:
        if len(name) == 2:  # a bucket
            self._check("make_folder")
        super().make_folder(name, dir_fd)

    def commit(self, connection: sqlite3.Connection) -> None:
        self._check("commit")
        super().commit(connection)


@pytest.mark.parametrize("code", NO_SPACE.values(), ids=NO_SPACE)
@pytest.mark.parametrize("operation", ["open", "write", "rename", "make_folder", "commit"])
def test_a_disk_that_refuses_for_want_of_room_gets_room(
    memory_path: Path, operation: str, code: int
) -> None:
    folder = memory_path / "store"
    store = open_quiet(folder, ops=SmallDisk(folder, operation, code))
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


class Refusing(Ops):
    """Writes of pages fail with ``code``, if there is one."""

    code = 0

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(fd, buffers, offset)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EIO"])
def test_failed_writes_rest_writing_and_reads_go_on(
    tmp_path: Path, code: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = Refusing()
    store = open_quiet(tmp_path / "store", ops=ops, io_threads=threads)
    put(store, *range(16))
    ops.code = getattr(errno, code)
    for start in range(100, 150, 10):
        assert not any(put(store, *range(start, start + 10)))
    # Room that is no help is made three times, for a page each here, and then no more.
    gone = 3 if code in NO_SPACE else 0
    assert store.stats.pages_evicted == gone
    assert [get(store, n) is not None for n in range(16)].count(True) == 16 - gone
    monkeypatch.setattr("hcache_backend.store.disk._REST_SECONDS", 0.0)
    ops.code = 0
    [disk] = store.disks
    disk._rest_until[True] = 0.0  # it has rested
    assert put(store, 200) == [True]
    assert get(store, 200) == content(key(200))
    assert_sound(store)


def test_a_folder_that_cannot_be_read_is_not_written_either(tmp_path: Path) -> None:
    class Unreadable(Ops):
        broken = False

        def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.broken:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(fd, buffers, offset)

    ops = Unreadable()
    store = open_quiet(tmp_path / "store", ops=ops)
    put(store, *range(10))
    ops.broken = True
    assert not any(get(store, number) for number in range(10))
    assert put(store, 20) == [False]
    assert store.stats.pages_dropped_offline == 1


# ---- real file systems ----


Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts something on a new folder; the test is skipped if that is not allowed."""
    mounted: list[Path] = []

    def mount(*arguments: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        command = ["mount", *arguments, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(
        ["mkfs.ext4", "-q", "-N", "480", str(image)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no ext4 can be made here: {made.stderr.decode().strip()}")
    disk = mount("-o", "loop", str(image))
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
