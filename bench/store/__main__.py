"""The page store against the disk's ceiling and other stores; its index, against lmdb.

    python -m bench.store --dir /mnt/ssd0 [--pages-in-index 1000000 10000000]

Pages are those of ten models with default options: 64 tokens in the default codec, of one rank.
Models with equal pages are measured once. All stores move equal sizes, although plain pages of the
other stores would be larger.

Disks of virtual machines change their speed from second to second, so contestants come right after
each other within a round, and every ratio is the median of the ratios of rounds.

docs/research/store.md has the contestants. Without a GPU, KvikIO reads over the stand-in for the
driver that the tests have. "128 `exists`" are random keys of an index, against gets of the same
keys in lmdb, alone and beside a thread that computes.

CPU seconds are those of the whole process. In a round that is not timed py-spy samples how long the
interpreter lock is held. Results of other indexes in the folder of results stay: ten million pages
have a run of their own, with `--models` alone.
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
from bench.store.pages import CEILING, KVIKIO, MIB, STORE, bench_pages, best_ways
from bench.store.peers import PEERS
from hcache_backend.cli.plan import page_layout
from hcache_backend.format.page import PageLayout
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.restore import Partition

NAMES = (CEILING, STORE, KVIKIO, *PEERS)  # the contestants, in the order of tables
DRAWN = {CEILING: "limit", STORE: "ours", "HiCacheFile": "file", "NIXL POSIX": "nixl"}
"""Those of the picture, with their colours."""
RANKS = {
    "DeepSeek-V3": 8,
    "SmolLM2-135M": 1,
    "gpt-oss-120b": 1,
    "Llama-3.3-70B": 8,
    "Qwen2.5-7B": 1,
    "Qwen3-30B-A3B": 1,
    "Llama-3.1-8B": 1,
    "Mistral-7B-v0.1": 1,
    "Qwen3-8B": 1,
    "Gemma-3-27B": 2,
}
"""The models, none of which has smaller hidden states than K and V, and their ranks."""
CHOSEN = "Llama-3.1-8B"
_CONFIGS = Path(__file__).resolve().parents[2] / "tests/unit/partition/public_models.json"


def measure(run: Run) -> Results:
    given = run.given
    earlier = given.out / "store.json"
    kept = json.loads(earlier.read_text()) if earlier.exists() else {"pages": [], "indexes": {}}
    results: dict[str, Any] = {"rounds": given.rounds, "io_threads": given.io_threads}
    results |= {part: kept[part] for part in ("pages", "indexes")}
    with scratch(given.dir) as folder:
        if given.models:
            results["pages"] = []
            ways = best_ways(Path(folder))
        for layout, models in layouts(given.models, Path(folder)).items():
            speeds = bench_pages(Path(folder), layout, ways, given.rounds, given.io_threads)
            about = {"models": models, "bytes": layout.page_bytes}
            results["pages"].append({**about, **asdict(speeds)})
        for pages in given.pages_in_index:
            results["indexes"][str(pages)] = bench_index(Path(folder), pages)
    return results


def layouts(models: Iterable[str], folder: Path) -> dict[PageLayout, list[str]]:
    """The pages of models by default options, smallest first, and which models have them."""
    found: dict[PageLayout, list[str]] = {}
    configs = json.loads(_CONFIGS.read_text())
    for name in models:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(configs[name]["config"]))
        shape, sides, dtype, *_ = read_model(path)
        layers = shape.layers - (0 if sides is None else sides.layers)
        layout = page_layout(shape, dtype, Partition(0, 0, layers), tp=RANKS[name])
        found.setdefault(layout, []).append(name)
    return dict(sorted(found.items(), key=lambda one: one[0].page_bytes))


def rows_of(results: Results, kind: str, names: Iterable[str] = NAMES) -> list[Row]:
    return [
        {
            "page": page_name(found),
            "name": name,
            "gb_s": median(found[kind][name]) * MIB / 1e9,
            "of_ceiling": ratio(found[kind], name, CEILING),
            "cpu": median(found["cpu"][kind][name]),
            "copied": found["copied"].get(kind, {}).get(name),
            "gil": found["gil"].get(kind, {}).get(name),
        }
        for found in results["pages"]
        for name in names
        if name in found[kind]
    ]


def chosen(results: Results) -> list[Row]:
    some = {"pages": [found for found in results["pages"] if CHOSEN in found["models"]]}
    return [
        {**row, "name": f"{kind}s, {row['name']}"}
        for kind in ("read", "write")
        for row in rows_of(some, kind, DRAWN)
    ]


def page_name(found: Row) -> str:
    ranks = RANKS[found["models"][0]]
    return f"{', '.join(found['models'])}{f' on {ranks} GPUs' if ranks > 1 else ''}"


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> float:
    """How many times as fast ``name`` was as ``other``: the median over the rounds."""
    return median(one / two for one, two in zip(speeds[name], speeds[other], strict=True))


def ratios(results: Results, kind: str, other: str) -> list[float]:
    """Of each page size: how many times as fast as ``other`` the store was."""
    return [ratio(found[kind], STORE, other) for found in results["pages"]]


def sizes(results: Results) -> list[Row]:
    return [
        {
            "page": page_name(found),
            "mib": found["bytes"] / MIB,
            **{
                f"{kind}_{other}": ratio(found[kind], STORE, other)
                for kind in ("read", "write")
                for other in DRAWN.keys() & found[kind].keys()
            },
        }
        for found in results["pages"]
    ]


def panels(results: Results) -> dict[str, list[Row]]:
    """Speeds of the drawn stores by the size of a page."""
    return {
        f"{kind}s": [
            {
                "mib": found["bytes"] / MIB,
                **{n: median(found[kind][n]) * MIB / 1e9 for n in DRAWN if n in found[kind]},
            }
            for found in results["pages"]
        ]
        for kind in ("read", "write")
    }


def finding(results: Results) -> str:
    read, write = (span(ratios(results, kind, CEILING)) for kind in ("read", "write"))
    return f"The page store reads at {read} and writes at {write} of the disk's speed"


def span(values: Iterable[float]) -> str:
    """The least and the largest; one number if they look alike."""
    known = list(values)
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(known), max(known))))


def _table(kind: str) -> Table:
    columns = f"{kind}s = page | store = name | {_SPEEDS} | {_COSTS}"
    return Table(lambda results: rows_of(results, kind), columns)


_SPEEDS = "GB/s = gb_s | of the ceiling = of_ceiling | CPU s per GB = cpu"
_COSTS = "copied = copied :.4f | GIL, us per page = gil :,.0f"
PROGRAM = Program(
    name="store",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--dir", Path, Path(tempfile.gettempdir()), "the disk"),
        Setting("--rounds", at_least(1), 5, "of all stores"),
        Setting("--models", str, [*RANKS], "whose pages", {"nargs": "*", "choices": [*RANKS]}),
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
        "chosen": Table(chosen, f"{CHOSEN} = name | {_SPEEDS}"),
        "sizes": Table(
            sizes,
            "pages of = page | MiB = mib | reads, of the ceiling = read_ceiling | "
            "of NIXL = read_NIXL POSIX | of `HiCacheFile` = read_HiCacheFile | "
            "writes, of the ceiling = write_ceiling | of NIXL = write_NIXL POSIX | "
            "of `HiCacheFile` = write_HiCacheFile",
        ),
    },
    draw=Picture(
        title=finding,
        panels=panels,
        x="mib",
        x_label="MiB of a page of 64 tokens",
        y_label="GB/s",
        series=[Series(name, name, colour) for name, colour in DRAWN.items()],
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
