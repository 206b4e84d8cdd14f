"""What the benchmark of eager restores says about its rows."""

from __future__ import annotations

from typing import Any

from bench.gpu.program import Row
from bench.harness.report import markdown


def table(rows: list[Row]) -> str:
    """One line per row."""
    heads = ("GB/s", "method", "ms", "read, ms", "restore, ms", "right", "GDS, or why skipped")
    parts = ("method", "ms", "read_ms", "restore_ms", "right")
    return markdown(
        heads,
        (
            (
                f"{row['gb_s']:.1f}{' =' if row['balanced'] else ''}"
                if row["gb_s"]
                else "no limit",
                *(row.get(part) for part in parts),
                row["skipped"] or row["gds"],
            )
            for row in rows
        ),
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
