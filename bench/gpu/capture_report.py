"""Table and picture of the capture benchmark."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from bench.gpu.program import Row
from bench.harness.report import markdown


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


def table(rows: list[Row]) -> str:
    """One line per measurement."""
    heads = ("model", "step", "tokens", "saving", "ms", "adds, %", "right")
    lines = (
        (
            *(row[name] for name in ("model", "step", "tokens", "way", "ms")),
            100 * overhead(rows, row),
        )
        for row in rows
    )
    return markdown(heads, ((*line, row["right"]) for line, row in zip(lines, rows, strict=True)))


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
