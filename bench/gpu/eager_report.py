"""What the benchmark of eager restores says about its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.program import Row, all_right, at_least


def goals(rows: list[Row], *, dry_run: bool) -> list[Row]:
    """What the restores are measured against."""

    def ms(method: str, rate: float | None) -> float:
        return next(r["ms"] for r in rows if r["method"] == method and r["gb_s"] == rate)

    told = [] if dry_run else rows
    eager = [row for row in told if row["method"] == "eager"]
    balanced = [row for row in eager if row["balanced"]]
    compared: list[tuple[str, float, Sequence[tuple[float, str]]]] = [
        (
            "at the balanced rate at most 0.65 of layer-wise",
            1 / 0.65,
            [(ms("layer-wise", r["gb_s"]) / r["ms"], "balanced") for r in balanced],
        ),
        (
            "at the balanced rate at most 1.2 of the larger part",
            1 / 1.2,
            [(max(r["read_ms"], r["restore_ms"]) / r["ms"], "balanced") for r in balanced],
        ),
        (
            "at the balanced rate 1.6 times faster than KV",
            1.6,
            [(ms("kv", r["gb_s"]) / r["ms"], "balanced") for r in balanced],
        ),
        (
            "never more than 5% slower than layer-wise",
            1 / 1.05,
            [(ms("layer-wise", r["gb_s"]) / r["ms"], f"{r['gb_s']} GB/s") for r in eager],
        ),
    ]
    return [
        *(at_least(goal, bound, list(values)) for goal, bound, values in compared),
        all_right("K and V are right", rows),
    ]


def show(rows: list[Row]) -> None:
    """One line per row."""
    print(f"\n{'GB/s':>9} {'method':>11} {'ms':>9} {'read, ms':>9} {'restore, ms':>12}")
    for row in rows:
        rate = f"{row['gb_s']:.1f}{' =' if row['balanced'] else ''}" if row["gb_s"] else "no limit"
        start = f"{rate:>9} {row['method']:>11}"
        if row["skipped"]:
            print(f"{start} skipped: {row['skipped']}")
            continue
        restore = f"{row['restore_ms']:.1f}" if row["restore_ms"] else ""
        print(
            f"{start} {row['ms']:9.1f} {row['read_ms']:9.1f} {restore:>12}"
            + (f"  {row['gds']}" if row["gds"] else "")
            + ("" if row["right"] else "  WRONG")
        )


def draw(results: Row) -> Any:
    """Time by the rate of reading."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    rates = list(dict.fromkeys(row["gb_s"] for row in rows))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        if mine[0]["skipped"]:
            label = f"{method}: skipped, {mine[0]['skipped']}"
            axes.plot([], [], " ", label=label)
            continue
        label = f"{method} ({mine[0]['gds']})" if mine[0]["gds"] else method
        axes.plot(range(len(rates)), [row["ms"] for row in mine], marker="o", label=label)
    axes.set_xticks(range(len(rates)), [f"{rate:.1f}" if rate else "no limit" for rate in rates])
    axes.set_xlabel("reading, GB/s")
    axes.set_ylabel("first read to last layer, ms")
    axes.set_yscale("log")
    axes.set_title(f"Restores of {rows[0]['tokens']} tokens from a folder, {results['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
