"""What programs write about their results: Markdown tables, NAME.json and NAME.png."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUT = Path("out")
"""Folder that programs write to unless told otherwise; git ignores it."""
WIDTH = 9
"""Inches of a picture: documentation shows it about 850 pixels wide, so its smallest text is..."""
SMALLEST = 9
"""...of so many points."""
COLOURS = {
    "computed": "#7f7f7f",
    "file": "#ff7f0e",
    "nixl": "#bcbd22",
    "ours": "#1f77b4",
    "ours, all read": "#7fb8e0",
    "limit": "#000000",
    "none": "#7f7f7f",
    "exp4": "#2ca02c",
    "int8": "#9467bd",
    "fp8": "#d62728",
    "pairs": "#8c564b",
}
"""A method, or a codec, has one colour in all pictures. ``file``: HiCache's path of K and V."""


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table with names in its first column; :func:`cell` writes what is no string."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in (heads, *rows)]
    return "\n".join((lines[0], "|---" + "|--:" * (len(heads) - 1) + "|", *lines[1:]))


def cell(value: object) -> str:
    """Text of a number, of layers by method (``3 recompute + 5 hidden``) or of a range."""
    if isinstance(value, Mapping):
        return " + ".join(f"{count} {name}" for name, count in value.items() if count)
    if isinstance(value, tuple):
        return " to ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


def measured(results: Mapping[str, Any]) -> str:
    """When and where results were measured, as a sentence."""
    cores = f", {results['cores']} cores" if "cores" in results else ""
    sglang = results["sglang_version"]
    return f"Measured {results['date'][:10]} on {results['device']}{cores}, SGLang {sglang}."


def picture(finding: str, height: float = 4.5) -> Figure:
    """An empty picture whose title states what it shows."""
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


def write(folder: Path, name: str, results: Any, draw: Callable[[Any], Figure]) -> None:
    """Write ``NAME.json`` and, if matplotlib is installed, ``NAME.png``."""
    write_json(folder / f"{name}.json", results)
    write_picture(folder / f"{name}.png", results, draw)


def write_picture(path: Path, results: Any, draw: Callable[[Any], Figure]) -> None:
    """Write what ``draw`` makes of results, if matplotlib is installed."""
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


def grouped_bars(
    axes: Axes,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    series: Mapping[str, str],
    form: str = "%.2f",
    colours: Mapping[str, str] | None = None,
) -> None:
    """Bars side by side for each row, with their values above them.

    Args:
        name: Key of the rows' names.
        series: Key of the height, by label; a row without a value has no bar.
        form: Format of the values.
        colours: Of the bars, by label.
    """
    width = 1 / (len(series) + 0.5)
    for number, (label, key) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        shown = [
            (place + shift, row[key]) for place, row in enumerate(rows) if row.get(key) is not None
        ]
        places, heights = zip(*shown, strict=True)
        colour = (colours or {}).get(label)
        bars = axes.bar(places, heights, width=0.95 * width, label=label, color=colour)
        axes.bar_label(bars, fmt=form, fontsize=SMALLEST, padding=1)
    axes.set_title(title, fontsize=10)
    names = [row[name].replace(", ", "\n") for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=SMALLEST)
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(fontsize=SMALLEST)
