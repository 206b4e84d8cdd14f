"""The page store against the disk's ceiling and other stores; its index, against lmdb.

    python -m bench.store --dir /mnt/ssd0 [--pages-in-index 1000000 10000000]

Disks of virtual machines change their speed from second to second, so contestants come right after
each other within a round, and every ratio is the median of the ratios of rounds.

docs/research/store.md describes the contestants. KvikIO, without a GPU, reads over the stand-in for
the driver that the tests have. "128 `exists`" are random keys of an index with a million pages,
against gets of the same keys in lmdb, alone and beside a thread that computes.

CPU seconds are those of the whole process. py-spy samples in a round that is not timed how long the
interpreter lock is held. Results of other sizes that stand in the folder of results are kept: ten
million pages have a run of their own.
"""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.program import Program, Run, Setting, at_least, scratch
from bench.harness.report import Picture, Results, Row, Series, Table
from bench.store.index import bench_index
from bench.store.pages import BARE, CEILING, HASHED, KVIKIO, MIB, STORE, bench_pages
from bench.store.peers import PEERS

NAMES = (CEILING, STORE, BARE, HASHED, KVIKIO, *PEERS)  # the contestants, in the order of tables
DRAWN = {CEILING: "limit", STORE: "ours", "HiCacheFile": "file", "NIXL POSIX": "nixl"}
"""Those of the picture, with their colours."""
CHOSEN_PAGE = 2 * MIB


def measure(run: Run) -> Results:
    given = run.given
    earlier = given.out / "store.json"
    results = json.loads(earlier.read_text()) if earlier.exists() else {"pages": {}, "indexes": {}}
    results |= {"rounds": given.rounds, "io_threads": given.io_threads}
    with scratch(given.dir) as folder:
        for kib in given.page_kib:
            speeds = bench_pages(Path(folder), kib * 1024, given.rounds, given.io_threads)
            results["pages"][str(kib * 1024)] = asdict(speeds)
        for pages in given.pages_in_index:
            results["indexes"][str(pages)] = bench_index(Path(folder), pages)
    return results


def rows_of(results: Results, kind: str, names: Iterable[str] = NAMES) -> list[Row]:
    return [
        {
            "kind": kind,
            "size": page_name(size),
            "name": name,
            "gb_s": median(found[kind][name]) * MIB / 1e9,
            "of_ceiling": ratio(found[kind], name, CEILING),
            "cpu": median(found["cpu"][kind][name]),
            "gil": found["gil"].get(kind, {}).get(name),
        }
        for size, found in sorted(results["pages"].items(), key=lambda page: int(page[0]))
        for name in names
        if name in found[kind]
    ]


def chosen(results: Results) -> list[Row]:
    """Stores on the disk with pages of 2 MiB."""
    return [
        {**row, "name": f"{kind}s, {row['name']}"}
        for kind in ("read", "write")
        for row in rows_of(results, kind, DRAWN)
        if row["size"] == page_name(CHOSEN_PAGE)
    ]


def page_name(size: int | str) -> str:
    kib = int(size) // 1024
    return f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> float:
    """How many times as fast ``name`` was as ``other``: the median over the rounds."""
    return median(one / two for one, two in zip(speeds[name], speeds[other], strict=True))


def panels(results: Results) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for kind in ("read", "write"):
        sizes: dict[str, dict[str, Any]] = {}
        for row in rows_of(results, kind, DRAWN):
            sizes.setdefault(row["size"], {"page": row["size"]})[row["name"]] = row["gb_s"]
        found[f"{kind}s"] = list(sizes.values())
    return found


def finding(results: Results) -> str:
    said = []
    for kind in ("read", "write"):
        shares = [row["of_ceiling"] for row in rows_of(results, kind, (STORE,))]
        said.append(f"{kind}s at {min(shares):.2f} to {max(shares):.2f}")
    return f"The page store {' and '.join(said)} of the disk's speed"


def _table(kind: str) -> Table:
    columns = f"{kind}s = size | store = name | {_SPEEDS} | GIL, us per page = gil :,.0f"
    return Table(lambda results: rows_of(results, kind), columns)


_SPEEDS = "GB/s = gb_s | of the ceiling = of_ceiling | CPU s per GB = cpu"
PROGRAM = Program(
    name="store",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("--dir", Path, Path(tempfile.gettempdir()), "the disk"),
        Setting("--rounds", at_least(1), 9, "of all stores"),
        Setting("--page-kib", int, [256, 2048, 16384], "sizes of pages", {"nargs": "*"}),
        Setting("--io-threads", at_least(1), 8, "of the store"),
        Setting("--pages-in-index", int, [1_000_000], "sizes of indexes", {"nargs": "*"}),
    ),
    tables={
        "table": (
            *map(_table, ("read", "write")),
            Table(
                lambda results: [
                    {"pages": f"{int(pages):,}", **found}
                    for pages, found in results["indexes"].items()
                ],
                "pages in the index = pages | 128 `exists`, us = exists128_us :,.0f | "
                "lmdb = lmdb128_us :,.0f | beside a busy thread = exists128_busy_us :,.0f | "
                "lmdb = lmdb128_busy_us :,.0f | open, ms = open_ms :.0f",
            ),
        ),
        "chosen": Table(chosen, f"pages of {page_name(CHOSEN_PAGE)} = name | {_SPEEDS}"),
    },
    draw=Picture(
        title=finding,
        panels=panels,
        x="page",
        x_label="size of a page",
        y_label="GB/s",
        series=[Series(name, name, colour) for name, colour in DRAWN.items()],
        bars="%.2f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
