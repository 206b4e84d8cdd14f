"""What follows from the demo's measurements: verdict, JSON, tables and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.demo.settings import COMPARED, FILE, OURS, UNSLOWED
from bench.harness.report import grouped_bars, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADS = (
    "model, bytes per token (`file` / ours)",
    "disk",
    "TTFT, ms: computed",
    "`file`",
    "ours",
    "ours / best",
    "restore, ms: `file`",
    "ours",
    "same output",
)


def build_report(
    models: Sequence[Mapping[str, Any]],
    about: Mapping[str, object],
    codecs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of ``demo.json``; ``about`` comes first in it.

    Args:
        models: What :func:`bench.demo.settings.measure` returns.
        codecs: What :func:`bench.demo.codecs.codec_report` says; None if they were not run.
    """
    found = problems(models) + (codecs["problems"] if codecs else [])
    return {
        **about,
        "succeeded": not found,
        "problems": found,
        "models": list(models),
        **({"codecs": dict(codecs)} if codecs else {}),
    }


def problems(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong, one line each; empty when the demo succeeded."""
    found = []
    for model in models:
        for setting in model["settings"]:
            where = f"{model['model']}, {setting['disk']}"
            found += [
                f"{where}: a reply with {COMPARED[method].title} differs from that without a cache"
                for method, same in setting["identical_tokens"].items()
                if not same
            ]
            if setting["mb_per_s"] is None and not setting["share_from_l3"][OURS]:
                found.append(f"{where}: nothing came from L3")
    return found


def table_lines(results: Mapping[str, Any]) -> str:
    """The settings as a Markdown table, for the marked blocks of the documentation."""
    return markdown(_HEADS, _rows(results))


def table(report: Mapping[str, Any]) -> Table:
    """The settings, for a terminal of 80 columns."""
    view = Table(box=None, pad_edge=False, title=_headline(report), title_justify="left")
    for column in ("", "disk"):
        view.add_column(column, no_wrap=True)
    heads = ("ms:\ncomputed", "file", "ours", "ours /\nbest", "restore\nfile", "ours")
    for column in (*heads, "same\noutput"):
        view.add_column(column, justify="right", no_wrap=True)
    for model in report["models"]:
        for cells in _cells(model):
            view.add_row(model["model"], *cells)
    return view


def _rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{model['model']}, {_sizes(model)}", f"{disk}{_rate(setting)}", *cells)
        for model in report["models"]
        for setting, (disk, *cells) in zip(model["settings"], _cells(model), strict=True)
    ]


def _rate(setting: Mapping[str, Any]) -> str:
    """The rate of a disk that is slowed down."""
    return f", {setting['mb_per_s']:.1f} MB/s" if setting["mb_per_s"] else ""


def _sizes(model: Mapping[str, Any]) -> str:
    return " / ".join(f"{model['bytes_per_token'][method]:,.0f}" for method in (FILE, OURS))


def _cells(model: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each setting, from the disk on."""
    rows: list[tuple[str, ...]] = []
    for setting in model["settings"]:
        restores = (setting["restore_ms"][method] for method in (FILE, OURS))
        rows.append(
            (
                setting["disk"],
                *(f"{ms:,.0f}" for ms in setting["ttft_ms"].values()),
                f"{setting['ours']['of_better']:.2f}",
                *("refused" if ms is None else f"{ms:,.0f}" for ms in restores),
                "yes" if all(setting["identical_tokens"].values()) else "NO",
            )
        )
    return rows


def _headline(report: Mapping[str, Any]) -> str:
    sizes = (f"{model['model']} {_sizes(model)}" for model in report["models"])
    rounds = report["rounds"]
    return (
        f"SGLang {report['sglang_version']} on {report['device']}\n"
        f"a question behind {report['history_tokens']:,} tokens of history; medians of {rounds}, "
        f"this disk {UNSLOWED * rounds}\nbytes per token (file / ours): {', '.join(sizes)}"
    )


def draw(report: Mapping[str, Any]) -> Figure:
    """Time to the first token by setting and method, a panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(report["models"]), squeeze=False)[0]
    for axes, model in zip(panels, report["models"], strict=True):
        rows = [{"disk": one["disk"], **one["ttft_ms"]} for one in model["settings"]]
        series = {how.title: name for name, how in COMPARED.items()}
        heading = f"{model['model']}: ms to the first token"
        grouped_bars(axes, heading, rows, "disk", series, "%.0f")
    figure.suptitle(
        f"{report['history_tokens']:,} tokens of history, SGLang {report['sglang_version']}, "
        f"{report['device']}",
        fontsize=9,
    )
    return figure
