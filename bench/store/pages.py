"""Pages through the store, through SGLang's HiCacheFile, and the disk's ceiling, in rounds."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from hcache_backend.config import parse_config
from hcache_backend.kvikio_state import kvikio_state
from hcache_backend.store import PageStore

MIB = 1 << 20
BATCH = 128
NAMESPACE = b"bench-----------"
WRITER = b"bench---"
STORE, KVIKIO, RIVAL, CEILING = "store", "store, KvikIO", "HiCacheFile", "ceiling"
_LEAST_BYTES = 512 * MIB
_BLOCKS = (MIB, 4 * MIB, 16 * MIB)
_THREADS = (4, 8)
_TRIES = 2

Contestant = TypeVar("Contestant")
Way = tuple[int, int]
"""How a large file is moved: block size and number of threads."""


@dataclass
class Speeds:
    """MiB/s in every round, by contestant.

    Attributes:
        read: Reading with a cold cache.
        write: Writing, brought to the disk at the end.
        ceiling: The way of the ceiling, by ``read`` and ``write``.
    """

    read: dict[str, list[float]] = field(default_factory=dict)
    write: dict[str, list[float]] = field(default_factory=dict)
    ceiling: dict[str, Way] = field(default_factory=dict)

    def note(self, kind: str, name: str, size: int, work: Callable[[], None]) -> None:
        """Time ``work``, which moves ``size`` bytes."""
        start = time.perf_counter()
        work()
        elapsed = time.perf_counter() - start
        getattr(self, kind).setdefault(name, []).append(size / MIB / elapsed)


def bench_pages(folder: Path, page: int, rounds: int, io_threads: int) -> Speeds:
    """Write and read pages of ``page`` bytes in batches of 128."""
    batches = max(1, _LEAST_BYTES // (page * BATCH))
    size = batches * BATCH * page
    memory = memoryview(mmap.mmap(-1, BATCH * page))
    memory[:] = np.random.default_rng(0).bytes(MIB) * (BATCH * page // MIB)
    pages = [[memory[number * page : (number + 1) * page]] for number in range(BATCH)]
    options = {"dirs": [str(folder / "store")], "min_free_bytes": 0, "io_threads": io_threads}
    rival = hicache_file(folder / "hicache")
    chance = np.random.default_rng(page)
    one = LargeFile(folder, size, memory)
    speeds = Speeds(ceiling=one.best_ways())
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
        for number in range(rounds):
            names = [[chance.bytes(32) for _ in range(BATCH)] for _ in range(batches)]
            readers = in_turn(list(stores.items()), number)
            contest = [
                partial(_store_round, stores[STORE], readers, names, pages, size, speeds),
                partial(one.round, speeds),
            ]
            if rival is not None:
                contest.append(partial(_rival_round, rival, names, pages, size, speeds))
            for entrant in in_turn(contest, number):
                settle()
                entrant()
            print(f"{page // 1024} KiB, round {number + 1} of {rounds}", flush=True)
    return speeds


def in_turn(contestants: list[Contestant], number: int) -> list[Contestant]:
    """Their order in this round: nobody is always the one who comes after the others."""
    first = number % len(contestants)
    return contestants[first:] + contestants[:first]


class LargeFile:
    """The disk's ceiling: one preallocated file, written and read with O_DIRECT.

    It is made anew for every writing: pages are new data, and a disk may take new data at another
    speed than what replaces old data in place.

    Args:
        folder: Where it stands.
        size: Its bytes.
        memory: The bytes come from here and go here, as those of the pages do.
    """

    def __init__(self, folder: Path, size: int, memory: memoryview) -> None:
        self._path = folder / "ceiling"
        self._size = size
        self._memory = memory
        self._fd = -1

    def best_ways(self) -> dict[str, Way]:
        """The fastest block size and thread count, for reading and for writing."""
        found: dict[str, dict[Way, list[float]]] = {"read": {}, "write": {}}
        for _ in range(_TRIES):
            for block in _BLOCKS:
                for threads in _THREADS:
                    way = (block, threads)
                    tried = Speeds(ceiling={"write": way, "read": way})
                    self.round(tried)
                    for kind, speeds in found.items():
                        speeds.setdefault(way, []).append(median(getattr(tried, kind)[CEILING]))
        return {kind: max(ways, key=lambda way: median(ways[way])) for kind, ways in found.items()}

    def round(self, speeds: Speeds) -> None:
        """Make, write, read and delete it."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, self._size)
        settle()
        for kind in ("write", "read"):
            speeds.note(kind, CEILING, self._size, partial(self._move, kind, speeds.ceiling[kind]))
        os.close(self._fd)
        self._path.unlink()
        settle()

    def _move(self, kind: str, way: Way) -> None:
        block, threads = way
        move = os.pwritev if kind == "write" else os.preadv

        def work(number: int) -> None:
            for offset in range(number * block, self._size, threads * block):
                wanted = min(block, self._size - offset)
                place = offset % len(self._memory)
                piece = self._memory[place : place + wanted]
                require(move(self._fd, [piece], offset) == wanted, "a block was cut")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        if kind == "write":
            os.fdatasync(self._fd)


def hicache_file(folder: Path) -> Any:
    """SGLang's own file backend, or None where SGLang cannot be imported."""
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    except Exception as error:
        print(f"without HiCacheFile: {error!r}")
        return None
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
    )
    return HiCacheFile(config, file_path=str(folder))


def drop_cache(paths: Iterable[Path]) -> None:
    """Drop the pages of files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def settle() -> None:
    """Nobody pays for what others wrote or deleted."""
    os.sync()
    time.sleep(0.2)


def require(condition: bool, message: str) -> None:
    """Stop the benchmark when something did not do what it is timed for."""
    if not condition:
        raise RuntimeError(message)


def _store_round(
    store: PageStore,
    readers: Sequence[tuple[str, PageStore]],
    names: Sequence[list[bytes]],
    pages: Sequence[list[memoryview]],
    size: int,
    speeds: Speeds,
) -> None:
    """Put all batches and flush; get them all, by each of the readers; delete them."""

    def write() -> None:
        for keys in names:
            require(all(store.put(NAMESPACE, keys, pages)), "not everything was stored")
        require(store.flush(), "not everything was synced")

    def read(reader: PageStore) -> None:
        for keys in names:
            require(all(reader.get(NAMESPACE, keys, pages)), "not everything was read")

    speeds.note("write", STORE, size, write)
    for name, reader in readers:
        drop_cache(path for volume in store.volumes for path in volume.path.glob("pages/??/*.page"))
        speeds.note("read", name, size, partial(read, reader))
    store.drop(NAMESPACE)


def _rival_round(
    rival: Any,
    names: Sequence[list[bytes]],
    pages: Sequence[list[memoryview]],
    size: int,
    speeds: Speeds,
) -> None:
    """The same pages through HiCacheFile."""
    import torch

    tensors = [torch.frombuffer(page[0], dtype=torch.uint8) for page in pages]
    keys = [[name.hex() for name in batch] for batch in names]

    def write() -> None:
        for batch in keys:
            require(rival.batch_set(batch, tensors), "HiCacheFile did not store")
        os.sync()

    def read() -> None:
        for batch in keys:
            found = rival.batch_get(batch, tensors)
            require(all(tensor is not None for tensor in found), "HiCacheFile did not read")

    speeds.note("write", RIVAL, size, write)
    files = list(Path(rival.file_path).glob("*.bin"))
    drop_cache(files)
    speeds.note("read", RIVAL, size, read)
    for path in files:
        path.unlink()
