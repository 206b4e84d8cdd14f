"""What follows from the demo's measurements: verdict, JSON, conversation, table and picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.demo.measure import COMPARED, FILE, OURS
from bench.harness.report import markdown
from bench.harness.turns import NO_L3

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLES = {NO_L3: "computed", FILE: "SGLang `file`", OURS: "HCache"}
_COLOURS = {NO_L3: "#8c8c8c", FILE: "#dd8452", OURS: "#4c72b0"}


def build_report(
    models: Sequence[Mapping[str, Any]], about: Mapping[str, object]
) -> dict[str, Any]:
    """The content of ``demo.json``; ``about`` comes first in it.

    Args:
        models: What :func:`bench.demo.measure.measure` returns.
    """
    found = problems(models)
    return {**about, "succeeded": not found, "problems": found, "models": list(models)}


def problems(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong, one line each; empty when the demo succeeded."""
    found = []
    for model in models:
        rows = [(f"turn {n + 1}", turn) for n, turn in enumerate(model["conversation"])]
        rows += [(disk["disk"], disk) for disk in model["disks"]]
        for where, row in rows:
            found += [
                f"{model['model']}, {where}: a reply with {COMPARED[method].title} differs from "
                "that without a cache"
                for method, same in row["same_reply"].items()
                if not same
            ]
        for disk in model["disks"]:
            if disk["mb_per_s"] is None and not disk["share_from_l3"][OURS]:
                found.append(f"{model['model']}, {disk['disk']}: nothing came from L3")
    return found


def talk_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The conversation, once: every server gave these replies, or the report has problems."""
    about, talk = report["model"], report["models"][0]["conversation"]
    yield f"A conversation with {about['name']} about Python's module secrets.py."
    yield "Between turns it is evicted: it is in L3 and nowhere else.\n"
    for turn in talk:
        yield f"> {turn['question']}"
        reply = turn["reply"] or f"({turn['reply_tokens']} random tokens)"
        for line in reply.splitlines():
            yield textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  ")
        yield f"  ({turn['history_tokens']:,} of {turn['prompt_tokens']:,} tokens were evicted)\n"


def headline(report: Mapping[str, Any]) -> str:
    """What was measured, and how."""
    text = _configuration(report)
    slow = [f"{d['mb_per_s']:.1f}" for m in report["models"] for d in m["disks"] if d["mb_per_s"]]
    if slow:
        text += f" The slow disk reads {' and '.join(slow)} MB/s: K and V as fast as computed."
    return textwrap.fill(text, 79)


def table(report: Mapping[str, Any]) -> Table:
    """The times and sizes, for a terminal of 80 columns."""
    view = Table(box=None, pad_edge=False)
    for column in ("", "disk"):
        view.add_column(column, no_wrap=True)
    heads = ("first\ntoken, s:\ncomputed", "file", "ours", "bytes per\ntoken:\nfile", "ours")
    for column in (*heads, "same\nreply"):
        view.add_column(column, justify="right", no_wrap=True)
    for model in report["models"]:
        for number, disk in enumerate(model["disks"]):
            name = model["stored"] if number else model["model"]
            view.add_row(name, disk["disk"], *_cells(model, disk))
    return view


def table_lines(results: Mapping[str, Any]) -> str:
    """How it was measured, and the times and sizes as Markdown, for the marked blocks of pages."""
    heads = (
        "model; HCache stores",
        "disk",
        "first token, s: computed",
        "`file`",
        "HCache",
        "bytes per token: `file`",
        "HCache",
        "same reply",
    )
    rows = [
        (f"{model['model']}; {model['stored']}", _disk(disk), *_cells(model, disk))
        for model in results["models"]
        for disk in model["disks"]
    ]
    return f"{_configuration(results)}\n\n{markdown(heads, rows)}\n\n{finding(results)}"


def short_lines(results: Mapping[str, Any]) -> str:
    """The conversation as Markdown."""
    lines = []
    for turn in results["models"][0]["conversation"]:
        lines += [f"> **{turn['question']}**", ">", *_quoted(turn["reply"] or "-"), ""]
    return "\n".join(lines)


def finding(report: Mapping[str, Any]) -> str:
    """What the table and the picture show."""
    said = []
    for model in report["models"]:
        disk = model["disks"][0]
        times, sizes = disk["ttft_ms"], model["bytes_per_token"]
        said.append(
            f"{times[OURS] / times[NO_L3]:.2f} of the time and {sizes[OURS] / sizes[FILE]:.2f} of "
            f"the bytes with {model['stored']} of {model['model']}"
        )
    return (
        "HCache brings the conversation back from this disk, compared with computing it and with "
        f"the bytes of `file`, in {' and '.join(said)}."
    )


def _quoted(text: str) -> list[str]:
    return [f"> {line}".rstrip() for line in text.splitlines()]


def _cells(model: Mapping[str, Any], disk: Mapping[str, Any]) -> list[str]:
    sizes = model["bytes_per_token"]
    same = all(disk["same_reply"].values()) and all(
        same for turn in model["conversation"] for same in turn["same_reply"].values()
    )
    return [
        *(f"{disk['ttft_ms'][method] / 1e3:.2f}" for method in COMPARED),
        *(f"{sizes[method]:,.0f}" for method in (FILE, OURS)),
        "yes" if same else "NO",
    ]


def _disk(disk: Mapping[str, Any]) -> str:
    """The disk's name, and the rate of one that is slowed down."""
    return f"{disk['disk']}, {disk['mb_per_s']:.1f} MB/s" if disk["mb_per_s"] else disk["disk"]


def _configuration(report: Mapping[str, Any]) -> str:
    about, tokens = report["model"], report["models"][0]["history_tokens"]
    return (
        f"{about['name']} ({about['parameters']} parameters, {about['layers']} layers, "
        f"{about['weights']} weights) in {about['dtype']}, {tokens:,} tokens of history; "
        f"medians of {report['rounds']} rounds; SGLang {report['sglang_version']} on "
        f"{report['device']}, {report['date'][:10]}."
    )


def draw(report: Mapping[str, Any]) -> Figure:
    """Time to the first token by disk and method, a panel for each model."""
    from matplotlib.figure import Figure

    models = report["models"]
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    panels = figure.subplots(1, len(models), sharex=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        ticks = []
        for place, disk in enumerate(model["disks"]):
            for line, method in enumerate(COMPARED):
                seconds, height = disk["ttft_ms"][method] / 1e3, 4 * place + line
                label = _TITLES[method].replace("`", "") if not place else None
                axes.barh(height, seconds, color=_COLOURS[method], label=label)
                axes.text(seconds, height, f" {seconds:.2f}", va="center", fontsize=10)
            ticks.append(_disk(disk).replace(", ", "\n"))
        axes.set_yticks([4 * place + 1 for place in range(len(ticks))], ticks, fontsize=10)
        sizes = model["bytes_per_token"]
        axes.set_title(
            f"{model['model']}: {model['stored']} in\n{sizes[OURS] / sizes[FILE]:.2f} of the bytes "
            "of file",
            fontsize=11,
        )
        axes.set_xlabel("seconds to the first token", fontsize=10)
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10
    )
    shares = [m["disks"][0]["ttft_ms"][OURS] / m["disks"][0]["ttft_ms"][NO_L3] for m in models]
    figure.suptitle(
        f"An evicted conversation is back from disk in {min(shares):.2f} to {max(shares):.2f} of "
        "the time of computing it",
        fontsize=12,
    )
    return figure
