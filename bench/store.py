"""The page store against the disk's ceiling, SGLang's HiCacheFile and raw lmdb.

    python bench/store.py --dir /mnt/ssd0 [--pages-in-index 1000000 10000000]

All in one run and interleaved, so that what else the machine does hits all alike; medians.

- ceiling: O_DIRECT on one large preallocated file of the same bytes, the best of several block
  sizes and thread counts; writes end with one fdatasync
- store: ``put`` (durability ``batch``) and a final ``flush``; ``get`` with a cold cache
- HiCacheFile: SGLang's own file backend, read with a cold cache (its files' pages are dropped)
- exists: 128 random keys of an index with a million pages, against lmdb gets of the same keys
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hcache_backend.config import parse_config
from hcache_backend.store.base import WHOLE
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.striped import StripedPageStore

MIB = 1 << 20
BATCH = 128
NAMESPACE = b"bench-----------"
WRITER = b"bench---"
CEILING_BLOCKS = (MIB, 4 * MIB, 16 * MIB)
CEILING_THREADS = (2, 4, 8)
FINALISTS = 2
RESULTS = Path(__file__).parent / "results"

Work = Callable[[], None]


@dataclass
class Speeds:
    """MiB/s of every repeat, by contestant."""

    read: dict[str, list[float]] = field(default_factory=dict)
    write: dict[str, list[float]] = field(default_factory=dict)

    def note(self, kind: str, name: str, size: int, work: Work) -> None:
        """Time ``work``, which moves ``size`` bytes."""
        start = time.perf_counter()
        work()
        elapsed = time.perf_counter() - start
        getattr(self, kind).setdefault(name, []).append(size / MIB / elapsed)

    def median(self, kind: str, name: str) -> float:
        return statistics.median(getattr(self, kind)[name])

    def ceiling(self, kind: str) -> float:
        """The best of the ways to use one large file."""
        names = [name for name in getattr(self, kind) if name.startswith("file ")]
        return max(self.median(kind, name) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page-kib", type=int, nargs="*", default=[256, 2048, 16384])
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--pages-in-index", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hcache-bench-", dir=options.dir))
    try:
        speeds = {kib * 1024: bench_pages(folder, kib * 1024, options) for kib in options.page_kib}
        indexes = {pages: bench_index(folder, pages) for pages in options.pages_in_index}
    finally:
        shutil.rmtree(folder)
    report(speeds, indexes, options)


# ---- pages ----


def bench_pages(folder: Path, page: int, options: argparse.Namespace) -> Speeds:
    """Read and write pages of ``page`` bytes in batches of 128."""
    batches = max(1, 512 * MIB // (page * BATCH))
    size = batches * BATCH * page
    memory = memoryview(mmap.mmap(-1, BATCH * page))
    memory[:] = np.random.default_rng(0).bytes(MIB) * (BATCH * page // MIB)
    pages = [[memory[number * page : (number + 1) * page]] for number in range(BATCH)]
    speeds = Speeds()
    finalists = choose_ceilings(folder, size)
    config = parse_config(
        {"dirs": [str(folder / "store")], "min_free_bytes": 0, "io_threads": options.io_threads},
        "bench",
    )
    rival = hicache_file(folder / "hicache")
    chance = np.random.default_rng(page)
    with closing(StripedPageStore(config, WRITER)) as store:
        for repeat in range(options.repeats):
            names = [[chance.bytes(32) for _ in range(BATCH)] for _ in range(batches)]
            contest = [
                partial(store_round, store, names, pages, size, speeds),
                partial(file_round, folder, finalists, size, speeds),
            ]
            if rival is not None:
                contest.append(partial(rival_round, rival, names, pages, size, speeds))
            # Nobody is always the one who comes after the others.
            for entrant in contest[repeat % len(contest) :] + contest[: repeat % len(contest)]:
                settle()
                entrant()
            print_row(page, repeat, speeds)
    return speeds


def store_round(
    store: StripedPageStore,
    names: Sequence[list[bytes]],
    pages: Sequence[list[memoryview]],
    size: int,
    speeds: Speeds,
) -> None:
    """Put all batches and flush; get them all; delete them."""

    def write() -> None:
        for keys in names:
            require(all(store.put(NAMESPACE, keys, pages)), "not everything was stored")
        require(store.flush(), "not everything was synced")

    def read() -> None:
        for keys in names:
            require(all(store.get(NAMESPACE, keys, pages)), "not everything was read")

    speeds.note("write", "store", size, write)
    drop_cache(path for volume in store.volumes for path in volume.path.glob("pages/??/*.page"))
    speeds.note("read", "store", size, read)
    store.clear(NAMESPACE)


def choose_ceilings(folder: Path, size: int) -> list[tuple[int, int]]:
    """The block sizes and thread counts that look best in one try each."""
    speeds = Speeds()
    everything = [(block, threads) for block in CEILING_BLOCKS for threads in CEILING_THREADS]
    settle()
    file_round(folder, everything, size, speeds)

    def best(kind: str) -> list[tuple[int, int]]:
        return sorted(everything, key=lambda way: -speeds.median(kind, way_name(*way)))[:FINALISTS]

    return list(dict.fromkeys(best("read") + best("write")))


def way_name(block: int, threads: int) -> str:
    return f"file {block // MIB} MiB x {threads}"


def file_round(folder: Path, ways: Sequence[tuple[int, int]], size: int, speeds: Speeds) -> None:
    """Write and read one large preallocated file in several ways."""
    path = folder / "ceiling"
    fresh = not path.exists() or path.stat().st_size != size
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        if fresh:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size)
            # Written once, so that no way pays for blocks that were never written.
            move(fd, size, 4 * MIB, 4, write=True)
        for block, threads in ways:
            name = way_name(block, threads)

            def write(block: int = block, threads: int = threads) -> None:
                move(fd, size, block, threads, write=True)
                os.fdatasync(fd)

            def read(block: int = block, threads: int = threads) -> None:
                move(fd, size, block, threads, write=False)

            speeds.note("write", name, size, write)
            speeds.note("read", name, size, read)
    finally:
        os.close(fd)


def move(fd: int, size: int, block: int, threads: int, *, write: bool) -> None:
    """Move a whole file in blocks, on several threads."""
    buffers = [memoryview(mmap.mmap(-1, block)) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = b"\x5a" * block

    def work(number: int) -> None:
        for offset in range(number * block, size, threads * block):
            wanted = min(block, size - offset)
            buffer = buffers[number][:wanted]
            done = os.pwrite(fd, buffer, offset) if write else os.preadv(fd, [buffer], offset)
            require(done == wanted, "a block was cut")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


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


def rival_round(
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

    speeds.note("write", "HiCacheFile", size, write)
    files = list(Path(rival.file_path).glob("*.bin"))
    drop_cache(files)
    speeds.note("read", "HiCacheFile", size, read)
    for path in files:
        path.unlink()


def drop_cache(paths: Iterator[Path] | Sequence[Path]) -> None:
    """Drop the pages of files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def settle() -> None:
    """Nobody pays for what others wrote or deleted."""
    os.sync()
    time.sleep(0.2)


