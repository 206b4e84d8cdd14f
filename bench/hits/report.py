"""Tables and the picture of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.harness.report import markdown
from bench.harness.turns import NO_L3
from bench.hits.cases import COMPARED, OURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE, SHORT_TOKENS = "file", 1024


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
        if case["model"] in ("MHA", "GQA") and case["tokens"] == SHORT_TOKENS
        for point in case["points"]
    ]
    heads = ("model, history", "speed of L3", "MB/s", "computed", "`file`", "ours")
    return markdown((*heads, "ours / better", "95%"), rows)


def title(case: Mapping[str, Any]) -> str:
    """A model and a length, in words."""
    return f"{case['model']} ({case['pages']}), {case['tokens']:,}"


def draw(results: Mapping[str, Any]) -> Figure:
    """Time to the first token by the speed of L3, a panel for each model and history."""
    from matplotlib.figure import Figure

    cases = results["cases"]
    columns = min(4, len(cases))
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in list(panels)[len(cases) :]:
        axes.remove()
    for axes, case in zip(figure.axes, cases, strict=True):
        points = sorted(case["points"], key=lambda point: float(point["speed"]))
        for name in points[0]["ms"]:
            axes.plot(
                [point["speed"] for point in points],
                [point["ms"][name] / case["computing_ms"] for point in points],
                "o-" if name == OURS else ".--",
                linewidth=2.5 if name == OURS else 1,
                label=COMPARED[name].title,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(title(case), fontsize=9)
        axes.set_xlabel("speed of L3 (1: as fast as computing)", fontsize=8)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time to first token (1: computing)", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(f"L3 of any speed, {results['device']}", fontsize=10)
    return figure
