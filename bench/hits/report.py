"""Tables and the picture of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.report import COLOURS, markdown, picture, ratio_axis
from bench.harness.turns import NO_L3
from bench.hits.cases import ALWAYS, COMPARED, OURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE, SHOWN_TOKENS = "file", 1024
SHOWN_SPEEDS = (2, 1, 0.5, 0.1)
"""The models of longer histories have one layer: to recompute its K and V takes next to nothing."""
PANELS = 3
LINES = {
    FILE: ("SGLang file", "file"),
    ALWAYS: ("hcache, all read", "ours, all read"),
    OURS: ("hcache, default options", "ours"),
}
"""What is drawn: label and colour."""


def table_lines(results: Mapping[str, Any]) -> str:
    """A row for each model, history and speed of L3; then what was measured when L3 stopped."""
    names = list(results["cases"][0]["points"][0]["ms"])
    heads = ("model, history", "speed of L3", *(COMPARED[name].title for name in names))
    rows = []
    for case in results["cases"]:
        for point in case["points"]:
            times = (f"{point['ms'][name]:,.0f}" for name in names)
            row = (title(case), f"{point['speed']:g}", *times, point["of_better"])
            rows.append((*row, tuple(point["interval"]) if point["interval"] else None))
    table = markdown((*heads, "default / better", "95%"), rows)
    stalls = [
        (title(case), f"{case['computing_ms']:,.0f}", *(f"{ms:,.0f}" for ms in stalled.values()))
        for case in results["cases"]
        if (stalled := case["stalled_ms"])
    ]
    if stalls:
        names = results["cases"][0]["stalled_ms"]
        table += "\n\n" + markdown(("ms when L3 stops", "computing", *names), stalls)
    return table


def short_lines(results: Mapping[str, Any]) -> str:
    """Default options beside computing and SGLang's `file`, for MHA and GQA, 1,024 tokens."""
    return _compared_lines(results)


def chosen_lines(results: Mapping[str, Any]) -> str:
    """The same at four speeds."""
    return _compared_lines(results, SHOWN_SPEEDS)


def _compared_lines(results: Mapping[str, Any], speeds: Sequence[float] = ()) -> str:
    """Default options beside computing and SGLang's `file`; of all ``speeds`` if none is given."""
    rows = [
        (
            title(case),
            f"{point['speed']:g}",
            f"{point['mb_per_s']:.1f}",
            *(f"{point['ms'][name]:,.0f}" for name in (NO_L3, FILE, OURS)),
            point["of_better"],
            tuple(point["interval"]) if point["interval"] else None,
        )
        for case in results["cases"]
        if case["model"] in ("MHA", "GQA") and case["tokens"] == SHOWN_TOKENS
        for point in case["points"]
        if not speeds or point["speed"] in speeds
    ]
    heads = ("model, history", "speed of L3", "MB/s", "computed", "`file`", "ours")
    return markdown((*heads, "ours / better", "95%"), rows)


def title(case: Mapping[str, Any]) -> str:
    """A model and a length, in words."""
    return f"{case['model']} ({case['pages']}), {case['tokens']:,}"


def draw(results: Mapping[str, Any]) -> Figure:
    """Time to the first token by the speed of L3, a panel for each float32 model."""
    shown = [case for case in results["cases"] if case["tokens"] == SHOWN_TOKENS]
    cases = (shown or results["cases"])[:PANELS]
    ratios = [point["of_better"] for case in cases for point in case["points"]]
    figure = picture(
        f"At any speed of the disk the first token takes {min(ratios):.2f} to {max(ratios):.2f} "
        "times as long as by the better choice"
    )
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    heights: list[float] = []
    for axes, case in zip(panels, cases, strict=True):
        points = sorted(case["points"], key=lambda point: float(point["speed"]))
        speeds = [point["speed"] for point in points]
        for name, (label, colour) in LINES.items():
            if name in points[0]["ms"]:
                of_computing = [point["ms"][name] / point["ms"][NO_L3] for point in points]
                style = "o-" if name == OURS else ".--"
                heights += of_computing
                axes.plot(speeds, of_computing, style, color=COLOURS[colour], label=label)
        axes.axhline(1, color=COLOURS["computed"], label="computed")
        axes.set_title(f"{title(case)} tokens", fontsize=10)
        axes.set_xlabel("speed of L3, of computing", fontsize=10)
        ratio_axis(axes, "x", speeds)
        axes.grid(alpha=0.3)
    ratio_axis(panels[0], "y", heights)
    panels[0].set_ylabel("time to the first token, of computing", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=10
    )
    return figure
