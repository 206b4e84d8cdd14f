"""Table, goals and picture of the restore benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from bench.gpu.program import Row, all_right, at_least

DRAWN = ("Llama-2-7B", "4096")


def print_rows(rows: list[Row]) -> None:
    """One line per measurement; ratios are to KV offload and recomputation of the same case."""
    print(
        f"\n{'model':12} {'history':>8} {'GB/s':>5} {'method':18} {'ms':>8} {'ktokens/s':>9} "
        f"{'x KV':>5} {'x rec':>6} {'floor':>6} {'idle ms: copy':>13} {'compute':>7}  right"
    )
    for case in _cases(rows):
        base = {row["method"]: row["ms"] for row in case}
        for row in case:
            idle = [
                "-" if row[name] is None else f"{row[name]:.1f}"
                for name in ("copy_idle_ms", "compute_idle_ms")
            ]
            print(
                f"{row['model']:12} {row['history']:>8} {row['copy_gb_s']:5.1f} "
                f"{row['method']:18} {row['ms']:8.2f} {row['tokens_per_s'] / 1e3:9.1f} "
                f"{base['kv offload'] / row['ms']:5.2f} {base['recompute'] / row['ms']:6.2f} "
                f"{row['share_of_floor']:6.2f} {idle[0]:>13} {idle[1]:>7}  "
                f"{'yes' if row['right'] else 'NO'}  {row['layers']}"
            )


def goals(rows: list[Row]) -> list[Row]:
    """What restoring is to reach, and its worst case."""
    speedups: dict[str, list[tuple[float, str]]] = {"hidden": [], "hidden exp4": []}
    floors, recompute = [], []
    for case in _cases(rows):
        by_method = {row["method"]: row for row in case}
        hidden = by_method["hidden"]
        where = f"{hidden['model']}, {hidden['history']}, {hidden['copy_gb_s']:.0f} GB/s"
        if hidden["tokens"] >= 4096 and not hidden["slowed"]:
            for method, values in speedups.items():
                values.append((by_method["kv offload"]["ms"] / by_method[method]["ms"], where))
            floors.append((hidden["share_of_floor"], where))
        if hidden["history"] == "16384" and not hidden["slowed"]:
            recompute.append((by_method["recompute"]["ms"] / hidden["ms"], where))
    return [
        at_least("hidden: 1.9 times KV offload from 4096 tokens on", 1.9, speedups["hidden"]),
        at_least("exp4: 2.4 times KV offload from 4096 tokens on", 2.4, speedups["hidden exp4"]),
        at_least("hidden: 0.9 of the floor from 4096 tokens on", 0.9, floors),
        at_least("hidden: 5 times recomputation at 16384 tokens", 5.0, recompute),
        all_right("K and V are those of the forward pass, by every method", rows),
    ]


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
