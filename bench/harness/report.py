"""Tables and pictures that programs declare of their results, and how both are written."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Any  # content of a file of results
Row = Mapping[str, Any]
Value = str | Callable[[Any], object]  # keys of a row with dots between them, or a function
OUT = Path("out")  # folder that programs write to unless told otherwise; git ignores it
WIDTH = 9  # inches of a picture, which documentation shows about 850 pixels wide
SMALLEST = 9  # points of its smallest text
_MOST_UPRIGHT = 24  # numbers above bars
COLOURS = {
    "computed": "#7f7f7f",
    "file": "#ff7f0e",
    "nixl": "#bcbd22",
    "ours": "#1f77b4",
    "ours, all read": "#7fb8e0",
    "limit": "#000000",
    "none": "#7f7f7f",
    "exp3": "#17becf",
    "exp4": "#2ca02c",
    "int8": "#9467bd",
    "pairs": "#8c564b",
}
"""A method, or a codec, has one colour in all pictures. ``file``: HiCache's path of K and V."""


class Column(NamedTuple):
    """A column of a table: its head with the unit, its value in a row, the format of numbers."""

    title: str
    value: Value
    form: str = ".2f"


Columns = str | Sequence[Column | str]
"""Columns, also as text: ``TITLE = KEY :FORM``, or the key alone, with `` | `` between them."""


def columns_of(given: Columns) -> Iterator[Column]:
    for part in [given] if isinstance(given, str) else given:
        if isinstance(part, Column):
            yield part
            continue
        for one in part.split(" | "):
            rest, _, form = one.partition(" :")
            title, _, key = rest.partition(" = ")
            yield Column(title, key or title, *filter(None, (form,)))


class Table(NamedTuple):
    """A table of results, made by a function of the results if they differ in columns; one without
    rows is left out."""

    rows: Value
    columns: Columns | Callable[[Results], Columns]

    def lines(self, results: Results) -> str:
        """The table as Markdown."""
        given = self.columns(results) if callable(self.columns) else self.columns
        columns = list(columns_of(given))
        rows: Any = value_of(results, self.rows)
        body = [[cell(value_of(row, c.value), c.form) for c in columns] for row in rows or ()]
        if not body:
            return ""
        head, *lines = (f"| {' | '.join(row)} |" for row in ([c.title for c in columns], *body))
        return "\n".join((head, f"|---{'|--:' * (len(columns) - 1)}|", *lines))


def value_of(row: Any, value: Value) -> object:
    """A part of a row; None if it has no such part."""
    if callable(value):
        return value(row)
    for key in value.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def aligned(tables: str) -> str:
    """Markdown tables with columns as wide as their cells, for a terminal."""
    shown = []
    for table in filter(None, tables.split("\n\n")):
        rows = [line.split("|")[1:-1] for line in table.splitlines()]
        widths = [max(len(row[n].strip()) for row in rows) for n in range(len(rows[0]))]
        for row in (rows[0], *rows[2:]):
            cells = [each.strip() for each in row]
            first, *others = zip(cells, widths, strict=True)
            shown.append("  ".join((first[0].ljust(first[1]), *(c.rjust(w) for c, w in others))))
        shown.append("")
    return "\n".join(line.rstrip() for line in shown).rstrip()


def cell(value: object, form: str = ".2f") -> str:
    """Text of a number, of layers by method (``3 recompute + 5 hidden``) or of a range."""
    if isinstance(value, Mapping):
        return " + ".join(f"{count} {name}" for name, count in value.items() if count)
    if isinstance(value, tuple | list):
        return " to ".join(cell(each, form) for each in value)
    if isinstance(value, float):
        return format(value, form)
    if isinstance(value, int) and not isinstance(value, bool) and form.startswith(","):
        return f"{value:,}"
    return "-" if value is None else str(value)


def measured(results: Mapping[str, Any]) -> str:
    """When and where results were measured, as a sentence."""
    cores = f", {results['cores']} cores" if "cores" in results else ""
    sglang = results["sglang_version"]
    return f"Measured {results['date'][:10]} on {results['device']}{cores}, SGLang {sglang}."


