"""Table and picture of the restore benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from bench.gpu.program import Row
from bench.harness.report import markdown

DRAWN = ("Llama-2-7B", "4096")


def table(rows: list[Row]) -> str:
    """One line per measurement; ratios are to KV offload and recomputation of the same case."""
    heads = ("model", "history", "GB/s", "method", "ms", "ktokens/s", "x KV", "x recompute")
    lines = []
    for case in _cases(rows):
        base = {row["method"]: row["ms"] for row in case}
        for row in case:
            named = (row[name] for name in ("model", "history", "copy_gb_s", "method", "ms"))
            ratios = (base[name] / row["ms"] for name in ("kv offload", "recompute"))
            parts = ("share_of_floor", "copy_idle_ms", "compute_idle_ms", "right", "layers")
            rest = (row[name] for name in parts)
            lines.append((*named, row["tokens_per_s"] / 1e3, *ratios, *rest))
    return markdown((*heads, "of floor", "copy idle, ms", "compute idle", "right", "layers"), lines)


def draw(results: Row) -> Any:
    """What each stream did, method by method, for one model and history."""
    from matplotlib.figure import Figure

    cases = list(_cases(results["rows"]))
    case = next((c for c in cases if (c[0]["model"], c[0]["history"]) == DRAWN), cases[0])
    figure = Figure(figsize=(11, 1.1 * len(case) + 1), constrained_layout=True)
    axes = figure.subplots(len(case), 1, sharex=True)
    colours = {"copy": "#4477aa", "compute": "#ee6677"}
    for axis, row in zip(axes, case, strict=True):
        for lane, stream in enumerate(("copy", "compute")):
            spans = [span for span in row["spans"] if span["stream"] == stream]
            axis.broken_barh(
                [(span["start"], span["end"] - span["start"]) for span in spans],
                (1 - lane, 0.8),
                facecolors=colours[stream],
                edgecolor="white",
                linewidth=0.4,
            )
        if not row["spans"]:
            axis.broken_barh([(0, row["ms"])], (1, 0.8), facecolors=colours["copy"])
        axis.set_yticks([1.4, 0.4], ["copy", "compute"])
        axis.set_ylim(0, 2)
        axis.set_title(
            f"{row['method']}: {row['ms']:.1f} ms ({row['layers']})", fontsize=9, loc="left"
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds")
    first = case[0]
    figure.suptitle(
        f"Restoring {first['tokens']} tokens of {first['model']} on {results['device']}, "
        f"copies at {first['copy_gb_s']:.0f} GB/s"
    )
    return figure


def _cases(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows of the same model, history and copy rate."""
    names = ("model", "history", "slowed", "copy_gb_s")
    for _, case in groupby(rows, lambda row: tuple(row[name] for name in names)):
        yield list(case)
