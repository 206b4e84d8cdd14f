"""Measures on a real SGLang server whether an L3 hit is slower than computing.

Two tiny random models answer questions behind a history that is in L3 and nowhere else: computed
without a cache, read by SGLang's `file` backend, and by HCache with default options. The disk is as
it is; then slowed down until it brings K and V 1.35 and 0.24 times as fast as computing: about the
ratios of one SSD and an H100 for Llama-3-8B and for Llama-2-7B.

Exit status: 0; 1 when a token differs or nothing came from L3; 2 when the demo could not run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.demo.codecs import codec_report, codec_steps, codec_table, run_codecs
from bench.demo.conversations import MethodRun, Script
from bench.demo.report import build_report, draw, table
from bench.demo.settings import MODELS
from bench.demo.settings import measure as measure_settings
from bench.demo.settings import steps as setting_steps
from bench.harness.machine import find_machine
from bench.harness.methods import PAGE_SIZE
from bench.harness.models import TinyLlama
from bench.harness.program import at_least, failing, parser, stamp, steps
from bench.harness.report import OUT, write
from hcache_backend.cli.common import print_json

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = parser("bench.demo", __doc__)
    add = parsed.add_argument
    add("--json", dest="as_json", action="store_true", help="print only the report, as JSON")
    add("--tokens", type=at_least(PAGE_SIZE), default=1024, help="tokens of the history")
    add("--rounds", type=at_least(1), default=7, help="questions to each server and setting")
    add(
        "--no-codecs",
        dest="codecs",
        action="store_false",
        help="do not compare the codecs of hidden states too (four short servers)",
    )
    add(
        "--out",
        type=Path,
        default=OUT / "demo.json",
        help="where the report goes; a picture (.png) goes beside it",
    )
    given = parsed.parse_args(arguments)
    tokens = given.tokens - given.tokens % PAGE_SIZE
    with failing():
        report = measure(tokens, given.rounds, given.codecs)
        write(given.out.parent, given.out.stem, report, draw)
    if given.as_json:
        print_json(report)
    else:
        _show(report, given.out)
    return 0 if report["succeeded"] else FAILED


def measure(tokens: int, rounds: int, codecs: bool) -> dict[str, Any]:
    """Run every setting and, where asked for, every codec; returns the content of ``demo.json``.

    Args:
        tokens: Of the history; whole pages.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: A server did not start, or a request failed.
    """
    machine = find_machine()
    script, shape = Script(), TinyLlama()
    number = setting_steps(rounds, machine) + (codec_steps(script) if codecs else 0)
    with (
        steps(number) as (_, advance),
        tempfile.TemporaryDirectory(prefix="hcache-demo-") as folder,
    ):
        models = measure_settings(machine, Path(folder), tokens, rounds, advance)
        runs: dict[str, MethodRun] = {}
        if codecs:
            runs = run_codecs(script, shape.build(Path(folder)), machine, Path(folder), advance)
    about = {
        **stamp(machine),
        "shapes": {kind: shape.describe() for kind, shape in MODELS.items()},
        "history_tokens": tokens,
        "rounds": rounds,
    }
    return build_report(models, about, codec_report(runs, shape) if runs else None)


def _show(report: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    console.print(table(report))
    if "codecs" in report:
        console.print(codec_table(report["codecs"]))
    for problem in report["problems"]:
        console.print(f"FAILED {problem}", style="red", markup=False)
    console.print(f"Report: {out}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
