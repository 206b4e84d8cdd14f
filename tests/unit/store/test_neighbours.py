"""What others leave in a store's folder, or change there: a miss, a refusal, or repaired."""

import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from click.testing import Result
from store_testing import (
    NAMESPACE,
    PAGE,
    assert_sound,
    content,
    get,
    key,
    memory,
    names,
    open_quiet,
    page_files,
    put,
    there,
)
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.format.units import Segment, SegmentTable, Shard
from hcache_backend.store import NotOurFolderError, PageStore
from hcache_backend.store.folder import MARKER
from hcache_backend.store.maintenance import find_unknown_files, verify_folder

Make = Callable[[Path], object]


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("s")
        Path("s").rename(path.name)
    finally:
        os.chdir(here)


def a_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root can make a device")


NO_FILES: dict[str, Make] = {
    "a FIFO": os.mkfifo,
    "a device": a_device,
    "a socket": a_socket,
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to("/etc/hostname"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


def in_seconds(seconds: float, work: Callable[[], object]) -> None:
    """Do work that would hang for ever if it were wrong."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_a_miss_and_the_page_comes_again(kind: str, store: PageStore) -> None:
    put(store, 1, 2)
    [folder] = [disk.path for disk in store.disks]
    path = next(path for path in page_files(folder) if key(1).hex() in path.name)
    path.unlink()
    NO_FILES[kind](path)
    found: list[bytes | None] = []
    in_seconds(20, lambda: found.extend(get(store, number) for number in (1, 2)))
    assert found == [None, content(key(2))]
    assert store.stats.read_errors == 0
    assert put(store, 1) == [True]
    assert get(store, 1) == content(key(1))
    assert_sound(store)


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_holds_up_no_rebuild(kind: str, store: PageStore) -> None:
    put(store, 1, 2)
    with store.disks[0].use() as folder:
        path = next(path for path in page_files(folder.path) if key(1).hex() in path.name)
        path.unlink()
        NO_FILES[kind](path)
        (path.parent / "notes").mkdir()
        folder.index.remove([entry.name for entry in folder.index.entries()])
        adopted: list[int] = []
        in_seconds(20, lambda: adopted.append(find_unknown_files(folder, adopt=True).adopted))
        assert adopted == [1]
        found = verify_folder(folder, repair=True)
        assert (found.pages, len(found.unknown)) == (1, 2)
    assert get(store, 2) == content(key(2))


@pytest.mark.parametrize("kind", sorted(NO_FILES.keys() - {"a folder"}))
def test_what_is_no_file_is_no_marker(kind: str, tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    put(store, 1)
    store.close()
    marker = tmp_path / "store" / MARKER
    marker.unlink()
    NO_FILES[kind](marker)
    ends: list[Result] = []

    def commands() -> None:
        for command in ("stats", "doctor"):
            asked = [command, "-d", str(tmp_path / "store"), "--json"]
            ends.append(CliRunner().invoke(app, asked))

    in_seconds(20, commands)
    assert ends[0].exit_code == 2 and "is not a page store" in " ".join(ends[0].output.split())
    in_seconds(20, lambda: open_quiet(tmp_path / "store"))
    assert json.loads(marker.read_text())
    assert not marker.is_symlink()


OURS = ("partition-0123456789abcdef.json", "profile-0123456789ab.json", "server.json")


@pytest.mark.parametrize("marker", [None, b"", b"[" * 3000, b"{", b"null", b"\xff", bytes(4096)])
def test_a_folder_of_ours_whose_marker_is_gone_or_damaged_is_ours(
    marker: bytes | None, tmp_path: Path
) -> None:
    """As half of an ``rm -rf`` leaves it, or a disk that lost a block."""
    folder = tmp_path / "store"
    store = open_quiet(folder)
    put(store, 1)
    store.close()
    for name in OURS:
        (folder / name).write_text("{}")
    (folder / "index-broken-01234567").mkdir()
    (folder / MARKER).unlink()
    if marker is not None:
        (folder / MARKER).write_bytes(marker)
    store = open_quiet(folder)
    assert get(store, 1) == content(key(1))


def test_a_folder_with_the_names_of_ours_and_other_contents_is_not_ours(tmp_path: Path) -> None:
    for name in ("pages", "index", "sessions"):
        folder = tmp_path / name
        (folder / name / "chapter-1").mkdir(parents=True)
        with pytest.raises(NotOurFolderError, match=name):
            open_quiet(folder)
        assert names(folder) == [name]


@pytest.mark.parametrize("seconds", [-1, 0, 2**33, (2**64 - 1) // 10**9])
def test_a_time_that_no_page_was_written_at_is_clamped(seconds: int, store: PageStore) -> None:
    put(store, *range(4))
    with store.disks[0].use() as folder:
        path = page_files(folder.path)[0]
        try:
            os.utime(path, (seconds, seconds))
        except OverflowError:
            pytest.skip("this file system has no such time")
        before = {entry.rank for entry in folder.index.entries()}
        folder.index.remove([entry.name for entry in folder.index.entries()])
        assert find_unknown_files(folder, adopt=True).adopted == 4
        ranks = [entry.rank for entry in folder.index.entries()]
        assert min(ranks) >= 0 and max(ranks) < max(before) + 60 * 10**9
    store._recency.save()
    assert put(store, 5) == [True]
    assert there(store, *range(4), 5) == [True] * 5


TABLE = SegmentTable((Segment(4096), Segment(8192, 8, 2)))
HEADER = struct.Struct("<4sHBBII")
"""Magic, version, shard, shards, header bytes, segments; see format/file.py."""


def rewritten(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change a header, and make its checksum right again."""
    data = bytearray(path.read_bytes())
    change(data)
    length = HEADER.unpack_from(data)[4]
    rest = bytes(data[:16] + data[32:length])
    data[16:32] = xxhash.xxh3_128_digest(rest)
    path.write_bytes(data)


def number(place: int, value: int, size: int) -> Callable[[bytearray], object]:
    return lambda data: data.__setitem__(slice(place, place + size), value.to_bytes(size, "little"))


HOSTILE: dict[str, Callable[[bytearray], object]] = {
    "shard 5 of 2": number(6, 5, 1),
    "no shards": number(7, 0, 1),
    "three shards": number(7, 3, 1),
    "a million segments": number(12, 10**6, 4),
    "no segments": number(12, 0, 4),
    "units": number(104, 2**31, 4),
    "groups": number(116, 7, 2),
    "no bytes": number(112, 0, 4),
    "pieces": number(118, 65535, 2),
    "billions of units": lambda data: [
        number(12, 400, 4)(data),
        [number(112 + 8 * i, 0xFFFF * 8, 4)(data) for i in range(400)],
        [number(116 + 8 * i, 8, 2)(data) for i in range(400)],
        [number(118 + 8 * i, 0xFFFF, 2)(data) for i in range(400)],
    ],
}


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(0, 2)], ids=["whole", "by shards"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_header_with_absurd_counts_is_a_damaged_page(
    kind: str, shard: Shard, tmp_path: Path
) -> None:
    store = open_quiet(tmp_path / "store")
    size = TABLE.page_bytes
    for n in (1, 2):
        page = [memory(content(key(n), size))]
        assert store.put(NAMESPACE, [key(n)], [page], table=TABLE) == [True]
    path = next(path for path in page_files(tmp_path / "store") if key(1).hex() in path.name)
    rewritten(path, HOSTILE[kind])
    part = memory(size if shard.of == 1 else 4096 + 4096)
    found: list[bool] = []
    in_seconds(
        20,
        lambda: found.extend(store.get(NAMESPACE, [key(1), key(2)], [[part], [part]], shard=shard)),
    )
    assert found == [False, True]
    assert (store.stats.bad_pages, store.stats.read_errors) == (1, 0)
    assert not path.exists()


def test_a_header_length_that_flips_is_damage_whoever_reads_it(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store")
    size = TABLE.page_bytes
    for n in range(12):
        store.put(NAMESPACE, [key(n)], [[memory(content(key(n), size))]], table=TABLE)
    for path in page_files(tmp_path / "store")[:10]:
        data = bytearray(path.read_bytes())
        data[10] ^= 4
        path.write_bytes(data)
    hits = [
        store.get(NAMESPACE, [key(n)], [[memory(4096 + 4096)]], shard=Shard(0, 2))[0]
        for n in range(12)
    ]
    assert (sum(hits), store.stats.bad_pages, store.stats.read_errors) == (2, 10, 0)
    assert store.disks[0].is_online()


def test_what_stands_where_a_page_should_be_and_cannot_go_stays_a_miss(store: PageStore) -> None:
    put(store, 1)
    [path] = page_files(store.disks[0].path)
    path.unlink()
    (path / "full").mkdir(parents=True)
    assert get(store, 1) is None
    assert put(store, 1) == [False]
    assert put(store, 2) == [True]
    shutil.rmtree(path)
    assert put(store, 1) == [True]
    assert len(get(store, 1) or b"") == PAGE
