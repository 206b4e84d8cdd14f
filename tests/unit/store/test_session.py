"""Where files are written before they have names, and what becomes of them when a server dies."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from store_testing import Ops, assert_sound, content, get, key, names, open_quiet, put

from hcache_backend.store.folder import LANES


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
        unfinished, name = opened.session.place(opened.session.new_file())
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=unfinished))
        token = opened.session.token
    store = open_quiet(folder)
    with store.disks[0].use() as opened:
        assert set(names(folder / "sessions")) == {token, opened.session.token}
    assert len(list((folder / "sessions" / token).rglob("*"))) > 2, "it is still being written"
    store.close()
    alive.close()
    assert names(folder / "sessions") == []
