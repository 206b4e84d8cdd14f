"""What follows from the demo's turns: verdict, JSON, tables and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from bench.demo.conversations import MethodRun, Turn
from bench.harness.methods import METHODS as ALL_METHODS
from bench.harness.reference import reference_of
from bench.harness.report import grouped_bars, markdown
from bench.harness.restorer import Restore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

L3_METHODS = ("file", "hcache-hidden")
REFERENCE = "recompute"
"""The method without a cache, which the others are compared with."""
METHODS = (REFERENCE, *L3_METHODS)
OURS = "hcache-hidden"
_HEAD = (
    "bytes per token",
    "tokens from L3",
    "ms per 1000 tokens",
    "reading L3",
    "loading",
    "same output",
)


def problems(runs: Mapping[str, MethodRun], page_size: int) -> list[str]:
    """What went wrong, one line each; empty when the demo succeeded."""
    found = []
    for name in L3_METHODS:
        exact = reference_of(name, runs[name], runs[REFERENCE])
        for turn, reference in zip(runs[name].turns, exact.turns, strict=True):
            where = f"{name}: conversation {turn.conversation}, turn {turn.turn}"
            if turn.output_ids != reference.output_ids:
                found.append(f"{where}: the reply differs from that without a cache")
        found += [f"{name}: {line}" for line in missing_history(runs[name], page_size)]
    return found


def missing_history(run: MethodRun, page_size: int) -> list[str]:
    """Turns whose history did not come back from L3, one line each."""
    found = []
    for turn in run.turns:
        where = f"conversation {turn.conversation}, turn {turn.turn}"
        if turn.turn > 0 and turn.l3_tokens < turn.history_tokens - page_size:
            found.append(
                f"{where}: {turn.l3_tokens} of {turn.history_tokens} history tokens came from L3"
            )
        elif turn.turn > 0 and turn.restore is None:
            found.append(f"{where}: the trace shows no restore")
    return found


def build_report(
    runs: Mapping[str, MethodRun],
    page_size: int,
    about: Mapping[str, object],
    codecs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of ``demo.json``; ``about`` comes first in it.

    Args:
        codecs: What :func:`bench.demo.codecs.codec_report` says; None if they were
            not run.
    """
    turns = [
        _turn_entry(dict(zip(METHODS, row, strict=True)))
        for row in zip(*(runs[name].turns for name in METHODS), strict=True)
    ]
    found = problems(runs, page_size) + (codecs["problems"] if codecs else [])
    return {
        **about,
        "page_size": page_size,
        "succeeded": not found,
        "problems": found,
        "identical_tokens": all(turn["identical_tokens"] for turn in turns),
        "methods": {
            name: _method_entry(runs[name])
            | ({} if name == REFERENCE else _likeness(name, runs[name], runs[REFERENCE]))
            for name in METHODS
        },
        **({"codecs": dict(codecs)} if codecs else {}),
        "turns": turns,
    }


def _turn_entry(by_method: Mapping[str, Turn]) -> dict[str, Any]:
    turn = by_method[OURS]
    return {
        "conversation": turn.conversation,
        "turn": turn.turn,
        "history_tokens": turn.history_tokens,
        "l3_tokens": turn.l3_tokens,
        "file_l3_tokens": by_method["file"].l3_tokens,
        "identical_tokens": len({turn.output_ids for turn in by_method.values()}) == 1,
        "restore_ms": {
            name: None if of.restore is None else round(of.restore.ms, 3)
            for name, of in by_method.items()
        },
    }


def _likeness(name: str, run: MethodRun, reference: MethodRun) -> dict[str, bool]:
    exact = reference_of(name, run, reference)
    return {
        "identical_tokens": [turn.output_ids for turn in run.turns]
        == [turn.output_ids for turn in exact.turns]
    }


def _method_entry(run: MethodRun) -> dict[str, Any]:
    restores = [turn.restore for turn in run.turns if turn.restore is not None]
    entry: dict[str, Any] = {
        "stored_bytes_per_token": (
            run.stored_bytes / run.stored_tokens if run.stored_tokens else 0.0
        ),
        "l3_tokens": sum(turn.l3_tokens for turn in run.turns),
        "history_tokens": sum(turn.history_tokens for turn in run.turns),
        "restore_ms_per_1k_tokens": _median_per_1k(restores, "ms"),
        "l3_ms_per_1k_tokens": _median_per_1k(restores, "l3_ms"),
        "load_ms_per_1k_tokens": _median_per_1k(restores, "load_ms"),
    }
    return entry | ({"note": run.note} if run.note else {})


def _median_per_1k(restores: Sequence[Restore], part: str) -> float | None:
    """Median over turns of milliseconds per 1000 tokens."""
    if not restores:
        return None
    return round(median(1000 * getattr(r, part) / r.tokens for r in restores), 3)


def title(method: str) -> str:
    """A method's name for people."""
    return ALL_METHODS[method].title


def table_lines(results: Mapping[str, Any]) -> str:
    """The methods as a Markdown table, for the marked blocks of the documentation."""
    return markdown(("method", *_HEAD), _rows(results))


def table(report: Mapping[str, Any]) -> Table:
    """The report's methods, for a terminal of 80 columns."""
    view = Table(box=box.SIMPLE_HEAD, title=_headline(report), title_justify="left")
    view.add_column("", no_wrap=True)
    for column in _HEAD:
        view.add_column(column, justify="right")
    for row in _rows(report):
        view.add_row(*row)
    return view


def _rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, entry in report["methods"].items():
        restore = _number(entry["restore_ms_per_1k_tokens"])
        if name in L3_METHODS:
            cells = (
                f"{entry['stored_bytes_per_token']:,.0f}",
                f"{entry['l3_tokens']:,}",
                restore,
                _number(entry["l3_ms_per_1k_tokens"]),
                _number(entry["load_ms_per_1k_tokens"]),
                "yes" if entry["identical_tokens"] else "NO",
            )
        else:
            cells = ("-", "-", restore, "-", "-", "-")
        rows.append((title(name), *cells))
    return rows


def _headline(report: Mapping[str, Any]) -> str:
    model, history = report["model"], report["methods"][OURS]["history_tokens"]
    return (
        f"SGLang {report['sglang_version']} on {report['device']}\n"
        f"{model['architecture']}, {model['dtype']}, {model['layers']} layers, "
        f"hidden size {model['hidden']}; {report['conversations']} conversations of "
        f"{report['turns_each']} turns, {history:,} tokens of history"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def draw(report: Mapping[str, Any]) -> Figure:
    """Bytes per token and restore times, a bar for each method."""
    from matplotlib.figure import Figure

    rows = [{"method": title(name), **entry} for name, entry in report["methods"].items()]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    size, time = figure.subplots(1, 2, width_ratios=(2, 3))
    stored = [row for row in rows if row["stored_bytes_per_token"]]
    size_of, time_of = "stored_bytes_per_token", "restore_ms_per_1k_tokens"
    grouped_bars(size, "bytes stored per token", stored, "method", {"bytes": size_of}, "%.0f")
    heading = "ms to bring back 1000 tokens of history"
    grouped_bars(time, heading, rows, "method", {"ms": time_of}, "%.0f")
    figure.suptitle(
        f"{report['model']['architecture']}, {report['model']['dtype']}, "
        f"SGLang {report['sglang_version']}, {report['device']}",
        fontsize=9,
    )
    return figure
