"""Table, goals and picture of the capture benchmark."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from bench.gpu.program import Row, all_right, at_least


def overhead(rows: list[Row], row: Row) -> float:
    """Share that ``row`` takes longer than the same step with nothing beside it."""
    base = "alone" if row["way"] in ("alone", "during restores") else "none"
    names = ("model", "step", "tokens")
    (alone,) = (
        other["ms"]
        for other in rows
        if other["way"] == base and all(other[name] == row[name] for name in names)
    )
    return float(row["ms"] / alone - 1)


def print_rows(rows: list[Row]) -> None:
    """One line per measurement."""
    print(f"\n{'model':12} {'step':8} {'tokens':>6} {'saving':16} {'ms':>9} {'adds':>7}  right")
    for row in rows:
        print(
            f"{row['model']:12} {row['step']:8} {row['tokens']:6} {row['way']:16} "
            f"{row['ms']:9.3f} {overhead(rows, row):7.1%}  {'yes' if row['right'] else 'NO'}"
        )


def goals(rows: list[Row]) -> list[Row]:
    """What capture may add, and its worst case. Values are the shares that are left over."""
    staged = [row for row in rows if row["way"] == "staged"]

    def room(bound: float, wanted: list[Row]) -> list[tuple[float, str]]:
        return [
            (bound - overhead(rows, row), f"{row['model']}, {row['step']} of {row['tokens']}")
            for row in wanted
        ]

    decode = [row for row in staged if row["step"] == "decode"]
    single = [row for row in decode if row["tokens"] == 1]
    large = [row for row in decode if row["tokens"] >= 16]
    prefill = [row for row in staged if row["step"] == "prefill" and row["tokens"] >= 8192]
    return [
        at_least("capture adds at most 3% to a decode step of 1", 0.0, room(0.03, single)),
        at_least("capture adds at most 2% to a decode step of 16 or more", 0.0, room(0.02, large)),
        at_least("capture adds at most 2% to a prefill of 8192", 0.0, room(0.02, prefill)),
        all_right("the pages hold what the projections received", rows),
    ]


def draw(results: Row) -> Any:
    """What every way adds, by step."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    figure = Figure(figsize=(8, 4), constrained_layout=True)
    axis = figure.subplots()
    colours = {"staged": "#4477aa", "direct": "#ee6677", "during restores": "#ccbb44"}
    shown = [row for row in rows if row["way"] in colours]
    labels, place = [], 0.0
    for (model, step, tokens), group in groupby(
        sorted(shown, key=lambda row: (row["model"], row["step"], row["tokens"])),
        lambda row: (row["model"], row["step"], row["tokens"]),
    ):
        first = place
        for row in group:
            axis.bar(place, 100 * overhead(rows, row), 0.8, color=colours[row["way"]])
            place += 1
        labels.append(((first + place - 1) / 2, f"{step}\n{tokens}\n{model}"))
        place += 0.7
    axis.set_xticks([at for at, _ in labels], [text for _, text in labels], fontsize=8)
    axis.set_ylabel("added to the step, %")
    axis.axhline(0, color="black", linewidth=0.8)
    for way, colour in colours.items():
        axis.bar(0, 0, color=colour, label=way)
    axis.legend(frameon=False)
    axis.set_title(f"What saving and restoring add to steps on {results['device']}")
    return figure
