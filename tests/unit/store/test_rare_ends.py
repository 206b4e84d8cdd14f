"""Files, indexes and file systems in states that servers hardly leave: each is told."""

import errno
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_testing import (
    NAMESPACE,
    PAGE,
    assert_sound,
    broken,
    config,
    content,
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

from hcache_backend.store import PageStore, folder, maintenance, page_store
from hcache_backend.store.disk import Disk
from hcache_backend.store.file_ops import (
    BUFFERED,
    FileOps,
    FolderLock,
    PageIO,
    probe_alignment,
    reading_alignment,
)
from hcache_backend.store.folder import Folder, descriptors_of_each
from hcache_backend.store.maintenance import find_unknown_files, verify_folder


@pytest.fixture
def disk(store: PageStore) -> Disk:
    return store.disks[0]


@pytest.fixture
def held(disk: Disk) -> Iterator[Folder]:
    """The open folder of ``store``."""
    with disk.use() as held:
        yield held


@pytest.fixture
def page(store: PageStore, held: Folder) -> Path:
    """The file of page 1, the only one."""
    put(store, 1)
    [file] = page_files(held.path)
    return file


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


# ---- verification and recovery ----


def test_files_in_wrong_places_are_damaged(store: PageStore, held: Folder) -> None:
    put(store, 1, 2, 3)
    one, two, three = page_files(held.path)
    held.index.remove([entry.name for entry in held.index.entries()])
    shutil.copy(one, two)
    three.rename(one.with_name(three.name))
    found = find_unknown_files(held, adopt=True)
    assert {reason for _, reason in found.damaged} == {
        "its name is not the one in its header",
        "it stands in the wrong folder",
    }
    assert [name.file for name in found.pages] == [one.name]
    assert find_unknown_files(held, adopt=True, stop=lambda: True).pages == []


def test_a_page_file_that_the_index_lacks_is_named(store: PageStore, held: Folder) -> None:
    put(store, 1, 2)
    name = next(iter(held.index.entries())).name
    held.index.remove([name])
    found = verify_folder(held)
    assert found.unknown == [(f"{name.bucket}/{name.file}", "a page file")]
    assert found.pages == 1


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
    assert held.index.totals().pages == 1


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
    assert "maintenance of" in caplog.text


# ---- the index ----


def test_what_is_inconsistent_in_an_index_is_told(store: PageStore, held: Folder) -> None:
    put(store, 1, 2, 3)
    writer: Any = held.index._writer
    assert held.index.check() == []
    pages = [page for (page,) in writer.execute("SELECT page FROM pages ORDER BY page")]
    writer.execute("UPDATE pages SET files = x'00' WHERE page = ?", (pages[0],))
    writer.execute("DELETE FROM recency WHERE mark = (SELECT mark FROM recency LIMIT 1)")
    said = " ".join(held.index.check())
    assert f"entry {pages[0].hex()} is malformed" in said
    assert "totals are" in said
    writer.execute("DELETE FROM recency")
    said = " ".join(held.index.check())
    assert f"entry {pages[1].hex()} has no recency" in said
    assert "recency has entries of pages that are not there" in said


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
    disk.failed("index", sqlite3.DatabaseError("database disk image is malformed"))
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
        with lock.held(1), pytest.raises(TimeoutError), lock.held(0.0):
            pass
        with FolderLock(None).held(0.0):
            pass


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
            assert not probe_alignment(ops, fd, "probe").flags
    finally:
        os.close(fd)


def test_limits_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    most = descriptors_of_each(2)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 64))
    assert 1 <= descriptors_of_each(100) < most


# ---- calls, and the state of a disk ----


def test_calls_that_do_not_fit_are_refused(store: PageStore) -> None:
    for call in (store.put, store.get):
        with pytest.raises(ValueError, match="1 pages for 2 keys"):
            call(NAMESPACE, keys([1, 2]), [[memory(PAGE)]])


def test_many_pages_are_written_in_groups(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store, "_GROUP_BYTES", 2 * PAGE)
    assert put(store, *range(5)) == [True] * 5
    assert all(get(store, n) == content(key(n)) for n in range(5))
    assert_sound(store)


@pytest.mark.parametrize(("code", "rests"), [(errno.EMFILE, False), (errno.EIO, True)])
def test_too_many_open_files_are_no_fault_of_the_disk(disk: Disk, code: int, rests: bool) -> None:
    for _ in range(20):
        disk.failed("use", OSError(code, os.strerror(code)))
    assert disk.is_online() != rests


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
