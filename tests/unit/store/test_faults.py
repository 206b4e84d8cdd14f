"""Every file operation fails once, in every way: reads give the right bytes or a miss."""

import errno
import gc
import re
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from store_testing import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAGE,
    Ops,
    assert_sound,
    content,
    get,
    key,
    keys,
    look_after,
    memory,
    names,
    open_files,
    open_quiet,
    ops_that,
    put,
    there,
)

from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.index import Index

pytestmark = pytest.mark.slow
QUOTA = 5 * (PAGE + 4096)
PAGES = 11
VERSIONS = 2
FAULTS = ("EIO", "ENOSPC", "EIO-after", "short", "torn", "lost")


class FaultyOps(Ops):
    """Operation number ``at`` fails in the way ``fault``; all others work.

    - ``EIO``, ``ENOSPC``: it does nothing and fails
    - ``EIO-after``: it is done, and reported as failed
    - ``short``: reads and writes move half of the bytes and say so
    - ``torn``: a write moves half of the bytes and reports all
    - ``lost``: a rename is reported as done and is not
    """

    APPLIES: ClassVar = {
        "ENOSPC": ("open", "make_folder", "write", "rename", "commit", "sync"),
        "EIO-after": ("rename", "unlink", "make_folder", "close", "sync"),
        "short": ("read", "write"),
        "torn": ("write",),
        "lost": ("rename",),
    }

    def __init__(self, at: int = -1, fault: str = "") -> None:
        super().__init__()
        self.at = at
        self.fault = fault
        self.names: list[str] = []
        self._lock = threading.Lock()

    def applies(self, number: int, fault: str) -> bool:
        return fault not in self.APPLIES or self.names[number] in self.APPLIES[fault]

    def do(self, name: str, plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """One operation: as ``plain`` does it, or its fault."""

        def work() -> Any:
            # The disk itself is not what is tested here.
            return None if name == "sync" else plain(self, *arguments)

        with self._lock:
            number = len(self.names)
            self.names.append(name)
        # Which uses are young enough not to be saved hangs on the clock: the operation with this
        # number may be another one than in the dry run.
        if number != self.at or not self.applies(number, self.fault):
            return work()
        if self.fault in ("EIO", "ENOSPC"):
            if name == "close":
                work()  # Linux closes the file whatever it reports
            if name == "commit":
                raise sqlite3.OperationalError(f"injected {self.fault}")
            raise OSError(getattr(errno, self.fault), f"injected {self.fault} in {name}")
        if self.fault == "EIO-after":
            work()
            raise OSError(errno.EIO, f"injected {self.fault} in {name}")
        if self.fault in ("short", "torn"):
            fd, buffers, offset = arguments
            done = plain(self, fd, _first_half(buffers), offset)
            return done if self.fault == "short" else sum(map(len, buffers))
        return None  # lost


def _faulty(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: FaultyOps, *arguments: Any) -> Any:
        return self.do(name, plain, arguments)

    return operation


OPERATIONS = {name: getattr(Ops, name) for name, it in vars(FileOps).items() if callable(it)}
for _name, _plain in OPERATIONS.items():
    setattr(FaultyOps, _name, _faulty(_name, _plain))


def _first_half(buffers: Sequence[Any]) -> list[Any]:
    wanted = max(sum(map(len, buffers)) // 2 // 4096 * 4096, 1)
    half = []
    for buffer in buffers:
        if wanted:
            half.append(buffer[:wanted])
            wanted -= len(half[-1])
    return half


def read_all(store: PageStore) -> None:
    for number in range(PAGES):
        found = get(store, number)
        allowed = [content(key(number), version=version) for version in range(VERSIONS)]
        assert found is None or found in allowed, f"wrong bytes for page {number}"
    half = memory(PAGE)
    [found] = store.get(NAMESPACE, [key(1)], [[half[:8192], half[8192:]]])
    allowed = [content(key(1), version=version) for version in range(VERSIONS)]
    assert not found or bytes(half) in allowed


def scenario(folder: Path, ops: FileOps) -> None:
    """Open, write, overwrite, read, use, evict, delete, close, reopen, read."""
    store = open_quiet(folder, ops=ops, durability="always", quota_bytes=QUOTA)
    try:
        put(store, 0, 1, 2)
        again = [[memory(content(name, version=1))] for name in keys([1, 3])]
        store.put(NAMESPACE, keys([1, 3]), again)
        shifted = memory(content(key(4)), shift=8)
        store.put(NAMESPACE, [key(4)], [[shifted[:5000], shifted[5000:]]])
        shifted[:] = bytes(PAGE)
        read_all(store)
        for number in range(5, PAGES, 2):
            sequence = keys([0, *range(5, number)])
            store.use(NAMESPACE, sequence)
            put(store, number, number + 1, prefix=sequence)
        store.flush()
        read_all(store)
        put(store, 12, namespace=OTHER_NAMESPACE)
        store.drop(OTHER_NAMESPACE)
        there(store, *range(PAGES))
        look_after(store)
        store.flush()
    finally:
        store.close()
    store = open_quiet(folder, ops=ops, durability="always", quota_bytes=QUOTA)
    try:
        read_all(store)
        store.drop(NAMESPACE)
        put(store, 13)
    finally:
        store.close()


def test_a_page_is_there_always_once_it_is_synced(memory_path: Path) -> None:
    """Its file may be of another thread or process, which syncs it only now."""
    syncs = Counter[str]()
    first, second = (
        open_quiet(
            memory_path / "store",
            ops=ops_that(sync=lambda fd, part=part: syncs.update([part])),
            durability=durability,
        )
        for part, durability in (("first", "none"), ("second", "always"))
    )
    assert put(first, 1) == [True] and not syncs
    assert put(second, 1) == [True] and syncs == {"second": 1}
    first.close(), second.close()


def test_the_scenario_covers_every_operation(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[str, list[Any]] = {}

    def watch(owner: type, name: str) -> None:
        plain, seen = getattr(owner, name), results.setdefault(name, [])

        def watched(*args: Any, **options: Any) -> Any:
            seen.append(plain(*args, **options))
            return seen[-1]

        monkeypatch.setattr(owner, name, watched)

    watch(Index, "raise_ranks")
    watch(Index, "oldest")
    ops = FaultyOps()
    scenario(memory_path / "store", ops)
    assert set(ops.names) == set(OPERATIONS), "the fault enumeration leaves an operation out"
    assert results["raise_ranks"], "no use is saved"
    assert any(results["oldest"]), "nothing is evicted"


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_operation_fails_reads_are_right_or_misses(memory_path: Path, fault: str) -> None:
    dry_run = FaultyOps()
    scenario(memory_path / "dry", dry_run)
    gc.collect()  # what an earlier test left would close its files in the middle of this one
    files_before = open_files()
    tried = 0
    for number in range(len(dry_run.names)):
        if not dry_run.applies(number, fault):
            continue
        folder = memory_path / f"{fault}-{number}"
        ops = FaultyOps(number, fault)
        try:
            scenario(folder, ops)
        except OSError as error:
            # Only opening may say no; KvikIO's error for a probe that is half there ends so.
            assert re.search(
                "injected|short write|No such file.*hcache-store.json|EOF$", str(error)
            ), f"operation {number}, {dry_run.names[number]}"
        assert open_files() == files_before, f"operation {number} leaks files"
        store = open_quiet(folder, quota_bytes=QUOTA)
        read_all(store)
        assert put(store, 14) == [True], f"not usable after operation {number}"
        assert get(store, 14) == content(key(14))
        assert_sound(store)
        store.close()
        assert names(folder / "sessions") == []
        shutil.rmtree(folder)
        tried += 1
    assert tried > 0
