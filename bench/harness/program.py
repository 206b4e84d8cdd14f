"""One runner of all programs that measure.

A program declares its settings, the function that measures, its tables and its picture. The runner
parses options, finds the machine, measures, prints, writes and ends with 1 if something was wrong.
It imports nothing that a machine with a GPU may lack.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from bench.harness.report import OUT, Results, Table, aligned, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bench.harness.machine import Machine

Tables = Table | Sequence[Table]
Advance = Callable[[str], None]  # is told the next step of a program
Number = TypeVar("Number", int, float)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The program's text as it stands, and the default of every option that has a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.nargs != 0 and action.default not in (None, "")
        return super()._get_help_string(action) if shown else action.help


@dataclass(frozen=True)
class Setting:
    """One option or argument of a program.

    Attributes:
        kind: Makes the value of its text; None: the option is a switch.
        more: Further arguments of :meth:`argparse.ArgumentParser.add_argument`.
    """

    name: str
    kind: Callable[[str], Any] | None
    default: Any
    help: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def add(self, parsed: argparse.ArgumentParser) -> None:
        if self.kind is None:
            parsed.add_argument(self.name, action="store_true", help=self.help, **self.more)
            return
        more = {"default": self.default} if self.name.startswith("-") else {}
        parsed.add_argument(self.name, type=self.kind, help=self.help, **more, **self.more)


def several(name: str, kind: Callable[[str], Any], default: Any, text: str) -> Setting:
    return Setting(name, kind, default, text, {"nargs": "+"})


class Run:
    """One run of a program; ``given`` are its options, ``parser`` ends it with a usage error."""

    def __init__(self, given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        self.given, self.parser = given, parser

    @cached_property
    def machine(self) -> Machine:
        """Of the servers.

        Raises:
            MachineError: SGLang cannot serve here.
        """
        from bench.harness.machine import find_machine

        return find_machine()


def scratch(place: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder for the length of a block."""
    return tempfile.TemporaryDirectory(prefix="hcache-bench-", dir=place)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The declaration of a program.

    Attributes:
        name: Of its results; ``python -m PACKAGE.NAME`` unless ``module`` names another one.
        measure: Returns the content of the file; the runner adds time and machine.
        settings: Beside ``--out``.
        tables: By name if there are several; ``table`` has all, and is printed.
        said: Lines that are printed above the table.
        slows: It slows SGLang down, which only the CPU engine lets it do.
        serves: It serves: results name the machine. False: they are computed, or the disk's.
        wrong: Errors in results, one line each.
        file: Name of the files of results; None: the program's.
    """

    name: str
    doc: str | None
    measure: Callable[[Any], Results]
    settings: Sequence[Setting] = ()
    tables: Mapping[str, Tables] | Tables = ()
    said: Callable[[Results], Sequence[str]] = lambda results: ()
    draw: Callable[[Results], Figure] | None = None
    slows: bool = False
    serves: bool = True
    wrong: Callable[[Results], Sequence[str]] = lambda results: ()
    file: Callable[[Results], str] | None = None
    module: str | None = None
    package: ClassVar[str] = "bench"

    def table(self, results: Results, name: str = "table") -> str:
        """A table of results as Markdown."""
        given = self.tables[name] if isinstance(self.tables, Mapping) else self.tables
        tables = [given] if isinstance(given, Table) else given
        return "\n\n".join(filter(None, (table.lines(results) for table in tables)))

    def parser(self) -> argparse.ArgumentParser:
        module = self.module or f"{self.package}.{self.name}"
        arguments = "".join(f"{s.name} " for s in self.settings if not s.name.startswith("-"))
        made = argparse.ArgumentParser(
            prog=f"python -m {module}",
            usage=f"%(prog)s {arguments}[options]",
            description=self.doc,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        for setting in self.settings:
            setting.add(made)
        self._add_out(made)
        return made

    def _add_out(self, parsed: argparse.ArgumentParser) -> None:
        parsed.add_argument("--out", type=Path, default=OUT, help="folder of the results")

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the program; returns its exit status."""
        parser = self.parser()
        run = Run(parser.parse_args(arguments), parser)
        with failing():
            if self.slows and run.machine.device != "cpu":
                from bench.harness.machine import MachineError

                raise MachineError("only the CPU engine is slowed down; see bench/gpu/ for GPUs")
            results = self.measure(run)
            if self.serves and "device" not in results:
                results = {**stamp(run.machine), **results}
            self._tell(run, results)
        wrong = self.wrong(results)
        for line in wrong:
            print(line, file=sys.stderr)
        return int(bool(wrong))

    def _tell(self, run: Run, results: Results) -> None:
        name = self.file(results) if self.file else self.name
        print(*self.said(results), aligned(self.table(results)), sep="\n")
        write(run.given.out, name, results, self.draw)
        print(f"\nResults: {run.given.out / name}.json")

    def run(self) -> None:
        sys.exit(self.main())


def at_least(least: Number) -> Callable[[str], Number]:
    """Kind of a setting: a number, whole if ``least`` is, of at least ``least``."""

    def number(text: str) -> Number:
        found = type(least)(text)
        if not found >= least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return found

    return number


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Kind of a setting: names with commas between them, each counted once; all must be known."""

    def found(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",")]
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} must be of {', '.join(known)}")
        return list(dict.fromkeys(given))

    return found


def model_name(text: str) -> str:
    """Kind of a setting: a model's name, or a folder; SGLang says much later that one is missing.

    Raises:
        ArgumentTypeError: It is a path at which nothing is.
    """
    if text.startswith(("/", "./", "../", "~")) and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text}: there is nothing; it must be a model's folder, or its name"
        )
    return text


MODEL = (
    Setting("--model-path", model_name, None, "a folder or a name; default: a random Llama"),
    Setting("--server-args", shlex.split, "", "more arguments of SGLang, with = before them"),
)
"""Settings of programs that serve any model."""


@contextmanager
def failing() -> Iterator[None]:
    """End the program with status 2 and a line, not with a traceback, if it cannot run.

    SIGTERM leaves its blocks as an error does: servers and temporary folders go, too.
    """
    from bench.harness.client import RequestError
    from bench.harness.machine import MachineError
    from bench.harness.server import ServerError, unwind_when_terminated
    from bench.workload.base import WorkloadError

    known = RequestError, MachineError, ServerError, WorkloadError, OSError
    unwind_when_terminated()
    try:
        yield
    except known as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def steps(total: int) -> Iterator[Advance]:
    """A progress bar on standard error; the block calls the function with each next step's name."""
    from hcache_backend.cli.common import progress_bar

    with progress_bar(hidden=False) as bar:
        task = bar.add_task("", total=total, completed=-1)  # the first step has only begun
        yield lambda step: bar.update(task, advance=1, description=step)


def stamp(machine: Machine) -> dict[str, Any]:
    """When and where results were measured, and by which attention backend of SGLang."""
    from bench.harness.options import CPU_ATTENTION

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.name,
        "device_type": machine.device,
        "sglang_version": machine.sglang,
        "attention_backend": CPU_ATTENTION if machine.device == "cpu" else "SGLang's choice",
        "cores": os.cpu_count(),
    }
