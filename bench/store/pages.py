"""Pages through the store and through others, and the disk's ceiling, in rounds."""

import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.store.peers import Peer, files_in, found_peers
from hcache_backend.config import parse_config
from hcache_backend.format.envelope import round_up
from hcache_backend.format.page import PageLayout
from hcache_backend.store import PageStore
from hcache_backend.store.kvikio_ops import kvikio_state

MIB = 1 << 20
BATCH = 128
NAMESPACE = b"bench-----------"
WRITER = b"bench---"
STORE, KVIKIO, CEILING = "store", "store, KvikIO", "ceiling"
_ROUND_BYTES = 256 * MIB  # that are written in a round, and read
_BLOCKS = (MIB, 4 * MIB, 16 * MIB)
_THREADS = (4, 8)
_SPAN = 64 * MIB  # of the memory that blocks go through: a multiple of all of them
_TRIES = 2
_GIL_RATE = 500  # samples per second
_PY_SPY = Path(sys.executable).with_name("py-spy")

Contestant = TypeVar("Contestant")
Work = Callable[[], None]
Way = tuple[int, int]  # how a large file is moved: block size and number of threads


@dataclass
class Speeds:
    """Results by contestant.

    Attributes:
        read: With a cold cache: MiB/s in every round.
        write: Brought to the disk at the end: MiB/s in every round.
        cpu: CPU seconds of the whole process per GB in every round, by ``read`` and ``write``.
        copied: Share of the bytes that the store copied because of alignment, as of ``cpu``.
        gil: Microseconds per page that the interpreter lock was held, in a round of its own.
        ceiling: The way of the ceiling, by ``read`` and ``write``.
    """

    read: dict[str, list[float]] = field(default_factory=dict)
    write: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    copied: dict[str, dict[str, float]] = field(default_factory=dict)
    gil: dict[str, dict[str, float]] = field(default_factory=dict)
    ceiling: dict[str, Way] = field(default_factory=dict)
    watches_gil: bool = False

    def note(
        self, kind: str, name: str, names: Sequence[list[bytes]], page: int, work: Work
    ) -> None:
        """Measure ``work``, which reads or writes the pages ``names``, each of ``page`` bytes."""
        pages = sum(map(len, names))
        if self.watches_gil:
            held = gil_seconds(work)
            if held is not None:
                self.gil.setdefault(kind, {})[name] = held * 1e6 / pages
            return
        cpu, start = time.process_time(), time.perf_counter()
        work()
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
        getattr(self, kind).setdefault(name, []).append(pages * page / MIB / elapsed)
        self.cpu.setdefault(kind, {}).setdefault(name, []).append(cpu * 1e9 / (pages * page))


