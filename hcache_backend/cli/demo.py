"""``hcache demo``: the same conversations with no L3, with KV offload and with HCache."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hcache_backend.cli.demo_codecs import codec_report, codec_steps, codec_table, run_codecs
from hcache_backend.cli.demo_picture import draw
from hcache_backend.cli.demo_report import METHODS, MethodRun, build_report, table
from hcache_backend.cli.demo_run import PAGE_SIZE, POOL_TOKENS, Script, run_method, steps
from hcache_backend.cli.machine import Machine, MachineError, find_machine
from hcache_backend.cli.serving import ServerError
from hcache_backend.cli.tiny_model import TinyLlama, build

DEFAULT_OUT = Path("bench") / "results" / "demo.json"
FAILED, COULD_NOT_RUN = 1, 2

_messages = Console(stderr=True, highlight=False)


def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the report, as JSON, to standard output.")
    ] = False,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations held.")] = 4,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each conversation.")] = 5,
    codecs: Annotated[
        bool, typer.Option(help="Also compare the codecs of hidden states (four short servers).")
    ] = True,
    out: Annotated[
        Path, typer.Option(help="Where the report goes; a picture (.png) goes beside it.")
    ] = DEFAULT_OUT,
) -> None:
    """Show on a real SGLang server what restoring from hidden states saves.

    A tiny random model holds the same conversations with one server per method: recomputation,
    KV offload to SGLang's file backend, and HCache. Device and host caches are flushed after every
    request, so every turn has to bring its history back from L3.

    Exit status: 0; 1 when a token differs or a turn did not restore its history; 2 when the demo
    could not run.
    """
    signal.signal(signal.SIGTERM, _exit)
    script = Script(conversations=conversations, turns=turns)
    if script.longest_prompt > POOL_TOKENS:
        most = POOL_TOKENS // (script.longest_prompt // turns)
        raise typer.BadParameter(f"the device pool holds at most {most}", param_hint="--turns")
    try:
        report = measure(script, TinyLlama(vocabulary=script.vocabulary), codecs)
    except (MachineError, ServerError) as error:
        _messages.print(f"hcache demo: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(COULD_NOT_RUN) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    picture = out.with_suffix(".png")
    try:
        draw(report, picture)
    except ImportError:
        _messages.print("No picture was drawn: matplotlib is not installed.")
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report, out)
    raise typer.Exit(exit_status(report))


def measure(script: Script, shape: TinyLlama, codecs: bool) -> dict[str, Any]:
    """Run every method and, where asked for, every codec; returns the content of ``demo.json``.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: A server did not start, or a request failed.
    """
    number = len(METHODS) * steps(script) + (codec_steps(script) if codecs else 0)
    with _progress(number + 1) as advance:
        advance("preparing SGLang and a tiny model")
        machine = find_machine()
        with tempfile.TemporaryDirectory(prefix="hcache-demo-") as scratch:
            model = build(shape, Path(scratch) / "model")
            runs: dict[str, MethodRun] = {}
            for method in METHODS:
                folder = Path(scratch) / method
                folder.mkdir()
                runs[method] = run_method(method, script, model, machine, folder, advance)
            codec_runs = (
                run_codecs(script, model, machine, Path(scratch), advance) if codecs else {}
            )
    about = _about(machine, shape, script)
    return build_report(
        runs, PAGE_SIZE, about, codec_report(codec_runs, shape) if codec_runs else None
    )


def exit_status(report: dict[str, Any]) -> int:
    """0 when every token is the same and every history was restored."""
    return 0 if report["succeeded"] else FAILED


def _exit(number: int, frame: object) -> NoReturn:
    """Unwind, so that the server is ended too."""
    raise SystemExit(128 + number)


def _about(machine: Machine, shape: TinyLlama, script: Script) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.name,
        "device_type": machine.device,
        "sglang_version": machine.sglang,
        "model": {**shape.describe(), "kv_bytes_per_token": shape.kv_bytes_per_token},
        "conversations": script.conversations,
        "turns_each": script.turns,
        "question_tokens": script.question_tokens,
        "reply_tokens": script.reply_tokens,
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; yields what to call with the name of each next step."""
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=_messages, transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)  # the first step has only begun

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield advance


def _show(report: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    console.print(table(report))
    if "codecs" in report:
        console.print(codec_table(report["codecs"]))
    note = report["methods"]["hcache"].get("note")
    if note:
        console.print(f"HCache server: {note}", markup=False)
    for problem in report["problems"]:
        console.print(f"FAILED {problem}", style="red", markup=False)
    console.print(f"Report: {out}, picture: {out.with_suffix('.png')}", markup=False)
