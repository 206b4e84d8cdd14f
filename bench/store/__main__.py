"""The page store against the disk's ceiling, SGLang's HiCacheFile and raw lmdb.

    python -m bench.store --dir /mnt/ssd0 [--pages-in-index 1000000 10000000]

All in one run and interleaved, so that what else the machine does hits all alike. Disks of virtual
machines change their speed from second to second: every ratio is the median of the ratios of
rounds, and within a round the contestants come right after each other.

- ceiling: O_DIRECT on one large, freshly preallocated file of the same bytes, from and to the same
  memory, with the block size and thread count that were best in tries before; writes end with one
  fdatasync
- store: ``put`` (durability ``batch``) and a final ``flush``; ``get`` with a cold cache
- store, KvikIO: reads of the same files with option ``reader`` ``kvikio``; without a GPU over the
  stand-in for the driver that the tests have
- HiCacheFile: SGLang's own file backend, read with a cold cache (its files' pages are dropped)
- exists: 128 random keys of an index with a million pages, against lmdb gets of the same keys

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
from bench.store.pages import CEILING, KVIKIO, RIVAL, STORE, bench_pages


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
    """Speeds of pages, and what an index of many pages takes."""
    heads = ("page", "store reads, MiB/s", "of the ceiling", "of HiCacheFile")
    rows, by_kvikio = [], []
    for size, found in sorted(results["pages"].items(), key=lambda page: int(page[0])):
        kib = int(size) // 1024
        page = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
        read = found["read"]
        rows.append(
            (
                page,
                f"{median(read[STORE]):,.0f}",
                ratio(read, STORE, CEILING),
                ratio(read, STORE, RIVAL) if RIVAL in read else None,
                f"{median(found['write'][STORE]):,.0f}",
                ratio(found["write"], STORE, CEILING),
            )
        )
        if KVIKIO in read:
            by_kvikio.append((page, f"{median(read[KVIKIO]):,.0f}", ratio(read, KVIKIO, STORE)))
    tables = [markdown((*heads, "store writes, MiB/s", "of the ceiling"), rows)]
    if by_kvikio:
        columns = ("page", "reads through KvikIO, MiB/s", "of the store's by `posix`")
        tables.append(markdown(columns, by_kvikio))
    heads = ("pages in the index", "128 `exists`, us", "of raw lmdb gets", "open, ms")
    indexes = [
        (
            f"{int(pages):,}",
            f"{found['exists128_us']:,.0f}",
            found["exists128_us"] / found["lmdb128_us"],
            f"{found['open_ms']:.0f}",
        )
        for pages, found in results["indexes"].items()
    ]
    return "\n\n".join((*tables, markdown(heads, indexes)))


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
        names = {name: name for name in (STORE, CEILING, RIVAL, KVIKIO) if name in measured}
        rows = [
            {"page": f"{int(size) // 1024} KiB"}
            | {name: median(speeds) for name, speeds in found[kind].items()}
            for size, found in results["pages"].items()
        ]
        grouped_bars(axes, f"{kind}s, MiB/s", rows, "page", names, "%.0f")
    return figure


if __name__ == "__main__":
    main()
