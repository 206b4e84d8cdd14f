"""The demo's verdict, JSON, rows of the table and of the picture."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.demo.talk import COMPUTED, FILE, OURS, QUESTIONS, Run, Talk

_STORED = {"multi-head": "hidden states", "grouped-query": "K and V"}


def form_report(heads: str, runs: Mapping[str, Run], talk: Talk) -> dict[str, Any]:
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
    """One line each; empty when the demo succeeded."""
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
    hidden, file = (report["forms"][0]["bytes_per_token"][name] for name in (OURS, FILE))
    return (
        f"From disk the next reply begins {times_sooner(report):.0f} times sooner than computed "
        f"anew; hidden states take {hidden / file:.2f} of the bytes."
    )


def turns(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The questions behind a history, of both forms of the model."""
    return [
        {
            **turn,
            "form": f"{form['heads']}: {form['stored']}",
            "bytes": " / ".join(f"{form['bytes_per_token'][name]:,.0f}" for name in (FILE, OURS)),
            "same": "yes" if turn["same_reply"] else "NO",
            "name": f"{turn['history_tokens']:,} tokens, of history",
        }
        for form in results["forms"]
        for turn in form["turns"][1:]
    ]


def headline(results: Mapping[str, Any]) -> str:
    return (
        f"From disk the next reply begins {times_sooner(results):.0f} times sooner "
        f"({results['model']}, float32, {results['device']})"
    )


def said(results: Mapping[str, Any]) -> list[str]:
    """The conversation, the finding, and problems."""
    lines = [f"The model is random: {results['why_random']}."] if results["why_random"] else []
    for question, turn in zip(QUESTIONS, results["forms"][0]["turns"], strict=True):
        if turn["reply"] is not None:
            lines += [f"> {question}", turn["reply"], ""]
    lines.append(
        f"{results['model']}, float32; the cache was evicted before each of these replies."
    )
    return [*lines, finding(results), *(f"FAILED {problem}" for problem in results["problems"])]
