"""What the tests of the store shard: pages that can be told apart, and small stores."""

import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hcache_backend.config import HCacheConfig, parse_config
from hcache_backend.format.envelope import parse_name
from hcache_backend.format.units import SegmentTable, Shard
from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.kvikio_ops import KvikioFileOps

NAMESPACE = b"namespace-------"
OTHER_NAMESPACE = b"other-namespace-"
WRITER = b"writer-1"
PAGE = 16384
FILE = PAGE + 4096

READER = os.environ.get("HCACHE_TEST_READER", "posix")
"""What reads the pages: ``test_kvikio.py`` runs these tests over the other one."""

Ops: type[FileOps] = KvikioFileOps if READER == "kvikio" else FileOps
"""What tests derive their own file operations from."""

OPENED: list[PageStore] = []
"""Stores that a test may have left open."""


def ops_that(**instead: Callable[..., Any]) -> Any:
    """File operations, of which some ask a function with their arguments first.

    It may raise, or return the result. None: the operation is done.
    """

    def asking(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def operation(ops: Any, *arguments: Any) -> Any:
            result = ask(*arguments)
            return getattr(Ops, name)(ops, *arguments) if result is None else result

        return operation

    return type("OpsOfATest", (Ops,), {name: asking(name, ask) for name, ask in instead.items()})()


def failing(
    error: Exception, fails: Callable[..., bool] = lambda *arguments, **options: True
) -> Any:
    def fail(*arguments: Any, **options: Any) -> None:
        if fails(*arguments, **options):
            raise error

    return fail


def broken(code: int, fails: Callable[..., bool] = lambda *arguments, **options: True) -> Any:
    """A function that raises the OSError of ``code`` if its arguments are such."""
    return failing(OSError(code, os.strerror(code)), fails)


def without_direct_io() -> Any:
    return ops_that(open=broken(errno.EINVAL, lambda name, flags, fd: flags & os.O_DIRECT))


@lru_cache(maxsize=512)  # making them takes longer than storing them
def key(number: int) -> bytes:
    """The key of page ``number``; keys spread over all buckets."""
    return np.random.default_rng(number).bytes(32)


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


@lru_cache(maxsize=512)
def content(name: bytes, size: int = PAGE, version: int = 0) -> bytes:
    return np.random.default_rng([*name[:8], version]).bytes(size)


def payload(page: bytes, table: SegmentTable, shard: Shard) -> bytes:
    found, start = [], 0
    for length, groups, _ in table.segments:
        in_groups = np.frombuffer(page, np.uint8, length, start).reshape(groups, -1)
        first = shard.number * groups // shard.of
        found.append(in_groups[first : first + max(1, groups // shard.of)].tobytes())
        start += length
    return b"".join(found)


def memory(data: bytes | int, shift: int = 0) -> memoryview:
    """Writable page-aligned memory that holds ``data``, or that many zeros.

    Args:
        shift: Move it this far from the alignment.
    """
    size = data if isinstance(data, int) else len(data)
    view = memoryview(mmap.mmap(-1, size + shift))[shift:]
    if not isinstance(data, int):
        view[:] = data
    return view


def config(*dirs: Path, **options: object) -> HCacheConfig:
    table = {"dirs": [str(path) for path in dirs], "min_free_bytes": 0, "reader": READER, **options}
    return parse_config(table, "test")


def open_quiet(
    *dirs: Path, ops: FileOps | None = None, writer: bytes = WRITER, **options: object
) -> PageStore:
    """A store without background threads, one I/O thread per folder; closed with the test."""
    options = {"io_threads": 1, "durability": "none", **options}
    store = PageStore(config(*dirs, **options), writer, ops=ops, background=False)
    OPENED.append(store)
    return store


def put(
    store: PageStore, *numbers: int, namespace: bytes = NAMESPACE, prefix: Sequence[bytes] = ()
) -> list[bool]:
    """Store the pages with these numbers, behind those with the keys ``prefix``."""
    names = keys(numbers)
    return store.put(namespace, names, [[memory(content(name))] for name in names], prefix=prefix)


def there(store: PageStore, *numbers: int) -> list[bool]:
    return store.exists(NAMESPACE, keys(numbers))


def get(store: PageStore, number: int, namespace: bytes = NAMESPACE) -> bytes | None:
    """What the store gives for a page; None is a miss."""
    target = memory(PAGE)
    [found] = store.get(namespace, [key(number)], [[target]])
    return bytes(target) if found else None


def look_after(store: PageStore) -> None:
    """Notice folders that vanished or came back, as the background does."""
    for disk in store.disks:
        disk.look_after()


def assert_right_or_miss(store: PageStore, *numbers: int) -> int:
    """Read pages; each must be what was stored, or a miss. Returns the hits."""
    hits = 0
    for number in numbers:
        found = get(store, number)
        assert found is None or found == content(key(number)), f"wrong bytes for page {number}"
        hits += found is not None
    return hits


def page_files(*dirs: Path) -> list[Path]:
    return [path for root in dirs for path in sorted(root.glob("pages/??/*.page"))]


def damage(path: Path, place: int = -1) -> None:
    """Change one byte of a file."""
    changed = bytearray(path.read_bytes())
    changed[place] ^= 1
    path.write_bytes(changed)


def assert_sound(store: PageStore) -> None:
    """Index and files agree: nothing uncounted, nothing unfinished, totals right."""
    for disk in store.disks:
        with disk.use() as folder:
            assert folder.index.check() == []
            known = {entry.name: entry.file_bytes for entry in folder.index.entries()}
            for path in page_files(folder.path):
                name = parse_name(path.name)
                assert name in known, f"{path} is not in the index"
            sessions = names(folder.path / "sessions")
            assert folder.session.token in sessions
            session = folder.path / "sessions" / folder.session.token
            assert [path.name for path in session.rglob("*") if path.is_file()] == ["lock"]


def ext4_image(path: Path, megabytes: int, *options: str) -> Path:
    """A file that holds a new ext4; the test is skipped if none can be made."""
    with path.open("wb") as file:
        file.truncate(megabytes << 20)
    command = ["mkfs.ext4", "-q", *options, str(path)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no ext4 can be made here: {made.stderr.decode().strip()}")
    return path


COMMANDS = """
import json, os, sys
from typer.testing import CliRunner
from hcache_backend.cli.main import app
results = []
for command in sys.argv[2:]:
    result = CliRunner().invoke(app, [*command.split(), "-d", sys.argv[1], "--json"])
    results.append([result.exit_code, result.output])
print(json.dumps([os.getpid(), results]))
"""


def hcache_commands(
    inside: Sequence[str],
    folder: Path,
    *commands: str,
    preexec: Callable[[], object] | None = None,
) -> tuple[int, list[tuple[int, str]]]:
    """Run commands of ``hcache`` on a folder in one process, which the command line ``inside``
    starts: its number, and status and output of each."""
    done = subprocess.run(
        [*inside, sys.executable, "-c", COMMANDS, str(folder), *commands],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=preexec,
    )
    pid, results = json.loads(done.stdout.splitlines()[-1])
    return pid, results


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def open_files() -> int:
    return len(names(Path("/proc/self/fd")))
