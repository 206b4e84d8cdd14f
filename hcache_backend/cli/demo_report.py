"""What the demo measured, and what follows from it: statistics, verdict, JSON and table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from hcache_backend.trace import Restore

L3_METHODS = ("kv_offload", "hcache")
METHODS = ("recompute", *L3_METHODS)


@dataclass(frozen=True)
class Turn:
    """One turn of one conversation on one server.

    Attributes:
        history_tokens: Prompt tokens that earlier turns had prefilled or generated.
        l3_tokens: Prompt tokens that came from L3.
        output_ids: The reply.
        restore: None where no history came back.
    """

    conversation: int
    turn: int
    history_tokens: int
    l3_tokens: int
    output_ids: tuple[int, ...]
    restore: Restore | None


@dataclass(frozen=True)
class MethodRun:
    """All turns of one method, in the same order for every method.

    Attributes:
        stored_tokens: Tokens in the pages that were left in L3.
        stored_bytes: Bytes of these pages on disk.
        note: What the server said about its mode; empty where there is nothing to say.
    """

    turns: Sequence[Turn]
    stored_tokens: int = 0
    stored_bytes: int = 0
    note: str = ""


def problems(runs: Mapping[str, MethodRun], page_size: int) -> list[str]:
    """What went wrong, one line each; empty when the demo succeeded."""
    found = []
    for name in L3_METHODS:
        for turn, reference in zip(runs[name].turns, runs["recompute"].turns, strict=True):
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
        codecs: What :func:`hcache_backend.cli.demo_codecs.codec_report` says; None if they were
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
        "methods": {name: _method_entry(runs[name], runs["recompute"]) for name in METHODS},
        **({"codecs": dict(codecs)} if codecs else {}),
        "turns": turns,
    }


def _turn_entry(by_method: Mapping[str, Turn]) -> dict[str, Any]:
    turn = by_method["hcache"]
    return {
        "conversation": turn.conversation,
        "turn": turn.turn,
        "history_tokens": turn.history_tokens,
        "l3_tokens": turn.l3_tokens,
        "kv_offload_l3_tokens": by_method["kv_offload"].l3_tokens,
        "identical_tokens": len({turn.output_ids for turn in by_method.values()}) == 1,
        "restore_ms": {
            name: None if of.restore is None else round(of.restore.ms, 3)
            for name, of in by_method.items()
        },
    }


def _method_entry(run: MethodRun, reference: MethodRun) -> dict[str, Any]:
    restores = [turn.restore for turn in run.turns if turn.restore is not None]
    entry: dict[str, Any] = {
        "stored_bytes_per_token": (
            run.stored_bytes / run.stored_tokens if run.stored_tokens else 0.0
        ),
        "identical_tokens": [t.output_ids for t in run.turns]
        == [t.output_ids for t in reference.turns],
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


_TITLES = {"recompute": "recompute", "kv_offload": "KV offload", "hcache": "HCache"}


def title(method: str) -> str:
    """A method's name for people."""
    return _TITLES[method]


def table(report: Mapping[str, Any]) -> Table:
    """The report's methods, for a terminal of 80 columns."""
    view = Table(box=box.SIMPLE_HEAD, title=_headline(report), title_justify="left")
    view.add_column("", no_wrap=True)
    for column in (
        "bytes\na token",
        "tokens\nfrom L3",
        "restore, ms\na 1000 tokens",
        "of it\nL3",
        "of it\nload",
        "same\noutput",
    ):
        view.add_column(column, justify="right", no_wrap=True)
    for name, entry in report["methods"].items():
        from_l3 = name in L3_METHODS
        view.add_row(
            title(name),
            f"{entry['stored_bytes_per_token']:,.0f}" if from_l3 else "-",
            f"{entry['l3_tokens']:,}" if from_l3 else "-",
            _number(entry["restore_ms_per_1k_tokens"]),
            _number(entry["l3_ms_per_1k_tokens"]) if from_l3 else "-",
            _number(entry["load_ms_per_1k_tokens"]) if from_l3 else "-",
            ("yes" if entry["identical_tokens"] else "NO") if from_l3 else "-",
        )
    return view


def _headline(report: Mapping[str, Any]) -> str:
    model, history = report["model"], report["methods"]["hcache"]["history_tokens"]
    return (
        f"SGLang {report['sglang_version']} on {report['device']}\n"
        f"{model['architecture']}, {model['dtype']}, {model['layers']} layers, "
        f"hidden size {model['hidden']}; {report['conversations']} conversations of "
        f"{report['turns_each']} turns, {history:,} tokens of history"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
