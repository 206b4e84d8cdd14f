"""The page store against the disk's ceiling, SGLang's HiCacheFile and raw lmdb.

    python bench/store.py --dir /mnt/ssd0 [--pages-in-index 1000000 10000000]

All in one run and interleaved, so that what else the machine does hits all alike. Disks of virtual
machines change their speed from second to second: every ratio is the median of the ratios of
rounds, and within a round the contestants come right after each other.

- ceiling: O_DIRECT on one large, freshly preallocated file of the same bytes, from and to the same
  memory, with the block size and thread count that were best in tries before; writes end with one
  fdatasync
- store: ``put`` (durability ``batch``) and a final ``flush``; ``get`` with a cold cache
- HiCacheFile: SGLang's own file backend, read with a cold cache (its files' pages are dropped)
- exists: 128 random keys of an index with a million pages, against lmdb gets of the same keys
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.store_index import bench_index
from bench.store_pages import CEILING, RIVAL, STORE, Speeds, bench_pages

RESULTS = Path(__file__).parent / "results"
_RATIOS = ("read_vs_ceiling", "write_vs_ceiling", "read_vs_hicachefile", "exists128_vs_lmdb")
_TABLES = ("exists128_us", "pages", "indexes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page-kib", type=int, nargs="*", default=[256, 2048, 16384])
    parser.add_argument("--io-threads", type=int, default=8)
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


def report(
    speeds: dict[int, Speeds], indexes: dict[int, dict[str, float]], options: argparse.Namespace
) -> None:
    """Print a table; write store.json and store.png."""
    results = _earlier(options.results / "store.json")
    results.update(rounds=options.rounds, io_threads=options.io_threads)
    print(
        "\n| page | store reads | ceiling | ratio | store writes | ceiling | ratio | HiCacheFile "
        "reads | store / HiCacheFile |\n|---|---|---|---|---|---|---|---|---|"
    )
    for page, found in speeds.items():
        name = str(page)
        results["pages"][name] = {
            "read": found.read,
            "write": found.write,
            "ceiling": {
                kind: {"block_bytes": block, "threads": threads}
                for kind, (block, threads) in found.ways.items()
            },
        }
        cells = [f"{page // 1024} KiB"]
        for kind in ("read", "write"):
            ratio = results[f"{kind}_vs_ceiling"][name] = found.ratio(kind, STORE, CEILING)
            cells += [f"{found.median(kind, who):.0f} MiB/s" for who in (STORE, CEILING)]
            cells.append(f"{ratio:.2f}")
        if RIVAL in found.read:
            ratio = results["read_vs_hicachefile"][name] = found.ratio("read", STORE, RIVAL)
            cells += [f"{found.median('read', RIVAL):.0f} MiB/s", f"{ratio:.2f}"]
        print(f"| {' | '.join(cells)} |")
    for pages, found in indexes.items():
        results["indexes"][str(pages)] = found
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
    if speeds:
        draw(speeds, options.results / "store.png")


def _earlier(path: Path) -> dict[str, Any]:
    """What runs with other sizes found: ten million pages take long, so they have their own."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in _RATIOS + _TABLES:
        found.setdefault(name, {})
    return found


def draw(speeds: dict[int, Speeds], target: Path) -> None:
    """Bars for the contestants, a line for the ceiling; every round is a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    colours = {STORE: "#2166ac", CEILING: "#d6604d", RIVAL: "#b2abd2"}
    for axis, kind in zip(axes, ("read", "write"), strict=True):
        for place, found in enumerate(speeds.values()):
            values = getattr(found, kind)
            names = [name for name in colours if name in values]
            for number, name in enumerate(names):
                x = place + (number - (len(names) - 1) / 2) * 0.27
                label = name if place == 0 else None
                axis.bar(x, found.median(kind, name), 0.25, color=colours[name], label=label)
                axis.plot([x] * len(values[name]), values[name], ".", color="black", markersize=3)
        axis.set_xticks(range(len(speeds)), [f"{page // 1024} KiB" for page in speeds])
        axis.set_xlabel("page")
        axis.set_title("cold reads" if kind == "read" else "writes, synced")
    axes[0].set_ylabel("MiB/s")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
