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

from bench.harness.report import COLOURS, OUT, grouped_bars, markdown, picture, write
from bench.store.index import bench_index
from bench.store.pages import BARE, CEILING, HASHED, KVIKIO, MIB, STORE, bench_pages
from bench.store.peers import PEERS

NAMES = (CEILING, STORE, BARE, HASHED, KVIKIO, *PEERS)
"""The contestants, in the order of tables."""
DRAWN = {
    CEILING: COLOURS["limit"],
    STORE: COLOURS["ours"],
    "HiCacheFile": COLOURS["file"],
    "NIXL POSIX": COLOURS["nixl"],
}
"""Those of the picture, with their colours."""
CHOSEN_PAGE = 2 * MIB


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
            speeds, page = found[kind], page_name(size)
            gil = found["gil"].get(kind, {})
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


def chosen_lines(results: dict[str, Any]) -> str:
    """Stores on the disk with pages of 2 MiB."""
    found = results["pages"][str(CHOSEN_PAGE)]
    rows = [
        (
            f"{kind}s, {name}",
            median(found[kind][name]) * MIB / 1e9,
            ratio(found[kind], name, CEILING),
            median(found["cpu"][kind][name]),
        )
        for kind in ("read", "write")
        for name in DRAWN
    ]
    heads = (f"pages of {page_name(CHOSEN_PAGE)}", "GB/s", "of the ceiling", "CPU s per GB")
    return markdown(heads, rows)


def page_name(size: int | str) -> str:
    """Bytes of a page, in words."""
    kib = int(size) // 1024
    return f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> float:
    """How many times as fast ``name`` was as ``other``: the median over the rounds."""
    return median(one / two for one, two in zip(speeds[name], speeds[other], strict=True))


def draw(results: dict[str, Any]) -> Any:
    """Median speeds of stores on the disk, a panel for reads and one for writes."""
    pages = sorted(results["pages"].items(), key=lambda page: int(page[0]))
    said = []
    for kind in ("read", "write"):
        shares = [ratio(found[kind], STORE, CEILING) for _, found in pages]
        said.append(f"{kind}s at {min(shares):.2f} to {max(shares):.2f}")
    figure = picture(f"The page store {' and '.join(said)} of the disk's speed")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ("read", "write"), strict=True):
        names = [name for name in DRAWN if all(name in found[kind] for _, found in pages)]
        rows = [
            {"page": page_name(size)}
            | {name: median(found[kind][name]) * MIB / 1e9 for name in names}
            for size, found in pages
        ]
        grouped_bars(axes, f"{kind}s", rows, "page", {n: n for n in names}, "%.2f", DRAWN)
        if (legend := axes.get_legend()) is not None:
            legend.remove()
        axes.set_xlabel("size of a page", fontsize=10)
    panels[0].set_ylabel("GB/s", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=10
    )
    return figure


if __name__ == "__main__":
    main()
