"""Pictures of what a comparison found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.compare.report import SETTING_TITLES, TIERS
from bench.harness.methods import HYBRID, MOONCAKE, NIXL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "ideal": "#7f7f7f",
    "recompute": "#d62728",
    "file": "#ff7f0e",
    NIXL: "#e377c2",
    MOONCAKE: "#c49c94",
    "host": "#bcbd22",
    "hcache-kv": "#9467bd",
    "hcache-hidden": "#1f77b4",
    "hcache-hidden-eager": "#17becf",
    "hcache": "#2ca02c",
    "hcache-eager": "#98df8a",
    HYBRID: "#8c564b",
}
"""The colour of each method in every picture."""
_WAYS = {"none": "#7f7f7f", "staged": "#1f77b4"}


def _draw_restore(report: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    restore = report["restore"]
    methods = list(restore["methods"])
    settings = [setting for setting in SETTING_TITLES if tried(restore, setting)]
    size = (3.2 + 3.6 * (len(settings) + 1), 1.6 + 0.42 * len(methods))
    figure = Figure(figsize=size, layout="constrained")
    *panels, storage = figure.subplots(1, len(settings) + 1, sharey=True)
    for axes, setting in zip(panels, settings, strict=True):
        for name, row in tried(restore, setting).items():
            place, reading = methods.index(name), min(row["l3_ms"], row["ms"])
            # The rest is loading, computation, or the scheduler between them.
            axes.barh(place, reading, color=COLOURS[name], alpha=0.45, hatch="//")
            axes.barh(place, row["ms"] - reading, left=reading, color=COLOURS[name])
            axes.annotate(f" {row['ms']:,.0f}", (row["ms"], place), va="center", fontsize=9)
        axes.set_xlabel("ms (hatched: until L3 is read)")
        axes.locator_params(axis="x", nbins=4)
        axes.set_title(SETTING_TITLES[setting], fontsize=10)
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
    for place, name in enumerate(methods):
        kib = _bytes_per_token(restore["methods"][name]) / 1024
        if kib:
            storage.barh(place, kib, color=COLOURS[name])
            storage.annotate(f" {kib:,.1f}", (kib, place), va="center", fontsize=9)
    storage.set_xlabel("KiB per token")
    storage.set_title("stored in L3, first setting", fontsize=10)
    storage.margins(x=0.18)
    titles = [restore["methods"][name]["title"] for name in methods]
    storage.set_yticks(range(len(methods)), titles)
    storage.invert_yaxis()
    return _titled(figure, f"Restoring {restore['tokens']:,} tokens", report)


def tried(restore: Mapping[str, Any], setting: str) -> dict[str, dict[str, Any]]:
    """Rows of a setting by method; recomputation is the same in all."""
    methods: Mapping[str, Mapping[str, Any]] = restore["methods"]
    if not any(row[setting] for row in methods.values()):
        return {}
    rows = {name: row["disk" if name == "recompute" else setting] for name, row in methods.items()}
    return {name: row for name, row in rows.items() if row}


def _bytes_per_token(row: Mapping[str, Any]) -> float:
    """Bytes in L3 in the first setting in which the method was tried."""
    return float(
        next(row[setting]["bytes_per_token"] for setting in SETTING_TITLES if row[setting])
    )


def _draw_saving(report: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    saving = report["saving"]
    figure = Figure(figsize=(6.2, 4), layout="constrained")
    axes = figure.subplots()
    batches = saving["batches"]
    for name, way in saving["ways"].items():
        times = [way["gaps_ms"][str(batch)]["median"] for batch in batches]
        axes.plot(batches, times, marker="o", color=_WAYS.get(name), label=way["title"])
    axes.set_xticks(batches)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences that run together")
    axes.set_ylabel("between tokens, ms (median)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _titled(figure, "Saving hidden states of running requests", report)


def _draw_load(report: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    load = report["load"]
    methods = load["methods"]
    figure = Figure(figsize=(12, 9), layout="constrained")
    (ttft, tail), (tokens, hits) = figure.subplots(2, 2)
    curves = (
        (ttft, "median_ttft", "TTFT, ms (median)"),
        (tail, "p90_ttft", "TTFT, ms (p90)"),
        (tokens, "average_tbt", "between tokens of a running request, ms"),
    )
    for axes, key, title in curves:
        for name, row in methods.items():
            runs = sorted(row["runs"], key=lambda run: float(run["request_rate"]))
            axes.plot(
                [float(run["request_rate"]) for run in runs],
                [1e3 * run[key] for run in runs],
                marker="o",
                linestyle="--" if name.endswith("eager") else "-",
                color=COLOURS[name],
                label=row["title"],
            )
        axes.set_xticks(sorted({float(run["request_rate"]) for run in runs}))
        axes.set_xlabel(f"{load['workload']['arrivals']} per second")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _draw_hits(hits, methods)
    # Above all panels: there is no place in one that no curve may go through.
    lines = ttft.get_legend_handles_labels()
    figure.legend(*lines, fontsize=8, ncols=5, loc="outside upper center")
    return _titled(figure, f"Workload {load['workload']['name']}", report)


def _draw_hits(axes: Any, methods: Mapping[str, Mapping[str, Any]]) -> None:
    """Where prompt tokens came from, on average over the rates."""
    titles: Sequence[str] = [row["title"] for row in methods.values()]
    for place, row in enumerate(methods.values()):
        left = 0.0
        for tier, shade in zip(TIERS, ("#4c72b0", "#8fb0d9", "#c44e52"), strict=True):
            shares = [run[f"{tier}_hit_rate"] or 0.0 for run in row["runs"]]
            share = 100 * sum(shares) / len(shares)
            axes.barh(place, share, left=left, color=shade, label=tier if not place else None)
            left += share
    axes.set_yticks(range(len(titles)), titles, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("prompt tokens from a cache, %")
    axes.set_xlim(0, 100)
    axes.legend(fontsize=8)


def _titled(figure: Figure, title: str, report: Mapping[str, Any]) -> Figure:
    figure.suptitle(f"{title}: {report['device']}, {report['model']}", fontsize=11)
    return figure


PICTURES = {"restore": _draw_restore, "saving": _draw_saving, "load": _draw_load}
"""What draws a part of the report."""
