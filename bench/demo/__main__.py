"""Holds a conversation with a real model, and brings it back from disk between its turns.

SmolLM2-135M-Instruct reads a module of Python's standard library and answers three questions. After
every turn the conversation is evicted: it is in L3 and nowhere else. One server computes it again,
one reads it by SGLang's `file` backend, and one by HCache. Replies must be the same. Then further
questions are timed, from this disk and from one that is slowed down until it brings K and V as fast
as the server computes them. All of that for two forms of the model: with 9 heads of K and V, of
which HCache stores hidden states, and as it is shipped, with 3, with default options.

Exit status: 0; 1 when a reply differs or nothing came from L3; 2 when the demo could not run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.demo.measure import DTYPE, measure, steps
from bench.demo.report import build_report, draw, finding, headline, table, talk_lines
from bench.demo.talk import Subject, find_subject, random_subject
from bench.harness.machine import find_machine
from bench.harness.program import at_least, failing, parser, stamp
from bench.harness.program import steps as progress
from bench.harness.report import OUT, write
from hcache_backend.cli.common import print_json

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = parser("bench.demo", __doc__)
    add = parsed.add_argument
    add("--json", dest="as_json", action="store_true", help="print only the report, as JSON")
    add("--rounds", type=at_least(1), default=3, help="further questions from each disk")
    add("--random", action="store_true", help="a small random model instead of the real one")
    add(
        "--out",
        type=Path,
        default=OUT / "demo.json",
        help="where the report goes; a picture (.png) goes beside it",
    )
    given = parsed.parse_args(arguments)
    with failing():
        subject, reason = (random_subject(), None) if given.random else find_subject()
        if reason is not None:
            print(reason, file=sys.stderr)
        report = run(subject, given.rounds)
        write(given.out.parent, given.out.stem, report, draw)
    if given.as_json:
        print_json(report)
    else:
        _show(report, given.out)
    return 0 if report["succeeded"] else FAILED


def run(subject: Subject, rounds: int) -> dict[str, Any]:
    """The content of ``demo.json``.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: A server did not start, or a request failed.
    """
    machine = find_machine()
    with (
        progress(steps(subject, rounds, machine)) as (_, advance),
        tempfile.TemporaryDirectory(prefix="hcache-demo-") as folder,
    ):
        models = measure(subject, machine, Path(folder), rounds, advance)
    return build_report(
        models, {**stamp(machine), "model": {**subject.about, "dtype": DTYPE}, "rounds": rounds}
    )


def _show(report: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    for line in talk_lines(report):
        console.print(line, markup=False)
    console.print(headline(report), markup=False)
    console.print(table(report))
    console.print(finding(report), markup=False)
    for problem in report["problems"]:
        console.print(f"FAILED {problem}", style="red", markup=False)
    console.print(f"Report: {out}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
