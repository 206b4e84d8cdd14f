"""``exists`` in an index of many pages, against raw lmdb gets of the same keys; and opening it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from bench.store.pages import BATCH, MIB, NAMESPACE, WRITER, require
from hcache_backend.config import parse_config
from hcache_backend.store import PageStore
from hcache_backend.store.format import PageName
from hcache_backend.store.index import Entry
from hcache_backend.units import WHOLE


def bench_index(folder: Path, pages: int) -> dict[str, float]:
    """``exists`` with many pages in the index, and opening it."""
    root = folder / f"index-{pages}"
    config = parse_config({"dirs": [str(root)], "min_free_bytes": 0}, "bench")
    with closing(PageStore(config, WRITER, background=False)) as store:
        fill_index(store, pages)
        result = time_exists(store, pages)
    code = (
        "import time\n"
        "from hcache_backend.config import parse_config\n"
        "from hcache_backend.store import PageStore\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        f"config = parse_config({{'dirs': [{str(root)!r}], 'min_free_bytes': 0}}, 'bench')\n"
        "before, start = rss(), time.perf_counter()\n"
        f"store = PageStore(config, {WRITER!r}, background=False)\n"
        "print(time.perf_counter() - start, rss() - before)\n"
        "store.close()\n"
    )
    opened = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    index_bytes = sum(path.stat().st_blocks * 512 for path in (root / "index").iterdir())
    shutil.rmtree(root)
    result.update(
        open_ms=float(opened[0]) * 1e3,
        open_mib=int(opened[1]) / MIB,
        index_bytes_a_page=index_bytes / pages,
    )
    return result


def fill_index(store: PageStore, pages: int) -> None:
    """Enter pages that have no files: only the index is looked at here."""
    chunk = 50_000
    with store.volumes[0].use() as folder:
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
    """Keys all over the index, as hashes are, that need no table to be found again."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
    return mixed.to_bytes(8, "big") * 4


def time_exists(store: PageStore, pages: int, rounds: int = 2000) -> dict[str, float]:
    """Microseconds for 128 keys, ours and raw lmdb in turn."""
    chance = np.random.default_rng(1)
    ours: list[float] = []
    raw: list[float] = []
    with store.volumes[0].use() as folder:
        env, table = folder.index._env, folder.index._pages
        for number in range(rounds):
            keys = [scattered(int(page)) for page in chance.integers(0, pages, BATCH)]
            names = [NAMESPACE + key for key in keys]

            def get_raw(names: list[bytes] = names) -> None:
                with env.begin(db=table) as txn:
                    require(all(txn.get(name) is not None for name in names), "not found")

            def ask(keys: list[bytes] = keys) -> None:
                require(all(store.exists(NAMESPACE, keys)), "not found")

            # Who comes second finds everything in the processor's cache: take turns.
            for name, work in ((ours, ask), (raw, get_raw))[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                work()
                name.append((time.perf_counter() - start) * 1e6)
    return {
        "exists128_us": median(ours),
        "lmdb128_us": median(raw),
        "exists128_p99_us": quantiles(ours, n=100)[98],
    }
