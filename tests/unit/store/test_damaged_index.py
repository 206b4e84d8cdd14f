"""An index that is damaged, linked, of an earlier version, or made by somebody else."""

import os
import sqlite3
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from store_testing import (
    FILE,
    NAMESPACE,
    assert_right_or_miss,
    assert_sound,
    keys,
    look_after,
    memory,
    names,
    open_quiet,
    put,
    there,
)
from test_given_folders import USER, as_user, opening, owned_by, reachable  # noqa: F401

from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.folder import Folder
from hcache_backend.store.maintenance import _recover, find_unknown_files

PAGES = 20
QUOTA = 40 * FILE

Damage = Callable[[Path], object]


def byte(place: int, value: int) -> Damage:
    def damage(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(bytes([value]))

    return damage


def sql(*statements: str) -> Damage:
    def damage(file: Path) -> None:
        with closing(sqlite3.connect(file)) as index, index:
            for statement in statements:
                index.execute(statement)

    return damage


def totals(pages: int, size: int) -> Damage:
    packed = struct.pack("<QQ", pages, size).hex()
    return sql(f"UPDATE meta SET value = x'{packed}' WHERE name = 'totals'")


def record(expression: str) -> Damage:
    """Change every record; ``files`` is its 32 bytes."""
    return sql(f"UPDATE pages SET files = {expression}")


def cut(file: Path) -> None:
    os.truncate(file, 5000)


VIEW = "CREATE VIEW pages AS WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
CELLS: dict[str, Damage] = {
    **{f"bit {bit} of the bytes": totals(PAGES, PAGES * FILE ^ 1 << bit) for bit in (18, 30, 63)},
    "a bit of the pages": totals(PAGES ^ 16, PAGES * FILE),
    "no totals": sql("DELETE FROM meta WHERE name = 'totals'"),
    "totals of text": sql("UPDATE meta SET value = 'much' WHERE name = 'totals'"),
    "a mark of ff": sql(f"INSERT INTO recency VALUES (x'{'ff' * 58}')"),
    "a mark of one byte": sql("INSERT INTO recency VALUES (x'00')"),
    "a mark of text": sql("INSERT INTO recency VALUES ('soon')"),
    "a mark of no page": sql(f"INSERT INTO recency VALUES (x'{'00' * 57 + '01'}')"),
    "no shards": record("substr(files, 1, 1) || x'00' || substr(files, 3)"),
    "three shards": record("substr(files, 1, 1) || x'03' || substr(files, 3)"),
    "shard 1 of 1": record("x'01' || substr(files, 2)"),
    "31 bytes": record("substr(files, 2)"),
    "no header": record("substr(files, 1, 4) || x'00000000' || substr(files, 9)"),
    "a last use in 2554": record("substr(files, 1, 31) || x'ff'"),
    "no table": sql("DROP TABLE recency"),
    "a column more": sql("ALTER TABLE meta ADD COLUMN more"),
    "an endless view": sql("DROP TABLE pages", f"{VIEW} SELECT i AS page, x'' AS files FROM n"),
}
HEADERS: dict[str, Damage] = {
    "schema format 5": byte(47, 5),
    "write version 3": byte(18, 3),
    "read version 3": byte(19, 3),
    "no SQLite file": byte(0, 0),
    "a short file": cut,
    "garbage": lambda file: file.write_bytes(b"garbage" * 2000),
}


def settle(store: PageStore) -> None:
    """What the background does in some seconds."""
    for _ in range(2):
        look_after(store)
        for disk in store.disks:
            _recover(disk, threading.Event())


def assert_mended(store: PageStore, folder: Path) -> None:
    settle(store)
    assert put(store, PAGES) == [True]
    settle(store)
    assert assert_right_or_miss(store, *range(PAGES + 1)) == PAGES + 1
    assert store.stats.pages_evicted == 0
    assert store.drop(b"nobody's pages--") == 0
    assert_sound(store)
    assert sum(name.startswith("index-broken-") for name in names(folder)) == 1


@pytest.mark.parametrize("kind", [*HEADERS, *CELLS])
def test_damage_that_a_start_meets_is_mended(kind: str, memory_path: Path) -> None:
    folder = memory_path / "store"
    store = open_quiet(folder)
    put(store, *range(PAGES))
    store.close()
    {**HEADERS, **CELLS}[kind](folder / "index" / "index.sqlite")
    store = open_quiet(folder, quota_bytes=QUOTA)
    there(store, *range(PAGES))
    assert_right_or_miss(store, *range(PAGES))
    store.disks[0].make_room(QUOTA, 5.0)  # looks at marks and records
    if store.stats.pages_evicted:
        pytest.fail(f"{store.stats.pages_evicted} pages were evicted by a damaged index")
    assert_mended(store, folder)
    store.close()
    with open_quiet(folder).disks[0].use() as opened:
        assert not opened.index_is_partial, "opens without a scan"


@pytest.mark.parametrize("kind", sorted(CELLS.keys() - {"an endless view"}))
def test_damage_in_service_raises_nothing_and_is_mended(kind: str, memory_path: Path) -> None:
    folder = memory_path / "store"
    store = open_quiet(folder, quota_bytes=QUOTA)
    put(store, *range(PAGES))
    CELLS[kind](folder / "index" / "index.sqlite")
    there(store, *range(PAGES))
    assert_right_or_miss(store, *range(PAGES))
    store.use(NAMESPACE, keys(range(PAGES)))
    store.flush()
    put(store, *range(PAGES))
    store._recency.save()
    if not store.disks[0]._index_is_broken:
        store.disks[0].make_room(QUOTA, 5.0)  # only an eviction sees it
    assert_mended(store, folder)


def test_what_a_rebuild_finds_damaged_is_made_anew_too(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, *range(PAGES))
    with store.disks[0].use() as folder:
        folder.index_is_partial = True
    record("substr(files, 2)")(tmp_path / "store" / "index" / "index.sqlite")
    assert_mended(store, tmp_path / "store")


def test_no_memory_is_mapped_from_the_disk(tmp_path: Path) -> None:
    """A disk that is full, or a file that somebody cuts, would end the process by SIGBUS."""
    store = open_quiet(tmp_path / "store")
    put(store, *range(PAGES))
    there(store, *range(PAGES))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert {*names(tmp_path / "store" / "index")} <= {"index.sqlite", "index.sqlite-journal"}


def test_the_index_of_an_earlier_version_is_converted(tmp_path: Path) -> None:
    """It is in WAL mode, has no digest of its totals, and its last changes are in the log."""
    folder = tmp_path / "store"
    store = open_quiet(folder)
    put(store, *range(PAGES))
    with store.disks[0].use() as opened:
        entries = list(opened.index.entries())
    store.close()
    index = folder / "index" / "index.sqlite"
    with closing(sqlite3.connect(index)) as earlier:
        earlier.execute("PRAGMA journal_mode = WAL")
        with earlier:
            earlier.execute("DELETE FROM meta WHERE name = 'totals digest'")
        left = {name: (index.parent / name).read_bytes() for name in names(index.parent)}
    for name, data in left.items():  # as of a server that was killed
        (index.parent / name).write_bytes(data)
    assert len(left["index.sqlite-wal"]) > 0
    store = open_quiet(folder)
    with store.disks[0].use() as opened:
        assert list(opened.index.entries()) == entries
        assert not opened.index_is_partial
    assert "index.sqlite-shm" not in names(index.parent)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not list(folder.glob("index-broken-*"))
    assert_sound(store)


def test_batches_are_not_larger_than_what_old_libraries_take(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def as_before_3_32(*arguments: object, **options: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)  # type: ignore[call-overload]
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
        return connection

    monkeypatch.setattr(sqlite3, "connect", as_before_3_32)
    store = open_quiet(memory_path / "store")
    some, page = keys(range(600)), [memory(b"x" * 100)]
    assert all(store.put(NAMESPACE, some, [page] * 600))
    with store.disks[0].use() as folder:
        ranks = {entry.name: entry.rank + 1 for entry in folder.index.entries()}
        folder.index.raise_ranks(ranks)
    assert_sound(store)
    assert store.drop(NAMESPACE) == 600


@pytest.mark.parametrize("name", ["plain", "100%", "what?", "a#b", os.fsdecode(b"latin-\xe9")])
def test_any_path_opens(name: str, tmp_path: Path) -> None:
    store = open_quiet(Path(f"/{tmp_path}") / name)
    assert put(store, 1) == [True]
    assert_sound(store)


def test_a_linked_index_is_set_aside(tmp_path: Path) -> None:
    folder, other = tmp_path / "store", tmp_path / "other.sqlite"
    store = open_quiet(folder)
    put(store, *range(PAGES))
    store.close()
    sql("CREATE TABLE theirs (a)")(other)
    index = folder / "index" / "index.sqlite"
    index.unlink()
    index.symlink_to(other)
    assert_mended(open_quiet(folder), folder)
    with closing(sqlite3.connect(other)) as theirs:
        assert theirs.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_what_root_makes_belongs_to_the_owner_of_the_folder(reachable: Path) -> None:  # noqa: F811
    path = reachable / "given"
    owned_by(USER, USER, 0o700)(path)
    assert as_user(USER, partial(opening, path)) is None
    with closing(Folder(path, FileOps())) as folder:
        folder.set_index_aside()
    with closing(Folder(path, FileOps())) as folder:
        assert find_unknown_files(folder, adopt=True).adopted == 6
    assert {file.stat().st_uid for file in (path, *path.rglob("*"))} == {USER}
    assert as_user(USER, partial(opening, path)) is None


def test_a_change_that_a_look_up_waits_for_too_long_is_a_miss(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, 1)
    index = tmp_path / "store" / "index" / "index.sqlite"
    with closing(sqlite3.connect(index, check_same_thread=False)) as stopped:
        stopped.execute("BEGIN EXCLUSIVE")
        assert there(store, 1) == [False]
        assert store.stats.index_errors == 1
        end = threading.Timer(1.0, stopped.rollback)
        end.start()
        assert store.drop(NAMESPACE) == 1, "who deletes waits longer"
        end.join()
    assert there(store, 1) == [False]
