"""Talks with a real model on real SGLang servers, and brings the conversation back from disk.

A model answers three questions about a module of Python's standard library. Between them its cache
is evicted, as if others had used the server. One server computes the conversation anew, one reads
it by SGLang's `file` backend, and one by this backend. The model is SmolLM2-135M-Instruct in two
forms with the same function: multi-head attention, whose hidden states are stored, and
grouped-query attention, as it is published, with default options, but that every hit is read. If
it cannot be had, a random model is used.

Exit status: 0; 1 when a reply differs or nothing came from L3; 2 when the demo could not run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.demo.report import build_report, draw, finding, form_report, table
from bench.demo.talk import (
    COMPUTED,
    FILE,
    FORMS,
    OURS,
    QUESTIONS,
    Heads,
    Talk,
    Tokens,
    Words,
    converse,
)
from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import TITLE, ModelMissing, source_facts
from bench.harness.machine import Machine, find_machine
from bench.harness.models import TinyLlama
from bench.harness.program import at_least, failing, parser, stamp, steps
from bench.harness.report import OUT, write
from hcache_backend.cli.common import print_json

FAILED = 1
RANDOM = "a random Llama of 2 layers"
_KV_HEADS = {"multi-head": 8, "grouped-query": 2}
_REAL = {"multi-head": "smollm2-mha", "grouped-query": "smollm2"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = parser("bench.demo", __doc__)
    add = parsed.add_argument
    add("--json", dest="as_json", action="store_true", help="print only the report, as JSON")
    add("--tokens", type=at_least(128), default=1500, help="tokens of the text")
    add("--random", action="store_true", help="use the random model")
    add(
        "--out",
        type=Path,
        default=OUT / "demo.json",
        help="where the report goes; a picture (.png) goes beside it",
    )
    given = parsed.parse_args(arguments)
    with failing():
        report = measure(given.tokens, real=not given.random)
        write(given.out.parent, given.out.stem, report, draw)
    if given.as_json:
        print_json(report)
    else:
        _show(report, given.out)
    return 0 if report["succeeded"] else FAILED


def measure(tokens: int, *, real: bool) -> dict[str, Any]:
    """Have the conversations; returns the content of ``demo.json``.

    Args:
        tokens: Of the text.
        real: Use the real model, if it can be had.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: A server did not start, or a request failed.
    """
    machine = find_machine()
    why = _why_random() if real else "asked for by --random"
    forms = []
    with (
        steps(len(FORMS) * (1 + 3 * len(QUESTIONS))) as (_, advance),
        tempfile.TemporaryDirectory(prefix="hcache-demo-") as folder,
    ):
        for heads in FORMS:
            advance(f"{heads}: building the model (once)")
            model, talk = _model(heads, Path(folder), tokens, random=why is not None)
            place = Path(folder) / heads
            forms.append(_form(heads, model, talk, machine, place, advance))
    about = {
        **stamp(machine),
        "model": TITLE if why is None else RANDOM,
        "why_random": why,
        "text_tokens": tokens,
    }
    return build_report(forms, about)


def _form(
    heads: Heads,
    model: Path,
    talk: Talk,
    machine: Machine,
    folder: Path,
    said: Callable[[str], None],
) -> dict[str, Any]:
    runs = {
        method: converse(method, heads, model, talk, machine, folder, said)
        for method in (COMPUTED, FILE, OURS)
    }
    return form_report(heads, runs, talk)


def _model(heads: Heads, folder: Path, tokens: int, *, random: bool) -> tuple[Path, Talk]:
    if random:
        shape = TinyLlama(layers=2, hidden=1024, heads=8, kv_heads=_KV_HEADS[heads])
        return shape.build(folder), Tokens(shape.vocabulary, tokens)
    model = real_model(_REAL[heads])
    return model, Words(model, tokens)


def _why_random() -> str | None:
    """Why the real model cannot be had, or None."""
    try:
        source_facts()
    except ModelMissing as lacking:
        return str(lacking)
    return None


def _show(report: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    if report["why_random"]:
        console.print(f"The model is random: {report['why_random']}.", markup=False)
    for question, turn in zip(QUESTIONS, report["forms"][0]["turns"], strict=True):
        if turn["reply"] is not None:
            console.print(f"> {question}", style="bold", markup=False)
            console.print(f"{turn['reply']}\n", markup=False)
    console.print(table(report))
    console.print(f"\n{finding(report)}", markup=False)
    for problem in report["problems"]:
        console.print(f"FAILED {problem}", style="red", markup=False)
    console.print(f"Report: {out}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
