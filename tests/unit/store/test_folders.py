"""Folders of a store: refused, failing, vanishing, damaged, and coming back."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from store_testing import (
    NAMESPACE,
    assert_right_or_miss,
    assert_sound,
    content,
    get,
    key,
    look_after,
    names,
    open_quiet,
    page_files,
    put,
    there,
    without_direct_io,
)

from hcache_backend.store import SERVER_REPORT
from hcache_backend.store.direct_io import BUFFERED, find_alignment
from hcache_backend.store.folder import MARKER
from hcache_backend.store.maintenance import find_unknown_files


def test_a_folder_that_vanishes_costs_its_own_pages_only(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    store = open_quiet(*folders)
    put(store, *range(10))
    folders[0].rename(tmp_path / "gone")
    folders[0].mkdir()  # where a disk is not mounted there is an empty folder...
    device, store.disks[0]._device = store.disks[0]._device, -1  # ...on another device
    look_after(store)
    assert there(store, *range(10)).count(True) == assert_right_or_miss(store, *range(10)) == 5
    assert put(store, *range(20, 24)) == [True] * 4, "the other folder takes everything"
    assert names(folders[0]) == [], "nothing is written where the disk is not mounted"
    folders[0].rmdir()
    (tmp_path / "gone").rename(folders[0])
    store.disks[0]._device = device
    look_after(store)
    assert assert_right_or_miss(store, *range(10), *range(20, 24)) == 14
    assert store.stats.folders_lost == 1


@pytest.mark.parametrize("below", ["", "hcache"], ids=["the mount", "a folder below it"])
def test_nothing_is_stored_where_the_disk_is_not_mounted(
    below: str,
    tmp_path: Path,
    mount: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path.stat().st_dev
    monkeypatch.setattr("hcache_backend.store.disk.store_folder.device_of_root", lambda: root)
    disk, place = mount("-t", "tmpfs", "-o", "size=64m", "tmpfs"), tmp_path / "ssd0"
    bind, unmount = ["mount", "--bind", disk, place], ["umount", "-l", place]
    place.mkdir()
    subprocess.run(bind, check=True)
    try:
        store = open_quiet(place / below)
        assert put(store, 1) == [True]
        subprocess.run(unmount, check=True)
        for _ in range(3):
            look_after(store)
            assert put(store, 2) == [False]
        assert names(place) == []
        assert [line for line in caplog.messages if "its disk is not mounted" in line] != []
        subprocess.run(bind, check=True)
        look_after(store)
        assert there(store, 1) == [True]
        assert put(store, 3) == [True]
    finally:
        subprocess.run(unmount, check=True)
    if below:  # a store that a start without the disk made is not meant
        open_quiet(place / below).close()
        look_after(store)
        assert put(store, 4) == [False]
        assert not page_files(place / below)


def test_a_store_on_another_disk_is_used(tmp_path: Path, mount: Callable[..., Path]) -> None:
    place = tmp_path / "ssd0"
    place.mkdir()
    disks = [mount("-t", "tmpfs", "-o", "size=64m", "tmpfs") for _ in range(2)]
    for disk, number in zip(disks, (1, 2), strict=True):
        store = open_quiet(disk / "hcache")
        put(store, number)
        store.close()
    subprocess.run(["mount", "--bind", disks[0], place], check=True)
    store = open_quiet(place / "hcache")
    subprocess.run(["umount", "-l", place], check=True)
    look_after(store)
    subprocess.run(["mount", "--bind", disks[1], place], check=True)
    try:
        look_after(store)
        assert there(store, 1, 2) == [False, True]
        store.close()
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_new_folder_on_the_file_system_of_root_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for device, expected in ((tmp_path.stat().st_dev, 1), (-1, 0)):
        monkeypatch.setattr(
            "hcache_backend.store.disk.store_folder.device_of_root", lambda device=device: device
        )
        for _ in range(2):
            open_quiet(tmp_path / str(device)).close()
        lines = [line for line in caplog.messages if "is new, and on the file system of /" in line]
        assert len(lines) == expected
        caplog.clear()


def test_an_emptied_folder_is_made_a_store_again(tmp_path: Path) -> None:
    """As ``rm -rf DIR/*`` leaves it, the natural way with a mount point."""
    store = open_quiet(tmp_path / "store")
    put(store, 1)
    for path in (tmp_path / "store").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for _ in range(2):
        look_after(store)
    assert put(store, 2) == [True]
    assert_sound(store)


def test_a_folder_that_cannot_be_looked_at_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a FUSE mount whose program was killed, or a disk that dies."""
    store = open_quiet(tmp_path / "store")
    put(store, 1)
    stat = Path.stat

    def no_stat(path: Path, **options: bool) -> os.stat_result:
        if tmp_path in path.parents:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", no_stat)
    for _ in range(10):
        look_after(store)
        assert there(store, 1) == [False]
    assert len(caplog.messages) == 2, caplog.messages
    monkeypatch.undo()
    look_after(store)
    assert there(store, 1) == [True]


def test_a_deleted_folder_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = open_quiet(folder)
    put(store, 1)
    folder.rename(tmp_path / "deleted")
    assert put(store, 2) == [False], "nobody would find it"
    assert get(store, 1) == content(key(1)), "until it is noticed, the open folder is read"
    look_after(store)
    assert there(store, 1) == [False]
    assert put(store, 3) == [True]
    assert get(store, 3) == content(key(3))


def test_a_file_system_without_direct_io_is_used_without(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store", ops=without_direct_io())
    with store.disks[0].use() as folder:
        assert folder.io.alignment == BUFFERED
        assert find_alignment(without_direct_io(), folder.session.fd, "probe") == BUFFERED
    put(store, 1)
    assert get(store, 1) == content(key(1))


def test_folders_are_for_the_owner_only(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "new" / "store")
    put(store, 1)
    store.close()
    root = tmp_path / "new" / "store"
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_servers_report_does_not_make_a_folder_with_a_torn_marker_a_strangers(
    tmp_path: Path,
) -> None:
    open_quiet(tmp_path).close()
    (tmp_path / MARKER).write_text("{")
    (tmp_path / SERVER_REPORT).write_text("{}")
    (tmp_path / f".{SERVER_REPORT}.0123abcd").touch()
    open_quiet(tmp_path).close()
    assert json.loads((tmp_path / MARKER).read_text())


def test_links_inside_are_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "store", tmp_path / "outside"
    store = open_quiet(folder)
    put(store, 1)
    [path] = page_files(folder)
    original = path.read_bytes()
    outside.mkdir()
    (outside / path.name).write_bytes(original)
    path.unlink()
    path.symlink_to(outside / path.name)
    assert get(store, 1) is None, "a linked file is not read"
    assert not path.is_symlink(), "and the link goes"
    put(store, 1)
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(outside)
    assert get(store, 1) is None, "a linked folder is not entered"
    store.drop(NAMESPACE)
    assert put(store, 1) == [False]
    assert (outside / path.name).read_bytes() == original, "nothing outside was touched"
    store.close()
    (folder / "pages").rename(tmp_path / "elsewhere")
    (folder / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a link"):
        open_quiet(folder)


def test_an_index_whose_file_is_deleted_under_two_stores_is_made_anew_once(tmp_path: Path) -> None:
    stores = [open_quiet(tmp_path / "store") for _ in range(2)]
    put(stores[0], *range(5))
    (tmp_path / "store" / "index" / "index.sqlite").unlink()
    assert put(stores[1], 5) == [False], "no other store would find it"
    for store in stores:
        look_after(store)
    with stores[0].disks[0].use() as folder:
        assert find_unknown_files(folder, adopt=True).adopted == 5
    for store in stores:
        look_after(store)
        assert assert_right_or_miss(store, *range(5)) == 5
        assert_sound(store)
    assert len(list((tmp_path / "store").glob("index-broken-*"))) == 1


def test_a_shard_folder_that_is_deleted_while_open_is_made_anew(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, 1)
    [bucket] = (tmp_path / "store" / "pages").iterdir()
    shutil.rmtree(bucket)
    assert get(store, 1) is None
    assert put(store, 1) == [True]
    assert get(store, 1) == content(key(1))
    assert_sound(store)
