"""Power cuts at every point of recorded runs, with any subset of what was not synced.

``strace`` records the system calls of a run. A crash state has all calls that a sync completed, and
any of the others: files and folders made, renamed and deleted in any combination; of each block, or
of each sector of 512 bytes, the writes up to any one. No file system promises less (ALICE).
Each state is opened by a new store after a new boot. Run as a program, this file is such a run.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from store_testing import NAMESPACE, content, get, key, memory, open_quiet

from hcache_backend.format.envelope import parse_name
from hcache_backend.format.file import DamagedFileError
from hcache_backend.store import PageStore
from hcache_backend.store import folder as store_folder
from hcache_backend.store.maintenance import _recover

SIZE = 16384
QUOTA = 5 * (SIZE + 4096)
BLOCK, SECTOR = 4096, 512
MARK = "/MARK/"
CALLS = (
    "openat,mkdirat,mkdir,rename,renameat,renameat2,unlink,unlinkat,fsync,fdatasync,syncfs,"
    "pwrite64,pwritev,pwritev2,ftruncate,newfstatat,stat"
)


# ---- runs ----


def say(*words: object) -> None:
    """A mark in the record: a call that fails."""
    os.path.exists(MARK + "/".join(map(str, words)))  # noqa: PTH110


def put(store: PageStore, *numbers: int, version: int = 0) -> None:
    for number in numbers:
        say("begin", number, version)
    data = [[memory(content(key(number), SIZE, version))] for number in numbers]
    stored = store.put(NAMESPACE, [key(number) for number in numbers], data)
    for number, is_stored in zip(numbers, stored, strict=True):
        if is_stored:
            say("put", number, version)


def flush(store: PageStore) -> None:
    assert store.flush()
    say("flushed")


def drop(store: PageStore) -> None:
    say("dropping")
    store.drop(NAMESPACE)
    say("dropped")


def basic(folder: Path) -> None:
    store = open_quiet(folder)
    put(store, 1, 2, 3)
    flush(store)
    put(store, 4, 5)
    drop(store)
    put(store, 1, 2, version=1)
    flush(store)
    put(store, 6)
    store.close()


def evicting(folder: Path) -> None:
    store = open_quiet(folder, quota_bytes=QUOTA)
    for first in range(1, 13, 4):
        put(store, *range(first, first + 4))
        flush(store)
    put(store, 1, 2, version=1)
    store.close()


def always(folder: Path) -> None:
    store = open_quiet(folder, durability="always")
    for numbers in ((1, 2), (3, 4), (5, 6, 7)):
        put(store, *numbers)
        say("flushed")
    drop(store)
    put(store, 1, 3, version=1)
    store.close()


def reopening(folder: Path) -> None:
    for numbers in ((1, 2, 3), (4, 5)):
        store = open_quiet(folder, durability="batch")
        put(store, *numbers)
        store.close()
        say("flushed")
    store = open_quiet(folder)
    drop(store)
    put(store, 1, 2, version=1)
    store.close()


RUNS: dict[str, Callable[[Path], None]] = {
    run.__name__: run for run in (basic, evicting, always, reopening)
}


# ---- the record ----


@dataclass
class Call:
    """One call: ``name`` is a file or folder of the store, by its path at that moment."""

    kind: str
    name: str = ""
    to: str = ""  # of a rename
    data: bytes = b""
    offset: int = 0
    inode: int = 0
    synced: float = float("inf")  # the number of the call that brings it to the disk


def unescaped(text: str) -> str:
    return os.fsdecode(bytes.fromhex(text.replace("\\x", ""))).removesuffix(" (deleted)")


def paths(arguments: str) -> list[str]:
    """The files that the arguments name: by a path, below an open folder or not, or open."""
    hexadecimal = r"((?:\\x[0-9a-f]{2})*)"
    pattern = rf'(?:(?:AT_FDCWD|\d+)(?:<{hexadecimal}>)?, )?"{hexadecimal}"'
    found = re.findall(pattern, arguments)
    if found:
        return [os.path.join(unescaped(folder), unescaped(name)) for folder, name in found]  # noqa: PTH118
    opened = re.match(rf"\d+<{hexadecimal}>", arguments)
    return [unescaped(opened[1])] if opened else []


def call_of(name: str, arguments: str, result: int) -> Call | None:
    [path, *others] = paths(arguments) if not name.startswith("pwrite") else [""]
    if name in ("stat", "newfstatat"):
        return Call("mark", path.removeprefix(MARK)) if path.startswith(MARK) else None
    if result < 0 or (name == "openat" and "O_CREAT" not in arguments):
        return None
    if name.startswith("rename"):
        return Call("rename", path, to=others[0])
    if name.startswith("pwrite"):
        [path] = paths(arguments.partition(",")[0])
        data = b"".join(map(bytes.fromhex, re.sub(r"<[^>]*>|\\x", "", arguments).split('"')[1::2]))
        offset = int(arguments.split(", ")[-2 if name == "pwritev2" else -1])
        return Call("write", path, data=data[:result], offset=offset)
    kinds = {"openat": "make", "fdatasync": "fsync", "ftruncate": "cut", "unlinkat": "unlink"}
    kind = "folder" if name.startswith("mkdir") else kinds.get(name, name)
    offset = int(arguments.rsplit(",", 1)[1]) if kind == "cut" else 0
    return Call(kind, path, offset=offset)


def recorded(run: str, folder: Path, log: Path) -> list[Call]:
    """The calls of a run below ``folder``."""
    command = ["strace", "-f", "-y", "-xx", "-s", "1000000", "-o", log, "-e", f"trace={CALLS}"]
    program = [sys.executable, __file__, folder, run]
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    subprocess.run([*command, *program], check=True)
    calls = []
    for line in log.read_text().splitlines():
        if match := re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line):
            call = call_of(match[1], match[2], int(match[3]))
            if call and (call.kind in ("mark", "syncfs") or call.name.startswith(f"{folder}/")):
                calls.append(call)
    return with_syncs(calls)


def with_syncs(calls: list[Call]) -> list[Call]:
    """Give files and folders numbers that stay with them, and find what syncs what."""
    inodes: dict[str, int] = {}
    kept = []
    for call in calls:
        if call.kind in ("make", "folder"):
            if call.name in inodes:
                continue
            inodes[call.name] = len(kept) + 1
        call.inode = inodes.get(call.name, 0)
        if call.kind == "rename":
            for name in [name for name in inodes if f"{name}/".startswith(f"{call.name}/")]:
                inodes[call.to + name.removeprefix(call.name)] = inodes.pop(name)
        elif call.kind == "unlink":
            inodes.pop(call.name, None)
        kept.append(call)
    for number, call in enumerate(kept):
        if call.kind == "syncfs":
            done = kept[:number]
        elif call.kind == "fsync":
            of_file = ("write", "cut")
            done = [
                c
                for c in kept[:number]
                if (c.kind in of_file and c.inode == call.inode)
                or (c.kind not in of_file and os.path.dirname(c.to or c.name) == call.name)  # noqa: PTH120
            ]
        else:
            continue
        for one in done:
            one.synced = min(one.synced, number)
    return kept


# ---- crash states ----


@dataclass
class Disk:
    """What is on a disk: the inode of each name, and what is in it."""

    names: dict[str, int] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)
    data: dict[int, bytearray] = field(default_factory=dict)

    def do(self, call: Call) -> None:
        if call.kind in ("make", "folder"):
            self.names[call.name] = call.inode
        elif call.kind == "rename":
            self.names.pop(call.name, None)
            self.names[call.to] = call.inode
            for name in [name for name in self.names if name.startswith(f"{call.name}/")]:
                self.names[call.to + name.removeprefix(call.name)] = self.names.pop(name)
        elif call.kind == "unlink":
            self.names.pop(call.name, None)
        elif call.kind == "write":
            self.write(call.inode, call.offset, call.data)
        elif call.kind == "cut":
            self.write(call.inode, call.offset, b"")
            del self.data[call.inode][call.offset :]

    def write(self, inode: int, offset: int, data: bytes) -> None:
        file = self.data.setdefault(inode, bytearray())
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + len(data)] = data

    def write_some(self, number: int, call: Call, last: Callable[[int, int], float]) -> None:
        """Write the sectors of a call that come to the disk: those up to the ``last`` one."""
        end = call.offset + len(call.data)
        for start in range(call.offset // SECTOR * SECTOR, end, SECTOR):
            if number <= last(call.inode, start):
                begin, stop = max(start, call.offset), min(start + SECTOR, end)
                self.write(call.inode, begin, call.data[begin - call.offset : stop - call.offset])

    def put_in(self, source: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, inode in sorted(self.names.items(), key=lambda item: item[0].count("/")):
            path = folder / Path(name).relative_to(source)
            if path.parent.is_dir():  # otherwise its folder did not come to the disk
                if inode in self.folders:
                    path.mkdir()
                else:
                    path.write_bytes(self.data.get(inode, b""))


def crash(calls: list[Call], at: int, chance: random.Random, lost: float) -> Disk:
    """The disk after a crash before call ``at``, that loses this share of what was not synced."""
    disk = Disk(folders={call.inode for call in calls if call.kind == "folder"})
    is_torn = chance.random() < 0.3

    @cache
    def last(inode: int, place: int) -> float:
        """The last call whose write of this place, of a block or of a sector, comes to the disk."""
        return chance.randrange(at + 1) if chance.random() < lost else at

    for number, call in enumerate(calls[:at]):
        if call.kind == "write" and call.synced >= at:
            disk.write_some(
                number, call, lambda inode, place: last(inode, place if is_torn else place // BLOCK)
            )
        elif call.synced < at or chance.random() >= lost:
            disk.do(call)
    return disk


@dataclass
class Promised:
    """What a run had been told when it crashed."""

    versions: dict[int, set[int]] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    synced: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)

    def hear(self, mark: str) -> None:
        what, *numbers = mark.split("/")
        if what == "begin":
            self.versions.setdefault(int(numbers[0]), set()).add(int(numbers[1]))
        elif what == "put":
            self.stored[int(numbers[0])] = int(numbers[1])
        elif what == "flushed":
            self.synced = dict(self.stored)
        elif what == "dropping":
            self.synced = {}
        elif what == "dropped":
            self.dropped |= self.stored
            self.stored = {}


def faults_of(folder: Path, promised: Promised, bounded: bool) -> Iterator[str]:
    """What is wrong with a store that is opened after a crash."""
    store = open_quiet(folder)
    [disk] = store.disks
    for _ in range(2):
        disk.look_after()
        _recover(disk, threading.Event())
    found: dict[int, int] = {}
    for number, versions in promised.versions.items():
        if (page := get(store, number)) is not None:
            same = [v for v in versions if content(key(number), SIZE, v) == page]
            if not same:
                yield "a wrong page"
            found[number] = max(same, default=-1)
    if promised.synced.keys() - found.keys() and not bounded:
        yield "a synced page is lost"
    if any(found.get(number, 99) <= version for number, version in promised.dropped.items()):
        yield "a dropped page is back"
    with disk.use() as opened:
        yield from opened.index.check()
        known = {entry.name.file for entry in opened.index.entries()}
        for file in {file for bucket in opened.bucket_names() for file in opened.files_in(bucket)}:
            try:
                name = parse_name(file)
                if file not in known and name and opened.entry_of(name):
                    yield "a page that nothing counts"
            except DamagedFileError:
                pass  # a file that no look-up finds
    put(store, 999)
    if get(store, 999) is None:
        yield "nothing can be stored"
    store.close()


LONG = (pytest.mark.long, pytest.mark.timeout(3600))


@pytest.mark.parametrize(
    ("run", "states"),
    [("basic", 60), *(pytest.param(run, 4000, marks=LONG) for run in RUNS)],
)
def test_a_power_cut_breaks_no_promise(
    run: str,
    states: int,
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    source, folder, boot = memory_path / "run", memory_path / "crashed", memory_path / "boot"
    calls = recorded(run, source, memory_path / "log")
    monkeypatch.setattr(store_folder, "_BOOT_ID", boot)
    chance, faults = random.Random(run), Counter[str]()
    for number in range(states):
        at = 1 + number * len(calls) // states if states < len(calls) else 1 + number % len(calls)
        lost = chance.choice((0.0, 0.05, 0.2, 0.5, 0.8, 1.0))
        crash(calls, at, chance, lost).put_in(source, folder)
        promised = Promised()
        for call in calls[:at]:
            if call.kind == "mark":
                promised.hear(call.name)
        boot.write_text(str(number))
        for fault in faults_of(folder, promised, bounded=run == "evicting"):
            faults[f"{fault} (crash before call {at} of {len(calls)})"] += 1
    record_property("calls", len(calls))
    record_property("states", states)
    assert not faults


if __name__ == "__main__":
    RUNS[sys.argv[2]](Path(sys.argv[1]))
