"""Numbers in prose, made of recorded results as the tables are.

A number stands between ``<!-- = NAME -->`` and ``<!-- / -->``; :data:`CLAIMS` has the function that
makes it. ``python -m bench.record --tables`` writes all of them anew.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import geometric_mean, median
from typing import Any

from bench.bursts import of as of_way
from bench.hits import __main__ as hits
from bench.real import ours_of
from bench.store.__main__ import ratios, rows_of, span
from bench.store.pages import CEILING, STORE
from hcache_backend.plan.model_shape import ModelShape, encoded
from hcache_backend.plan.plan import PartitionPlan
from hcache_backend.plan.profile import preset_profile

MARK = re.compile(r"(<!-- = ([\w-]+) -->)(.*?)(<!-- / -->)", re.DOTALL)
HITS = ("hits", "hits_latents", "hits_sides", "hits_dsa", "hits_flags")

Recorded = Callable[[str], Any]  # content of the results of a name


def of_better(results: Recorded) -> list[float]:
    """Ours by the better one of reading and computing: every median at every speed of L3."""
    return [
        point["of_better"]
        for name in HITS
        for case in results(name)["cases"]
        for point in case["points"]
    ]


def of(results: Recorded, other: str) -> list[float]:
    return ours_of(results("real"), other)


def mean(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios):.2f}"


def of_file(results: Recorded, dtype: str) -> str:
    """Ours by ``file``, cold, in the cases of a type."""
    rows = results("real")["rows"]
    return mean([row["of_file_cold"] for row in rows if row["dtype"] == dtype])


def last_of(results: Recorded, name: str, way: str, part: str, form: str) -> str:
    """A part of the last row of a server; of bursts that is the largest one."""
    return format(of_way(results(name), way)[-1][part], form)


def bytes_of_file(results: Recorded) -> str:
    """Bytes that ours stores of K and V in bfloat16, by those of ``file``."""
    stored = [
        row["bytes_per_token"] for row in results("real")["rows"] if row["dtype"] == "bfloat16"
    ]
    return f"{median(sizes['ours'] / sizes['file'] for sizes in stored):.2f}"


def fraction_of_computing(results: Recorded) -> str:
    rows = results("real")["rows"]
    return mean([row["cold_ms"]["ours"] / row["cold_ms"]["none"] for row in rows])


def store_by(results: Recorded, kind: str, other: str) -> str:
    """How many times as fast as another the page store is: over the pages of all models."""
    return span(ratios(results("store"), kind, other))


def store_cpu(results: Recorded, name: str) -> str:
    """CPU seconds per GB of reads."""
    return span(row["cpu"] for row in rows_of(results("store"), "read", (name,)))


def store_copied(results: Recorded) -> str:
    """The largest share of the bytes of a page that the store copied, in per cent."""
    rows = [row for kind in ("read", "write") for row in rows_of(results("store"), kind, (STORE,))]
    return f"{100 * max(row['copied'] for row in rows):.2f}"


@cache
def planned() -> dict[str, float]:
    """Milliseconds by ``hcache plan`` until Llama-3.3-70B has 60,000 tokens: 8 H100, 8 SSDs."""
    # fmt: off
    shape = ModelShape(
        family="llama", gated=True, layers=80, hidden=8192, mlp_width=28672,
        heads=64, kv_heads=8, head_dim=128, value_dim=128,
    )
    # fmt: on
    shape = encoded(shape, "auto", "bfloat16", tp=8)
    plan = PartitionPlan(preset_profile("h100", 8), shape, 60_000, 8, "auto")
    return dict(plan.report()["predicted_ms"])


CLAIMS: dict[str, Callable[[Recorded], str]] = {
    "hits-medians": lambda results: f"{len(of_better(results))}",
    "hits-fast-worst": lambda results: (
        f"{max(p['of_better'] for p in hits.points(results('hits')) if p['speed'] >= 0.5):.2f}"
    ),
    "hits-worst": lambda results: f"{max(of_better(results)):.2f}",
    "plan-ours": lambda results: f"{planned()['mix']:,.0f}",
    "plan-plain": lambda results: f"{planned()['plain']:,.0f}",
    "plan-computed": lambda results: f"{planned()['recompute']:,.0f}",
    "demo-burst": lambda results: f"{results('demo')['burst']['ours']['seconds']:.1f}",
    "demo-burst-file": lambda results: f"{results('demo')['burst']['file']['seconds']:.1f}",
    "demo-hang": lambda results: f"{results('demo')['hung']['ours']['seconds']:.1f}",
    "bursts-worst": lambda results: (
        f"{max(r['wait_of_better'] for r in results('hits_load')['rows']):.2f}"
    ),
    "bursts-share": lambda results: (
        f"{max(row['of_alone'] for row in of_way(results('bursts'), 'ours')):.2f}"
    ),
    **{
        name: partial(last_of, name=name.partition("-")[0], way=way, part=part, form=form)
        for name, way, part, form in (
            ("bursts-ours", "ours", "seconds_at_once", ".1f"),
            ("bursts-one-by-one", "ours", "seconds_alone", ".1f"),
            ("bursts-file", "file", "seconds_at_once", ".1f"),
            ("bursts-file-used", "file", "used_at_once", ".2f"),
            ("bursts-file-share", "file", "of_alone", ".1f"),
            ("returns-l3", "L3", "all_mean_ms", ".0f"),
            ("returns-host", "host memory", "all_mean_ms", ".0f"),
            ("returns-all", "everything kept", "all_mean_ms", ".0f"),
            ("returns-idle-l3", "L3", "mean_ms", ".0f"),
            ("returns-idle-host", "host memory", "mean_ms", ".0f"),
        )
    },
    "real-bfloat16": lambda results: of_file(results, "bfloat16"),
    "real-float32": lambda results: of_file(results, "float32"),
    "replies-front": lambda results: f"{results('replies')['rows'][0]['differ']}",
    "replies-all": lambda results: f"{results('replies')['rows'][0]['replies']}",
    "real-cases": lambda results: f"{len(results('real')['rows'])}",
    "real-cold": lambda results: mean(of(results, "file_cold")),
    "real-cold-worst": lambda results: f"{max(of(results, 'file_cold')):.2f}",
    "real-warm": lambda results: mean(of(results, "file_warm")),
    "real-warm-worst": lambda results: f"{max(of(results, 'file_warm')):.2f}",
    "real-nixl": lambda results: mean(of(results, "nixl_cold")),
    "real-nixl-worst": lambda results: f"{max(of(results, 'nixl_cold')):.2f}",
    "real-computed": fraction_of_computing,
    "bytes-bfloat16": bytes_of_file,
    "store-least": lambda results: f"{min(ratios(results('store'), 'read', CEILING)):.2f}",
    "store-reads": lambda results: store_by(results, "read", CEILING),
    "store-writes": lambda results: store_by(results, "write", CEILING),
    "store-reads-nixl": lambda results: store_by(results, "read", "NIXL POSIX"),
    "store-writes-nixl": lambda results: store_by(results, "write", "NIXL POSIX"),
    "store-reads-file": lambda results: store_by(results, "read", "HiCacheFile"),
    "store-writes-file": lambda results: store_by(results, "write", "HiCacheFile"),
    "store-cpu": lambda results: store_cpu(results, STORE),
    "store-cpu-nixl": lambda results: store_cpu(results, "NIXL POSIX"),
    "store-cpu-file": lambda results: store_cpu(results, "HiCacheFile"),
    "store-copied": store_copied,
    "store-rounds": lambda results: f"{results('store')['rounds']}",
}


def refreshed(text: str, results: Recorded) -> str:
    """A page with all of its marked numbers made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}{CLAIMS[mark[2]](results)}{mark[4]}", text)


def marked(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of every marked number of a page."""
    return ((mark[2], mark[3]) for mark in MARK.finditer(text))
