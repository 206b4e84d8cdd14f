"""Files, indexes and file systems in states that servers hardly leave: each is told."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_testing import (
    NAMESPACE,
    PAGE,
    assert_sound,
    config,
    content,
    get,
    key,
    look_after,
    memory,
    open_quiet,
    page_files,
    put,
)

from hcache_backend.store import PageStore, folder, maintenance, page_store
from hcache_backend.store.file_ops import (
    BUFFERED,
    FileOps,
    FolderLock,
    PageIO,
    probe_alignment,
    reading_alignment,
)
from hcache_backend.store.folder import descriptors_of_each
from hcache_backend.store.maintenance import find_unknown_files, verify_folder


def first_folder(store: PageStore) -> Any:
    return store.disks[0].use()


def test_files_in_wrong_places_are_damaged(store: PageStore) -> None:
    put(store, 1, 2, 3)
    one, two, three = page_files(store.disks[0].path)
    with first_folder(store) as held:
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


def test_a_page_file_that_the_index_lacks_is_named(store: PageStore) -> None:
    put(store, 1, 2)
    with first_folder(store) as held:
        name = next(iter(held.index.entries())).name
        held.index.remove([name])
        found = verify_folder(held)
    assert found.unknown == [(f"{name.bucket}/{name.file}", "a page file")]
    assert found.pages == 1


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_a_page_that_is_evicted_while_it_is_verified_is_no_finding(
    store: PageStore, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    [file] = page_files(store.disks[0].path)
    with first_folder(store) as held:
        entries = list(held.index.entries())
        monkeypatch.setattr(held.index, "entries", lambda: iter(entries))
        monkeypatch.setattr(held.index, "check", list)
        held.index.remove([entry.name for entry in entries])
        file.unlink() if what == "gone" else file.write_bytes(file.read_bytes()[:-1] + b"?")
        found = verify_folder(held)
    assert (found.pages, found.missing, found.damaged) == (0, [], [])


def test_a_damaged_file_that_cannot_be_deleted_stays_in_the_index(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    [file] = page_files(store.disks[0].path)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with first_folder(store) as held:
        monkeypatch.setattr(held.ops, "unlink", failing(OSError(errno.EROFS, "read-only")))
        found = verify_folder(held, repair=True)
        assert (len(found.damaged), found.repaired) == (1, 0)
        assert held.index.totals().pages == 1


def failing(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_what_is_inconsistent_in_an_index_is_told(store: PageStore) -> None:
    put(store, 1, 2, 3)
    with first_folder(store) as held:
        writer = held.index._writer
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


def test_an_index_that_is_looked_at_is_not_written(store: PageStore) -> None:
    [disk] = store.disks
    with (
        closing(folder.Folder(disk.path, FileOps(), readonly=True)) as view,
        pytest.raises(sqlite3.OperationalError, match="opened to read"),
    ):
        view.mark_index_complete()


def test_the_lock_of_a_folder_is_waited_for_by_threads_and_by_nobody_who_only_looks(
    tmp_path: Path,
) -> None:
    with (tmp_path / "lock").open("w") as file:
        lock = FolderLock(file.fileno())
        with lock.held(1), pytest.raises(TimeoutError), lock.held(0.0):
            pass
        with FolderLock(None).held(0.0):
            pass


def test_a_sync_that_fails_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        FileOps().sync(-1)


def test_a_file_system_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    class Nothing(FileOps):
        def write(self, fd: int, pieces: Any, offset: int) -> int:
            return 0

    with pytest.raises(OSError, match="moved too little"):
        PageIO(Nothing(), BUFFERED, PAGE).write(0, [memory(b"x")])


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO])
def test_alignment_is_tried_and_other_errors_are_told(error: int, tmp_path: Path) -> None:
    class Refusing(FileOps):
        def write(self, fd: int, pieces: Any, offset: int) -> int:
            raise OSError(error, "refused")

        def read(self, fd: int, pieces: Any, offset: int) -> int:
            raise OSError(error, "refused")

    (tmp_path / "file").write_bytes(b"x" * 4096)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        if error == errno.EIO:
            with pytest.raises(OSError, match="refused"):
                reading_alignment(Refusing(), fd, "file")
        else:
            assert not reading_alignment(Refusing(), fd, "file").flags
            assert not probe_alignment(Refusing(), fd, "probe").flags
    finally:
        os.close(fd)


def test_limits_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(folder.resource, "getrlimit", lambda what: (infinite, infinite))
    most = descriptors_of_each(2)
    monkeypatch.setattr(folder.resource, "getrlimit", lambda what: (64, 64))
    assert 1 <= descriptors_of_each(100) < most


def test_what_cannot_be_looked_at_is_taken_for_there(store: PageStore) -> None:
    with first_folder(store) as held:
        path = held.path
        try:
            held.path = path / ("x" * 300)  # too long a name
            assert not held.index_file_is_gone()
        finally:
            held.path = path


def test_an_index_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "Index", failing(sqlite3.OperationalError("disk I/O error")))
    with pytest.raises(OSError, match="its index cannot be opened: disk I/O error"):
        open_quiet(tmp_path / "store")


def test_a_boot_that_is_not_known_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_BOOT_ID", Path("/nowhere"))
    assert folder._boot_id() == b"unknown"


def test_calls_that_do_not_fit_are_refused(store: PageStore) -> None:
    page = [memory(content(key(1)))]
    with pytest.raises(ValueError, match="1 pages for 2 keys"):
        store.put(NAMESPACE, [key(1), key(2)], [page])
    with pytest.raises(ValueError, match="1 pages for 2 keys"):
        store.get(NAMESPACE, [key(1), key(2)], [page])


def test_many_pages_are_written_in_groups(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store, "_GROUP_BYTES", 2 * PAGE)
    assert put(store, *range(5)) == [True] * 5
    assert all(get(store, n) == content(key(n)) for n in range(5))
    assert_sound(store)


def test_too_many_open_files_are_no_fault_of_the_disk(store: PageStore) -> None:
    [disk] = store.disks
    for _ in range(20):
        disk.failed("use", OSError(errno.EMFILE, "too many open files"))
    assert disk.is_online()
    for _ in range(20):
        disk.failed("use", OSError(errno.EIO, "an error"))
    assert not disk.is_online()


def test_a_damaged_index_is_made_anew_when_it_can_be(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    [disk] = store.disks
    disk.failed("index", sqlite3.DatabaseError("database disk image is malformed"))
    with disk.use() as held:
        monkeypatch.setattr(held, "set_index_aside", failing(OSError(errno.EIO, "an error")))
    look_after(store)
    assert disk.is_online()


def test_a_folder_that_came_back_and_cannot_be_used_stays_away(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    [disk] = store.disks
    disk.detach()
    monkeypatch.setattr(disk, "attach", failing(OSError(errno.EIO, "an error")))
    look_after(store)
    assert get(store, 1) is None
    monkeypatch.undo()
    look_after(store)
    assert get(store, 1) == content(key(1))


def test_a_batch_for_a_folder_that_is_away_is_dropped_and_counted(store: PageStore) -> None:
    [disk] = store.disks
    disk.detach()
    assert put(store, 1, 2) == [False, False]
    assert store.stats.pages_dropped_offline == 2


def test_work_behind_the_end_of_a_store_is_done_by_the_caller(store: PageStore) -> None:
    [disk] = store.disks
    store.close()
    [done] = disk._start(disk.readers, lambda items: (*items, threading.get_ident()), [1])
    assert done.result() == (1, threading.get_ident())


def test_a_page_that_was_replaced_meanwhile_is_not_deleted(store: PageStore) -> None:
    put(store, 1)
    [file] = page_files(store.disks[0].path)
    with first_folder(store) as held:
        [entry] = held.index.entries()
        before = file.stat()
        os.utime(file, ns=(1, 1))
        assert not held.delete_page(entry.name, before)
        assert file.exists()


def test_what_fails_in_the_care_of_a_folder_is_logged_and_goes_on(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [disk] = store.disks
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
