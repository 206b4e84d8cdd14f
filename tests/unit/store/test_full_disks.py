"""Disks that are full before the store is opened, and batches that are larger than a quota."""

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from store_testing import (
    FILE,
    NAMESPACE,
    assert_right_or_miss,
    assert_sound,
    broken,
    ext4_image,
    get,
    hcache_commands,
    keys,
    look_after,
    names,
    open_quiet,
    ops_that,
    page_files,
    put,
    there,
)
from test_damaged_index import settle

PAGES = 60
GC = f"gc --min-free-bytes 0 --quota-bytes {20 * FILE}"
Mount = Callable[..., Path]


def fill(disk: Path) -> None:
    """Leave no byte of a file system, as somebody else's log does."""
    for name in range(2):
        with (disk / f"log{name}").open("ab", buffering=0) as log:
            for size in (1 << 16, 4096, 512, 1):
                try:
                    while True:
                        log.write(bytes(size))
                except OSError:
                    os.fsync(log.fileno())


@pytest.fixture(params=["tmpfs", "ext4", "ext4 of small blocks"])
def full_disk(request: pytest.FixtureRequest, mount: Mount, tmp_path: Path) -> Path:
    """A full disk with a store of ``PAGES`` pages."""
    if request.param == "tmpfs":
        disk = mount("-t", "tmpfs", "-o", "size=8m", "tmpfs")
    else:
        blocks = ("-b", "1024") if "small" in request.param else ()
        image = ext4_image(tmp_path / "image", 32, "-m", "0", *blocks)
        disk = mount("-o", "loop", str(image))
    store = open_quiet(disk / "store")
    assert put(store, *range(PAGES)) == [True] * PAGES
    store.close()
    fill(disk)
    return disk


def test_a_store_on_a_full_disk_opens_serves_and_takes_new_pages(full_disk: Path) -> None:
    store = open_quiet(full_disk / "store")
    assert assert_right_or_miss(store, *range(PAGES)) >= PAGES - 16
    assert put(store, *range(100, 104)).count(True) >= 3
    assert get(store, 100) is not None
    assert_sound(store)


def test_commands_make_room_on_a_full_disk(full_disk: Path) -> None:
    folder = full_disk / "store"
    _, results = hcache_commands([], folder, "stats", "verify", GC)
    assert [status for status, _ in results] == [0, 0, 0], results
    assert 10 <= len(page_files(folder)) <= 20
    fill(full_disk)
    _, results = hcache_commands([], folder, "verify --repair", "clear --yes", "stats")
    assert [status for status, _ in results] == [0, 0, 0], results
    assert page_files(folder) == []


def test_a_damaged_index_on_a_full_disk_is_made_anew_in_its_place(full_disk: Path) -> None:
    folder = full_disk / "store"
    index = folder / "index" / "index.sqlite"
    index.write_bytes(bytes(index.stat().st_size))
    store = open_quiet(folder)
    assert not [name for name in names(folder) if name.startswith("index-broken-")]
    assert there(store, 1) == [False]


def test_a_batch_that_is_larger_than_the_quota_keeps_its_beginning(memory_path: Path) -> None:
    store = open_quiet(memory_path / "store", quota_bytes=10 * FILE)
    assert put(store, *range(100, 104)) == [True] * 4
    assert put(store, *range(25)) == [True] * 10 + [False] * 15
    assert there(store, *range(100, 104)) == [False] * 4
    assert store.stats.pages_dropped_full == 15
    # What follows is worth less than what is there...
    assert put(store, *range(10, 15), prefix=keys(range(10))) == [False] * 5
    assert there(store, *range(10)) == [True] * 10
    # ...and another conversation more.
    assert put(store, *range(200, 205)) == [True] * 5
    assert there(store, *range(4)) == [True] * 4
    assert_sound(store)


def test_a_long_batch_keeps_its_beginning_over_groups_and_folders(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hcache_backend.store.page_store._GROUP_BYTES", 4 * FILE)
    store = open_quiet(memory_path / "a", memory_path / "b", quota_bytes=10 * FILE)
    stored = put(store, *range(50))
    assert stored[:16] == [True] * 16
    assert not any(stored[21:])


def test_space_that_eviction_does_not_give_back_empties_no_store(memory_path: Path) -> None:
    """As in ext4's reserve for root: free bytes stay 0, whatever goes."""
    left: list[int] = []
    ops = ops_that(free_bytes=lambda fd: 0 if left else None)
    store = open_quiet(memory_path / "store", ops=ops, min_free_bytes=1)
    put(store, *range(PAGES))
    left.append(0)
    for number in range(100, 120):
        assert put(store, number) == [False]
    assert sum(there(store, *range(PAGES))) >= PAGES - 12
    left.clear()
    assert put(store, 200) == [True]


def test_damage_that_only_an_eviction_for_room_meets_is_mended(memory_path: Path) -> None:
    full: list[int] = []
    ops = ops_that(write=broken(errno.ENOSPC, lambda *arguments: bool(full)))
    store = open_quiet(memory_path / "store", ops=ops)
    put(store, 1)
    with closing(sqlite3.connect(memory_path / "store" / "index" / "index.sqlite")) as index:
        index.execute(f"INSERT INTO recency VALUES (x'{'00' * 57 + '01'}')")
        index.commit()
    full.append(1)
    assert put(store, 2) == [False]
    full.clear()
    settle(store)
    assert put(store, 2) == [True]
    assert_sound(store)


def test_a_store_that_has_nothing_and_no_room_says_so(tmp_path: Path) -> None:
    ops: Any = ops_that(
        make_folder=broken(errno.ENOSPC, lambda name, fd: len(name) == 16),
    )
    with pytest.raises(OSError, match="No space left on device"):
        open_quiet(tmp_path / "store", ops=ops)


def test_dropped_pages_are_synced(memory_path: Path) -> None:
    """Otherwise a power cut would bring back what was cleared, or condemned."""
    synced: list[int] = []
    folder = memory_path / "store"
    ops = ops_that(sync=lambda fd: synced.append(len(page_files(folder))))
    store = open_quiet(folder, ops=ops, durability="none")
    put(store, *range(5))
    store.flush()
    assert store.drop(NAMESPACE) == 5
    assert synced == [5, 0]
    put(store, *range(5))
    assert store.drop_writer(b"writer-1") == 5
    assert synced == [5, 0, 0]
    look_after(store)
