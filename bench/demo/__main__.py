"""Shows on a real SGLang server what restoring from hidden states saves.

A tiny random model holds the same conversations with one server per method: recomputation, KV
offload to SGLang's file backend, and HCache. Device and host caches are flushed after every
request, so every turn has to bring its history back from L3.

Exit status: 0; 1 when a token differs or a turn did not restore its history; 2 when the demo could
not run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.demo.codecs import codec_report, codec_steps, codec_table, run_codecs
from bench.demo.conversations import POOL_TOKENS, MethodRun, Script, run_method
from bench.demo.conversations import steps as method_steps
from bench.demo.report import METHODS, OURS, build_report, draw, table
from bench.harness.machine import Machine, find_machine
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
    add("--conversations", type=at_least(1), default=4, help="conversations held")
    add("--turns", type=at_least(2), default=5, help="turns of each conversation")
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
    script = Script(conversations=given.conversations, turns=given.turns)
    if script.longest_prompt > POOL_TOKENS:
        most = POOL_TOKENS // (script.longest_prompt // given.turns)
        parsed.error(f"--turns {given.turns}: the device pool holds at most {most}")
    with failing():
        report = measure(script, TinyLlama(vocabulary=script.vocabulary), given.codecs)
        write(given.out.parent, given.out.stem, report, draw)
    if given.as_json:
        print_json(report)
    else:
        _show(report, given.out)
    return 0 if report["succeeded"] else FAILED


def measure(script: Script, shape: TinyLlama, codecs: bool) -> dict[str, Any]:
    """Run every method and, where asked for, every codec; returns the content of ``demo.json``.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: A server did not start, or a request failed.
    """
    number = len(METHODS) * method_steps(script) + (codec_steps(script) if codecs else 0)
    with steps(number + 1) as (_, advance):
        advance("preparing SGLang and a tiny model")
        machine = find_machine()
        with tempfile.TemporaryDirectory(prefix="hcache-demo-") as scratch:
            model = shape.build(Path(scratch))
            runs: dict[str, MethodRun] = {}
            for method in METHODS:
                folder = Path(scratch) / method
                runs[method] = run_method(method, script, model, machine, folder, advance)
            codec_runs = (
                run_codecs(script, model, machine, Path(scratch), advance) if codecs else {}
            )
    about = _about(machine, shape, script)
    return build_report(
        runs, PAGE_SIZE, about, codec_report(codec_runs, shape) if codec_runs else None
    )


def _about(machine: Machine, shape: TinyLlama, script: Script) -> dict[str, object]:
    return {
        **stamp(machine),
        "model": {**shape.describe(), "kv_bytes_per_token": shape.kv_bytes_per_token},
        "conversations": script.conversations,
        "turns_each": script.turns,
        "question_tokens": script.question_tokens,
        "reply_tokens": script.reply_tokens,
    }


def _show(report: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    console.print(table(report))
    if "codecs" in report:
        console.print(codec_table(report["codecs"]))
    note = report["methods"][OURS].get("note")
    if note:
        console.print(f"HCache server: {note}", markup=False)
    for problem in report["problems"]:
        console.print(f"FAILED {problem}", style="red", markup=False)
    console.print(f"Report: {out}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
