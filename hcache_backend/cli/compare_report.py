"""What ``hcache bench compare`` found: Markdown, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "ideal": "#7f7f7f",
    "recompute": "#d62728",
    "file": "#ff7f0e",
    "host": "#bcbd22",
    "hcache-kv": "#9467bd",
    "hcache-hidden": "#1f77b4",
    "hcache": "#2ca02c",
}
SETTINGS = {"disk": "L3 as it is", "balanced": "bus: copy = projection"}
TIERS = ("device", "host", "storage")


def markdown(report: dict[str, Any]) -> str:
    """The report as a document with two tables."""
    model = report["model"]
    parts = [
        f"# Methods compared on {report['device']}",
        f"SGLang {report['sglang_version']}, {report['date']}. Model: {model}.",
    ]
    if report.get("restore"):
        parts += _restore_table(report["restore"])
    if report.get("load"):
        parts += _load_table(report["load"])
    return "\n\n".join(parts) + "\n"


def _restore_table(restore: dict[str, Any]) -> list[str]:
    rows = []
    for row in restore["methods"].values():
        disk, balanced = row["disk"], row["balanced"]
        rows.append(
            (
                row["title"],
                f"{row['bytes_per_token']:,.0f}" if row["bytes_per_token"] else "-",
                f"{disk['ms']:,.0f}",
                f"{disk['l3_ms']:,.0f}" if disk["l3_ms"] else "-",
                f"{disk['load_ms']:,.0f}" if disk["load_ms"] else "-",
                f"{balanced['load_ms']:,.0f}" if balanced else "-",
            )
        )
    text = (
        f"## Restoring a history of {restore['tokens']:,} tokens\n\n"
        "Milliseconds in the server, medians: from the start of the prefetch to the last layer on "
        "the device; L3 is read from a cold page cache."
    )
    rate = restore["balanced_bus_bytes_per_second"]
    if rate:
        text += (
            f" Balanced: copies to the device are slowed down to {rate / 1e6:,.0f} MB/s, at which "
            "hidden states take as long to copy as to project."
        )
    head = ("", "bytes a token", "restore", "of it L3", "of it load", "load, balanced bus")
    return [text, _table(head, rows)]


def _load_table(load: dict[str, Any]) -> list[str]:
    rows = []
    for row in load["methods"].values():
        for run in row["runs"]:
            shares = [run[f"{tier}_hit_rate"] for tier in TIERS]
            rows.append(
                (
                    row["title"],
                    f"{run['request_rate']}",
                    f"{1e3 * run['median_ttft']:,.0f}",
                    f"{1e3 * run['p90_ttft']:,.0f}",
                    f"{1e3 * run['average_tbt']:,.1f}",
                    f"{run['throughput']:.2f}",
                    " / ".join("?" if s is None else f"{100 * s:.0f}" for s in shares),
                )
            )
    asked = load["workload"]
    text = (
        f"## Workload {asked['name']}: {asked['sessions']} sessions, {asked['requests']} requests\n"
        f"\nHistories of {asked['history_median']:,.0f} tokens (median; at most "
        f"{asked['history_max']:,}). Times in milliseconds, hits in % of prompt tokens."
    )
    head = (
        "",
        "a second",
        "TTFT p50",
        "TTFT p90",
        "between tokens",
        "requests/s",
        "hits: device / host / storage",
    )
    return [text, _table(head, rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def draw(report: dict[str, Any], stem: Path) -> list[Path]:
    """Pictures beside the report; returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    if report.get("restore"):
        drawn.append(_draw_restore(report, stem.with_name(f"{stem.name}_restore.png")))
    if report.get("load"):
        drawn.append(_draw_load(report, stem.with_name(f"{stem.name}_load.png")))
    return drawn


def _draw_restore(report: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    restore = report["restore"]
    settings = {
        setting: title
        for setting, title in SETTINGS.items()
        if any(row[setting] for row in restore["methods"].values())
    }
    figure, panels = pyplot.subplots(
        1, len(settings) + 1, figsize=(4.5 * (len(settings) + 1), 4), squeeze=False
    )
    for axes, (setting, title) in zip(panels[0], settings.items(), strict=False):
        rows = {name: row for name, row in restore["methods"].items() if row[setting]}
        for place, (name, row) in enumerate(rows.items()):
            times = row[setting]
            # The rest is computation, or the scheduler between reading and loading.
            rest = max(0.0, times["ms"] - times["l3_ms"] - times["load_ms"])
            axes.bar(place, times["l3_ms"], color=COLOURS[name], alpha=0.45, hatch="//")
            axes.bar(place, times["load_ms"] + rest, bottom=times["l3_ms"], color=COLOURS[name])
            axes.annotate(f"{times['ms']:,.0f}", (place, times["ms"]), ha="center", va="bottom")
        axes.set_xticks(range(len(rows)), [row["title"] for row in rows.values()], rotation=25)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
        axes.set_ylabel("restore, ms (hatched: reading L3)")
        axes.set_title(f"{restore['tokens']:,} tokens, {title}", fontsize=10)
        axes.margins(y=0.12)
    _bars(
        panels[0][-1],
        {name: row["bytes_per_token"] / 1024 for name, row in restore["methods"].items()},
        "KiB of L3 a token",
    )
    return _save(figure, report, path)


def _draw_load(report: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    methods = report["load"]["methods"]
    figure, ((ttft, tail), (tokens, hits)) = pyplot.subplots(2, 2, figsize=(11, 8))
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
                color=COLOURS[name],
                label=row["title"],
            )
        axes.set_xlabel(f"{report['load']['workload']['arrivals']} a second")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    ttft.legend(fontsize=8)
    for place, row in enumerate(methods.values()):
        bottom = 0.0
        for tier, shade in zip(TIERS, ("#4c72b0", "#8fb0d9", "#c44e52"), strict=True):
            shares = [run[f"{tier}_hit_rate"] or 0.0 for run in row["runs"]]
            share = 100 * sum(shares) / len(shares)
            hits.bar(place, share, bottom=bottom, color=shade, label=tier if not place else None)
            bottom += share
    hits.set_xticks(range(len(methods)), [row["title"] for row in methods.values()], rotation=25)
    for label in hits.get_xticklabels():
        label.set_horizontalalignment("right")
    hits.set_ylabel("prompt tokens from a cache, %")
    hits.set_ylim(0, 100)
    hits.legend(fontsize=8)
    return _save(figure, report, path)


def _bars(axes: Any, values: dict[str, float], title: str) -> None:
    shown = {name: value for name, value in values.items() if value}
    axes.bar(range(len(shown)), shown.values(), color=[COLOURS[name] for name in shown])
    axes.set_xticks(range(len(shown)), shown, rotation=25)
    for place, value in enumerate(shown.values()):
        axes.annotate(f"{value:,.1f}", (place, value), ha="center", va="bottom")
    axes.set_ylabel(title)
    axes.margins(y=0.12)


def _save(figure: Any, report: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure.suptitle(f"{report['device']}, {report['model']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
