"""The page store against the disk's ceiling and other stores; its index, against lmdb.

    python -m bench.store --dir /mnt/ssd0 [--pages-in-index 1000000 10000000]

All in one run and interleaved, so that what else the machine does hits all alike. Disks of virtual
machines change their speed from second to second: every ratio is the median of the ratios of
rounds, and within a round the contestants come right after each other.

- ceiling: O_DIRECT on one large, freshly preallocated file of the same bytes, from and to the same
  memory, with the block size and thread count that were best in tries before; writes end with one
  fdatasync
- store: ``put`` (durability ``batch``) and a final ``flush``; ``get`` with a cold cache
- its files, bare loop: the store's files, opened, read and closed by as many threads, without index
  and checks; also with the digest of every page: what remains when the store costs nothing
- store, KvikIO: reads of the same files with option ``reader`` ``kvikio``; without a GPU over the
  stand-in for the driver that the tests have
- HiCacheFile: SGLang's own file backend, read with a cold cache (its files' pages are dropped)
- NIXL POSIX: NIXL's backend for local files with Linux AIO and direct I/O, 32 pages at a time; it
  is not told to sync, so its writes end with a sync of everything, as those of HiCacheFile do

- Mooncake, memory: its store on this machine, over TCP; another process lends the memory, and no
  disk is involved

CPU seconds are those of the whole process. How long the interpreter lock is held is sampled by
py-spy in a round that is not timed.

- exists: 128 random keys of an index with a million pages, against gets of the same keys in lmdb,
  alone and beside a thread that computes

Results of other sizes that stand in the folder of results are kept: ten million pages take long, so
they have a run of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.report import OUT, grouped_bars, markdown, write
from bench.store.index import bench_index
from bench.store.pages import BARE, CEILING, HASHED, KVIKIO, MIB, STORE, bench_pages
from bench.store.peers import PEERS

NAMES = (CEILING, STORE, BARE, HASHED, KVIKIO, *PEERS)
"""The contestants, in the order of tables."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page-kib", type=int, nargs="*", default=[256, 2048, 16384])
    parser.add_argument("--io-threads", type=int, default=8)
    parser.add_argument("--pages-in-index", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for store.json and store.png")
    options = parser.parse_args()
    earlier = options.out / "store.json"
    results = json.loads(earlier.read_text()) if earlier.exists() else {"pages": {}, "indexes": {}}
    results |= {"rounds": options.rounds, "io_threads": options.io_threads}
    folder = Path(tempfile.mkdtemp(prefix="hcache-bench-", dir=options.dir))
    try:
        for kib in options.page_kib:
            speeds = bench_pages(folder, kib * 1024, options.rounds, options.io_threads)
            results["pages"][str(kib * 1024)] = asdict(speeds)
        for pages in options.pages_in_index:
            results["indexes"][str(pages)] = bench_index(folder, pages)
    finally:
        shutil.rmtree(folder)
    print(table_lines(results))
    write(options.out, "store", results, draw)


def table_lines(results: dict[str, Any]) -> str:
    """Speeds and costs of pages, and what an index of many pages takes."""
    tables = []
    for kind in ("read", "write"):
        heads = (f"{kind}s", "store", "GB/s", "of the ceiling", "CPU s per GB", "GIL, us per page")
        rows: list[tuple[object, ...]] = []
        for size, found in sorted(results["pages"].items(), key=lambda page: int(page[0])):
            speeds, kib = found[kind], int(size) // 1024
            gil = found["gil"].get(kind, {})
            page = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
            rows += [
                (
                    page,
                    name,
                    median(speeds[name]) * MIB / 1e9,
                    ratio(speeds, name, CEILING),
                    median(found["cpu"][kind][name]),
                    f"{gil[name]:,.0f}" if name in gil else None,
                )
                for name in NAMES
                if name in speeds
            ]
        tables.append(markdown(heads, rows))
    columns = (
        "pages in the index",
        "128 `exists`, us",
        "lmdb",
        "beside a busy thread",
        "lmdb",
        "open, ms",
    )
    indexes = [
        (
            f"{int(pages):,}",
            f"{found['exists128_us']:,.0f}",
            f"{found['lmdb128_us']:,.0f}",
            f"{found['exists128_busy_us']:,.0f}",
            f"{found['lmdb128_busy_us']:,.0f}",
            f"{found['open_ms']:.0f}",
        )
        for pages, found in results["indexes"].items()
    ]
    return "\n\n".join((*tables, markdown(columns, indexes)))


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> float:
    """How many times as fast ``name`` was as ``other``: the median over the rounds."""
    return median(one / two for one, two in zip(speeds[name], speeds[other], strict=True))


def draw(results: dict[str, Any]) -> Any:
    """Median speeds of the contestants."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = zip(figure.subplots(1, 2, sharey=True), ("read", "write"), strict=True)
    for axes, kind in panels:
        measured = set().union(*(found[kind] for found in results["pages"].values()))
        names = {name: name for name in NAMES if name in measured}
        rows = [
            {"page": f"{int(size) // 1024} KiB"}
            | {name: median(speeds) for name, speeds in found[kind].items()}
            for size, found in results["pages"].items()
        ]
        grouped_bars(axes, f"{kind}s, MiB/s", rows, "page", names, "%.0f")
    return figure


if __name__ == "__main__":
    main()