def picture(finding: str, height: float = 4.5) -> Figure:
    """An empty picture whose title states its finding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(fill(finding, 80), fontsize=12)
    return figure


def times(value: float) -> str:
    """A power of two on an axis, as a ratio: ``1/4x``, ``1x``, ``4x``."""
    return f"{value:g}x" if value >= 1 else f"1/{1 / value:g}x"


def ratio_axis(axes: Axes, letter: str, values: Iterable[float]) -> None:
    """Make axis ``x`` or ``y`` logarithmic over ``values``: its ticks are ratios, powers of two."""
    known = list(values)
    least, most = math.floor(math.log2(min(known))), math.ceil(math.log2(max(known)))
    step = 1 + (most - least) // 6
    ticks = [2.0**power for power in range(-step * (-least // step), most + 1, step)]
    axes.set(**{f"{letter}scale": "log"})
    axis = getattr(axes, f"{letter}axis")
    axis.set_ticks(ticks, labels=[times(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def by(
    title: Value, rows: Callable[[Results], Iterable[Row]]
) -> Callable[[Results], dict[str, list[Row]]]:
    """Panels of a picture: these rows, grouped by a part of them."""

    def panels(results: Results) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in rows(results):
            found.setdefault(str(value_of(row, title)), []).append(row)
        return found

    return panels


def write(
    folder: Path, name: str, results: Results, draw: Callable[[Results], Figure] | None
) -> None:
    """Write ``NAME.json`` and, if there is a picture and matplotlib is installed, ``NAME.png``."""
    write_json(folder / f"{name}.json", results)
    if draw is not None:
        write_picture(folder / f"{name}.png", results, draw)


def write_picture(path: Path, results: Any, draw: Callable[[Any], Figure]) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("matplotlib is not installed: no picture", file=sys.stderr)
        return
    draw(results).savefig(path, dpi=130)


def write_json(path: Path, results: Any) -> None:
    """Write results; numbers that JSON cannot hold become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(results), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Series(NamedTuple):
    """A line or a group of bars.

    Attributes:
        value: Its height in a row; a row without one is left out.
        colour: A key of :data:`COLOURS`.
        each: Values whose smallest and largest stand as an error bar.
    """

    label: str
    value: Value
    colour: str
    style: str = "o-"
    each: Value | None = None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of results: panels that share their axes and one legend.

    Attributes:
        title: The finding that it shows.
        panels: The rows of each panel, by title.
        x: Place of a row: a number, or the name of a category.
        series: Drawn parts of the rows; a function of the results makes them if they differ.
        bars: Format of the values above bars; None: lines are drawn.
        ratios: Axes with powers of two, as ``xy``.
        at: Height of a line over the whole panel, and its label and colour.
        top: Largest height; None: as large as needed.
    """

    title: Callable[[Results], str]
    panels: Callable[[Results], Mapping[str, Sequence[Row]]]
    x: Value
    x_label: str
    y_label: str
    series: Sequence[Series] | Callable[[Results], Sequence[Series]]
    bars: str | None = None
    ratios: str = ""
    at: tuple[float, str, str] | None = None
    top: float | None = None
    height: float = 4.5

    def __call__(self, results: Results) -> Figure:
        figure, shown = picture(self.title(results), self.height), self.panels(results)
        series = self.series(results) if callable(self.series) else self.series
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        heights: list[float] = []
        for axes, (title, rows) in zip(panels, shown.items(), strict=True):
            draw = self._draw_bars if self.bars is not None else self._draw_lines
            heights += draw(axes, rows, series)
            if self.at is not None:
                height, label, colour = self.at
                axes.axhline(height, color=COLOURS[colour], label=label)
            axes.set_title(fill(title, 100 // len(shown)), fontsize=10)
            axes.set_xlabel(self.x_label, fontsize=10)
        if "y" in self.ratios:
            ratio_axis(panels[0], "y", heights)
        elif self.bars is None or self.top is not None:
            panels[0].set_ylim(0, self.top)
        panels[0].set_ylabel(self.y_label, fontsize=10)
        lines: dict[str, Any] = {}
        for axes in panels:
            handles, labels = axes.get_legend_handles_labels()
            lines |= dict(zip(labels, handles, strict=True))
        figure.legend([*lines.values()], [*lines], loc="outside lower center", ncols=4, fontsize=10)
        return figure

    def _draw_lines(self, axes: Axes, rows: Sequence[Row], series: Sequence[Series]) -> list[float]:
        """Returns all heights."""
        heights: list[float] = []
        for one in series:
            points: list[Any] = [
                (value_of(row, self.x), height)
                for row in rows
                if (height := value_of(row, one.value)) is not None
            ]
            if "x" in self.ratios:
                points.sort()
            if points:
                places, mine = zip(*points, strict=True)
                axes.plot(places, mine, one.style, color=COLOURS[one.colour], label=one.label)
                heights += mine
        if "x" in self.ratios:
            ratio_axis(axes, "x", [float(str(value_of(row, self.x))) for row in rows])
        axes.grid(alpha=0.3)
        return heights

    def _draw_bars(self, axes: Axes, rows: Sequence[Row], series: Sequence[Series]) -> list[float]:
        """Returns all heights; bars that have values of their own have no number above them."""
        width = 1 / (len(series) + 0.5)
        heights: list[float] = []
        for number, one in enumerate(series):
            shift = (number - (len(series) - 1) / 2) * width
            found: list[Any] = [(n, row, value_of(row, one.value)) for n, row in enumerate(rows)]
            shown = [(n + shift, row, height) for n, row, height in found if height is not None]
            places, tall = [place for place, *_ in shown], [height for *_, height in shown]
            ends = None
            if one.each is not None:
                each: list[Any] = [value_of(row, one.each) for _, row, _ in shown]
                below = [h - min(all_) for h, all_ in zip(tall, each, strict=True)]
                ends = (below, [max(all_) - h for h, all_ in zip(tall, each, strict=True)])
            bars = axes.bar(
                places, tall, 0.95 * width, yerr=ends, label=one.label, color=COLOURS[one.colour]
            )
            if one.each is None:
                # Numbers of many bars beside each other would overlap.
                turned = 90 if len(rows) * len(series) > _MOST_UPRIGHT else 0
                fmt, size = self.bars or "%.2f", SMALLEST
                axes.bar_label(bars, fmt=fmt, fontsize=size, padding=1, rotation=turned)
            heights += tall
        marks = [str(value_of(row, self.x)).replace(", ", "\n") for row in rows]
        axes.set_xticks(range(len(rows)), marks, fontsize=SMALLEST)
        axes.margins(y=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        return heights