def gil_seconds(work: Callable[[], None]) -> float | None:
    """Run ``work``; returns how long threads of this process held the lock, None if unknown.

    py-spy looks at the process now and then without stopping it. It needs to be installed, and
    allowed to read the memory of another process (in a container: the capability SYS_PTRACE).
    """
    with tempfile.TemporaryDirectory(prefix="hcache-gil-") as folder:
        samples = Path(folder) / "samples"
        options = ("--gil", "--nonblocking", "--rate", str(_GIL_RATE), "--format", "raw")
        try:
            watcher = subprocess.Popen(
                [_PY_SPY, "record", "--pid", str(os.getpid()), *options, "--output", samples],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            work()
            return None
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it says that it has begun, or ends
        try:
            work()
        finally:
            watcher.send_signal(signal.SIGINT)
            watcher.communicate()
        if not samples.exists():
            return None
        return sum(int(line.rsplit(" ", 1)[1]) for line in samples.open()) / _GIL_RATE


def bench_pages(
    folder: Path, layout: PageLayout, ways: dict[str, Way], rounds: int, io_threads: int
) -> Speeds:
    """Write and read a model's pages in batches of at most 128, as a rank of it does."""
    page, speeds = layout.stride, Speeds(ceiling=ways)
    batch = min(BATCH, max(1, _ROUND_BYTES // page))
    batches = max(1, _ROUND_BYTES // (page * batch))
    memory = filled_memory(batch * page)
    starts = range(0, batch * page, page)
    pages = [[memory[start : start + layout.page_bytes]] for start in starts]
    options = {"dirs": [str(folder / "store")], "min_free_bytes": 0, "io_threads": io_threads}
    chance = np.random.default_rng(page)
    one = LargeFile(folder, batches * batch, page, memory)
    with ExitStack() as opened:

        def store_of(reader: str) -> PageStore:
            config = parse_config(options | {"reader": reader}, "bench")
            return opened.enter_context(closing(PageStore(config, WRITER)))

        stores = {STORE: store_of("posix")}
        mode, why = kvikio_state()
        if mode == "nothing":
            print(f"without KvikIO: {why}")
        else:
            stores[KVIKIO] = store_of("kvikio")
        peers = found_peers(folder, memory, page)
        for number in range(rounds + 1):
            speeds.watches_gil = number == rounds
            names = [[chance.bytes(32) for _ in range(batch)] for _ in range(batches)]
            contest = [
                partial(_store_round, stores, layout, names, pages, number, speeds),
                partial(one.round, speeds),
                *(partial(_peer_round, *peer, names, page, speeds) for peer in peers.items()),
            ]
            for entrant in in_turn(contest, number):
                settle()
                entrant()
            print(f"{page / MIB:.2f} MiB, round {number + 1} of {rounds + 1}", flush=True)
    shutil.rmtree(folder / "store")
    return speeds


def filled_memory(size: int) -> memoryview:
    """Random bytes, at least as many as blocks of the ceiling need."""
    memory = memoryview(mmap.mmap(-1, max(round_up(size), _SPAN)))
    for start in range(0, len(memory), MIB):
        piece = memory[start : start + MIB]
        piece[:] = np.random.default_rng(start).bytes(len(piece))
    return memory


def in_turn(contestants: list[Contestant], number: int) -> list[Contestant]:
    """Their order in this round: no contestant is always the one after the others."""
    first = number % len(contestants)
    return contestants[first:] + contestants[:first]


class LargeFile:
    """The disk's ceiling: one preallocated file, written and read with O_DIRECT.

    It is made anew for every writing: pages are new data, and a disk may take new data at another
    speed than data in the place of old data.
    """

    def __init__(self, folder: Path, pages: int, page: int, memory: memoryview) -> None:
        self._path = folder / "ceiling"
        self._page, self._size = page, pages * page
        self._names = [[b""] * pages]
        self._memory = memory
        self._fd = -1

    def round(self, speeds: Speeds) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, self._size)
        settle()
        for kind in ("write", "read"):
            move = partial(self._move, kind, speeds.ceiling[kind])
            speeds.note(kind, CEILING, self._names, self._page, move)
        os.close(self._fd)
        self._path.unlink()
        settle()

    def _move(self, kind: str, way: Way) -> None:
        block, threads = way
        move = os.pwritev if kind == "write" else os.preadv

        def work(number: int) -> None:
            for offset in range(number * block, self._size, threads * block):
                wanted = min(block, self._size - offset)
                place = offset % _SPAN
                piece = self._memory[place : place + wanted]
                require(move(self._fd, [piece], offset) == wanted, "a block was cut")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        if kind == "write":
            os.fdatasync(self._fd)


def best_ways(folder: Path) -> dict[str, Way]:
    """The fastest block size and thread count of a large file, for reading and for writing."""
    one = LargeFile(folder, _ROUND_BYTES // MIB, MIB, filled_memory(MIB))
    found: dict[str, dict[Way, float]] = {"read": {}, "write": {}}
    for way in list(product(_BLOCKS, _THREADS)) * _TRIES:
        tried = Speeds(ceiling={"write": way, "read": way})
        one.round(tried)
        for kind, ways in found.items():
            ways[way] = max(ways.get(way, 0.0), *getattr(tried, kind)[CEILING])
    return {kind: max(ways, key=ways.__getitem__) for kind, ways in found.items()}


def drop_cache(paths: Iterable[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def settle() -> None:
    """No contestant pays for writes or deletions of others."""
    os.sync()
    time.sleep(0.2)


def require(condition: bool, message: str) -> None:
    """Stop the benchmark if something did not do its work."""
    if not condition:
        raise RuntimeError(message)


def _store_round(
    stores: Mapping[str, PageStore],
    layout: PageLayout,
    names: Sequence[list[bytes]],
    pages: Sequence[list[memoryview]],
    number: int,
    speeds: Speeds,
) -> None:
    """Put all batches and flush; get them all, by each of the readers; delete them."""
    store, shard = stores[STORE], layout.shard

    def write() -> None:
        for keys in names:
            done = store.put(NAMESPACE, keys, pages, shard=shard, table=layout.table)
            require(all(done), "not everything was stored")
        require(store.flush(), "not everything was synced")

    def read(reader: PageStore) -> None:
        for keys in names:
            done = reader.get(NAMESPACE, keys, pages, shard=shard)
            require(all(done), "not everything was read")

    def move(kind: str, name: str, one: PageStore, work: Work) -> None:
        before = one.stats.bytes_copied
        speeds.note(kind, name, names, layout.page_bytes, work)
        size = sum(map(len, names)) * layout.page_bytes
        speeds.copied.setdefault(kind, {})[name] = (one.stats.bytes_copied - before) / size

    move("write", STORE, store, write)
    for name, reader in in_turn(list(stores.items()), number):
        drop_cache(files_in(store.disks[0].path / "pages"))
        move("read", name, reader, partial(read, reader))
    store.drop(NAMESPACE)


def _peer_round(
    name: str, peer: Peer, names: Sequence[list[bytes]], page: int, speeds: Speeds
) -> None:
    """The same pages through another store."""

    def write() -> None:
        for keys in names:
            peer.put(keys)
        os.sync()

    def read() -> None:
        for keys in names:
            peer.get(keys)

    speeds.note("write", name, names, page, write)
    drop_cache(files_in(peer.pages))
    speeds.note("read", name, names, page, read)
    peer.clear()
