"""``exists`` in an index of many pages, against gets of the same keys in lmdb; and opening it.

Both on a quiet interpreter, and beside a thread that computes, as a server's scheduler does.
"""

import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np

from bench.store.pages import BATCH, MIB, NAMESPACE, WRITER, require
from hcache_backend.config import parse_config
from hcache_backend.format.envelope import PageName
from hcache_backend.format.units import WHOLE
from hcache_backend.store import PageStore
from hcache_backend.store.index import Entry


def bench_index(folder: Path, pages: int) -> dict[str, float]:
    """``exists`` with many pages in the index, and opening it."""
    root = folder / f"index-{pages}"
    config = parse_config({"dirs": [str(root)], "min_free_bytes": 0}, "bench")
    with closing(PageStore(config, WRITER, background=False)) as store:
        fill_index(store, pages)
        result = time_exists(store, pages, root / "lmdb")
    code = (
        "import time\n"
        "from hcache_backend.config import parse_config\n"
        "from hcache_backend.store import PageStore\n"
        f"config = parse_config({{'dirs': [{str(root)!r}], 'min_free_bytes': 0}}, 'bench')\n"
        "start = time.perf_counter()\n"
        f"store = PageStore(config, {WRITER!r}, background=False)\n"
        "print(time.perf_counter() - start)\n"
        "store.close()\n"
    )
    opened = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    shutil.rmtree(root)
    return {**result, "open_ms": 1e3 * float(opened)}


def fill_index(store: PageStore, pages: int) -> None:
    """Enter pages that have no files."""
    chunk = 50_000
    with store.disks[0].use() as folder:
        for start in range(0, pages, chunk):
            numbers = np.random.default_rng(start).permutation(
                np.arange(start, min(start + chunk, pages))
            )
            entries = []
            for number in numbers.tolist():
                name = PageName(NAMESPACE, scattered(number), WHOLE)
                entries.append(Entry(name, 4096, 2 * MIB, WRITER, time.time_ns()))
            folder.index.insert(entries)


def scattered(number: int) -> bytes:
    """Keys all over the index, as hashes are."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
    return mixed.to_bytes(8, "big") * 4


def time_exists(
    store: PageStore, pages: int, folder: Path, rounds: int = 2000, busy_rounds: int = 40
) -> dict[str, float]:
    """Microseconds for 128 keys: medians of ours, and of lmdb with the same keys in ``folder``."""
    import lmdb  # a peer: only benchmarks need it

    folder.mkdir()
    env = lmdb.open(str(folder), map_size=64 << 30, metasync=False, readahead=False)
    for start in range(0, pages, 50_000):
        with env.begin(write=True) as txn:
            for number in range(start, min(start + 50_000, pages)):
                txn.put(NAMESPACE + scattered(number), bytes(32))
    chance = np.random.default_rng(1)

    def times(count: int) -> tuple[list[float], list[float]]:
        found: tuple[list[float], list[float]] = [], []
        for number in range(count):
            keys = [scattered(int(page)) for page in chance.integers(0, pages, BATCH)]
            names = [NAMESPACE + key for key in keys]

            def get_raw(names: list[bytes] = names) -> None:
                with env.begin() as txn:
                    require(all(txn.get(name) is not None for name in names), "not found")

            def ask(keys: list[bytes] = keys) -> None:
                require(all(store.exists(NAMESPACE, keys)), "not found")

            # Who comes second finds everything in the processor's cache: take turns.
            both = list(zip(found, (ask, get_raw), strict=True))
            for name, work in both[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                work()
                name.append((time.perf_counter() - start) * 1e6)
        return found

    ours, raw = times(rounds)
    running = True

    def compute() -> None:
        while running:
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.1)  # it has Python's lock
    ours_busy, raw_busy = times(busy_rounds)
    running = False
    thread.join()
    env.close()
    shutil.rmtree(folder)
    return {
        "exists128_us": median(ours),
        "lmdb128_us": median(raw),
        "exists128_busy_us": median(ours_busy),
        "lmdb128_busy_us": median(raw_busy),
    }