# ---- index ----


def bench_index(folder: Path, pages: int) -> dict[str, float]:
    """``exists`` with many pages in the index, and opening it."""
    root = folder / f"index-{pages}"
    config = parse_config({"dirs": [str(root)], "min_free_bytes": 0}, "bench")
    with closing(StripedPageStore(config, WRITER, background=False)) as store:
        fill_index(store, pages)
        result = time_exists(store, pages)
    code = (
        "import time\n"
        "from hcache_backend.config import parse_config\n"
        "from hcache_backend.store.striped import StripedPageStore\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        f"config = parse_config({{'dirs': [{str(root)!r}], 'min_free_bytes': 0}}, 'bench')\n"
        "before, start = rss(), time.perf_counter()\n"
        f"store = StripedPageStore(config, {WRITER!r}, background=False)\n"
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
    print(f"{pages:,} pages in the index: {result}", flush=True)
    return result


def fill_index(store: StripedPageStore, pages: int) -> None:
    """Enter pages that have no files: only the index is looked at here."""
    chunk = 50_000
    with store.volumes[0].use() as folder:
        for start in range(0, pages, chunk):
            numbers = np.random.default_rng(start).permutation(
                np.arange(start, min(start + chunk, pages))
            )
            entries = []
            for number in numbers.tolist():
                record = Record(WHOLE, 4096, 2 * MIB, WRITER, time.time_ns())
                entries.append(Entry(NAMESPACE, scattered(number), record))
            folder.index.insert(entries)


def scattered(number: int) -> bytes:
    """Keys all over the index, as hashes are, that need no table to be found again."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
    return mixed.to_bytes(8, "big") * 4


def time_exists(store: StripedPageStore, pages: int, rounds: int = 2000) -> dict[str, float]:
    """Microseconds for 128 keys, ours and raw lmdb in turn."""
    chance = np.random.default_rng(1)
    ours, raw = [], []
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
        "exists128_us": statistics.median(ours),
        "lmdb128_us": statistics.median(raw),
        "exists128_p99_us": statistics.quantiles(ours, n=100)[98],
    }


# ---- reporting ----


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def print_row(page: int, repeat: int, speeds: Speeds) -> None:
    def last(kind: str, name: str) -> str:
        values = getattr(speeds, kind).get(name)
        return f"{values[-1]:.0f}" if values else "-"

    names = [name for name in ("store", "HiCacheFile") if name in speeds.read]
    shown = ", ".join(f"{name} w {last('write', name)} r {last('read', name)}" for name in names)
    print(
        f"{page // 1024} KiB #{repeat}: {shown}, ceiling so far "
        f"w {speeds.ceiling('write'):.0f} r {speeds.ceiling('read'):.0f} MiB/s",
        flush=True,
    )


def report(
    speeds: dict[int, Speeds], indexes: dict[int, dict[str, float]], options: argparse.Namespace
) -> None:
    """Print a table; write store.json and store.png."""
    results: dict[str, Any] = {
        "read_vs_ceiling": {},
        "write_vs_ceiling": {},
        "read_vs_hicachefile": {},
        "exists128_us": {},
        "exists128_vs_lmdb": {},
        "pages": {},
        "indexes": {str(pages): found for pages, found in indexes.items()},
        "repeats": options.repeats,
        "io_threads": options.io_threads,
    }
    print(
        "\n| page | store reads | ceiling | ratio | store writes | ceiling | ratio | HiCacheFile "
        "reads | store / HiCacheFile |\n|---|---|---|---|---|---|---|---|---|"
    )
    for page, found in speeds.items():
        name = str(page)
        read, write = found.median("read", "store"), found.median("write", "store")
        best_read, best_write = found.ceiling("read"), found.ceiling("write")
        results["read_vs_ceiling"][name] = read / best_read
        results["write_vs_ceiling"][name] = write / best_write
        results["pages"][name] = {"read": found.read, "write": found.write}
        rival, ratio = "-", "-"
        if "HiCacheFile" in found.read:
            rival_read = found.median("read", "HiCacheFile")
            results["read_vs_hicachefile"][name] = read / rival_read
            rival, ratio = f"{rival_read:.0f}", f"{read / rival_read:.2f}"
        print(
            f"| {page // 1024} KiB | {read:.0f} MiB/s | {best_read:.0f} | {read / best_read:.2f} | "
            f"{write:.0f} | {best_write:.0f} | {write / best_write:.2f} | {rival} | {ratio} |"
        )
    for pages, found in indexes.items():
        results["exists128_us"][str(pages)] = found["exists128_us"]
        results["exists128_vs_lmdb"][str(pages)] = found["exists128_us"] / found["lmdb128_us"]
        print(
            f"\n{pages:,} pages: exists of 128 keys {found['exists128_us']:.0f} us "
            f"({found['exists128_us'] / found['lmdb128_us']:.2f} x lmdb, p99 "
            f"{found['exists128_p99_us']:.0f} us); opens in {found['open_ms']:.1f} ms with "
            f"{found['open_mib']:.1f} MiB; {found['index_bytes_a_page']:.0f} index bytes a page"
        )
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "store.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(speeds, options.results / "store.png")


def draw(speeds: dict[int, Speeds], target: Path) -> None:
    """Bars for the contestants, a line for the ceiling; every repeat is a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    colours = {"store": "#2166ac", "HiCacheFile": "#b2abd2"}
    for axis, kind in zip(axes, ("read", "write"), strict=True):
        for place, found in enumerate(speeds.values()):
            values = getattr(found, kind)
            names = [name for name in colours if name in values]
            if kind == "write":
                names = ["store"]
            for number, name in enumerate(names):
                x = place + (number - (len(names) - 1) / 2) * 0.36
                label = name if place == 0 and kind == "read" else None
                axis.bar(x, found.median(kind, name), 0.34, color=colours[name], label=label)
                axis.plot([x] * len(values[name]), values[name], ".", color="black", markersize=3)
            label = "disk's ceiling" if place == 0 and kind == "read" else None
            ceiling = found.ceiling(kind)
            axis.plot([place - 0.4, place + 0.4], [ceiling] * 2, color="#d6604d", label=label)
        axis.set_xticks(range(len(speeds)), [f"{page // 1024} KiB" for page in speeds])
        axis.set_xlabel("page")
        axis.set_title("cold reads" if kind == "read" else "writes, synced")
    axes[0].set_ylabel("MiB/s")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
