"""What follows from the demo's measurements: verdict, JSON, table and picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bench.demo.talk import COMPUTED, FILE, OURS, SHOWN, Run, Talk
from bench.harness.report import grouped_bars, markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STORED = {"multi-head": "hidden states", "grouped-query": "K and V"}


def form_report(heads: str, runs: Mapping[str, Run], talk: Talk) -> dict[str, Any]:
    """One form of the model, on all servers."""
    computed = runs[COMPUTED].turns
    turns = [
        {
            "history_tokens": turn.history,
            "ttft_ms": {name: run.turns[number].ttft_ms for name, run in runs.items()},
            "from_l3": {name: run.turns[number].cached.storage for name, run in runs.items()},
            "same_reply": all(run.turns[number].reply == turn.reply for run in runs.values()),
            "reply": talk.text(turn.reply),
        }
        for number, turn in enumerate(computed)
    ]
    sizes = {name: runs[name].bytes_per_token for name in (FILE, OURS)}
    return {"heads": heads, "stored": _STORED[heads], "bytes_per_token": sizes, "turns": turns}


def build_report(forms: Sequence[Mapping[str, Any]], about: Mapping[str, object]) -> dict[str, Any]:
    """The content of ``demo.json``; ``about`` comes first in it."""
    found = problems(forms)
    return {**about, "succeeded": not found, "problems": found, "forms": list(forms)}


def problems(forms: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong, one line each; empty when the demo succeeded."""
    found = []
    for form in forms:
        for number, turn in enumerate(form["turns"], 1):
            where = f"{form['heads']}, question {number}"
            if not turn["same_reply"]:
                found.append(f"{where}: replies differ")
            if number > 1 and not turn["from_l3"][OURS]:
                found.append(f"{where}: nothing came from L3")
    return found


def times_sooner(report: Mapping[str, Any]) -> float:
    """How many times sooner than by computing the first token comes, at the median."""
    return statistics.median(
        turn["ttft_ms"][COMPUTED] / turn["ttft_ms"][OURS]
        for form in report["forms"]
        for turn in form["turns"][1:]
    )


def finding(report: Mapping[str, Any]) -> str:
    """What the table and the picture show, in a sentence."""
    hidden, file = (report["forms"][0]["bytes_per_token"][name] for name in (OURS, FILE))
    return (
        f"From disk the next reply begins {times_sooner(report):.0f} times sooner than computed "
        f"anew; hidden states take {hidden / file:.2f} of the bytes."
    )


def table_lines(results: Mapping[str, Any]) -> str:
    """The turns as a Markdown table, for the marked blocks of the documentation."""
    heads = ("attention: stored", "bytes per token: `file` / hcache", "history, tokens")
    times = (f"{SHOWN[name]}, ms" for name in (COMPUTED, FILE, OURS))
    return markdown((*heads, *times, "same reply"), _rows(results))


def table(report: Mapping[str, Any]) -> Table:
    """The same, for a terminal of 80 columns."""
    view = Table(box=None, pad_edge=False, title=_headline(report), title_justify="left")
    view.add_column("attention:\nstored")
    heads = ("bytes a token:\nfile / hcache", "history", "ms:\ncomputed", "file", "hcache")
    for column in (*heads, "same\nreply"):
        view.add_column(column, justify="right", no_wrap=True)
    for row in _rows(report):
        view.add_row(*row)
    return view


def _rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each question behind a history."""
    return [
        (
            f"{form['heads']}: {form['stored']}",
            " / ".join(f"{form['bytes_per_token'][name]:,.0f}" for name in (FILE, OURS)),
            f"{turn['history_tokens']:,}",
            *(f"{turn['ttft_ms'][name]:,.0f}" for name in (COMPUTED, FILE, OURS)),
            "yes" if turn["same_reply"] else "NO",
        )
        for form in report["forms"]
        for turn in form["turns"][1:]
    ]


def _headline(report: Mapping[str, Any]) -> str:
    return (
        f"{report['model']}, float32, SGLang {report['sglang_version']} on {report['device']}\n"
        "time to the first token of the second and third reply; the cache was evicted before each"
    )


def draw(report: Mapping[str, Any]) -> Figure:
    """Time to the first token of each later reply, a panel for each form of the model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(1, len(report["forms"]), squeeze=False)[0]
    for axes, form in zip(panels, report["forms"], strict=True):
        rows = [
            {"turn": f"{turn['history_tokens']:,} tokens of history", **turn["ttft_ms"]}
            for turn in form["turns"][1:]
        ]
        series = {SHOWN[name].replace("`", ""): name for name in (COMPUTED, FILE, OURS)}
        grouped_bars(axes, f"{form['heads']}: {form['stored']}", rows, "turn", series, "%.0f")
        axes.set_ylabel("ms to the first token")
    figure.suptitle(
        f"From disk the next reply begins {times_sooner(report):.0f} times sooner\n"
        f"({report['model']}, float32, {report['device']})",
        fontsize=11,
    )
    return figure
