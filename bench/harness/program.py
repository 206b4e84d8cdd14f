"""What programs that measure have in common: options, progress, errors, the date of results."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

from bench.harness.machine import Machine, MachineError
from bench.harness.options import CPU_ATTENTION
from bench.harness.server import ServerError, unwind_when_terminated
from bench.workload.base import WorkloadError
from hcache_backend.cli.common import errors, progress_bar
from hcache_backend.cli.ingest import UnusableServer

Number = TypeVar("Number", int, float)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The program's text as it stands, and the default of every option that has a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.nargs != 0 and action.default not in (None, "")
        return super()._get_help_string(action) if shown else action.help


def parser(program: str, doc: str | None, arguments: str = "[options]") -> argparse.ArgumentParser:
    """The parser of ``python -m PROGRAM ARGUMENTS``; ``doc`` describes it."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        usage=f"%(prog)s {arguments}",
        description=doc,
        formatter_class=_Help,
        allow_abbrev=False,
    )


def add_model_options(parsed: argparse._ActionsContainer) -> None:
    """Options of programs that serve any model."""
    parsed.add_argument(
        "--model-path", type=model_name, help="model: a folder or a name; default: a random Llama"
    )
    parsed.add_argument(
        "--server-args",
        type=shlex.split,
        default="",
        help="more arguments of SGLang, as --server-args='--load-format dummy'",
    )


def at_least(least: Number) -> Callable[[str], Number]:
    """Type of an option: a number, whole if ``least`` is, of at least ``least``."""

    def number(text: str) -> Number:
        found = type(least)(text)
        if not found >= least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return found

    return number


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Type of an option: names with commas between them, each counted once; all must be known."""

    def found(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",")]
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} must be of {', '.join(known)}")
        return list(dict.fromkeys(given))

    return found


def model_name(text: str) -> str:
    """Type of an option: a model's name, or a folder; SGLang says much later that one is missing.

    Raises:
        ArgumentTypeError: It is a path at which nothing is.
    """
    if text.startswith(("/", "./", "../", "~")) and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text}: there is nothing; it must be a model's folder, or its name"
        )
    return text


@contextmanager
def failing() -> Iterator[None]:
    """End the program with status 2 and a line, not with a traceback, if it cannot run.

    On SIGTERM its blocks are left as on an error: servers and temporary folders go, too.
    """
    unwind_when_terminated()
    try:
        yield
    except (UnusableServer, MachineError, ServerError, WorkloadError, OSError) as error:
        errors.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise SystemExit(2) from None


@contextmanager
def steps(total: int) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """A progress bar on standard error, and what to call with the name of each next step."""
    with progress_bar(hidden=False) as bar:
        task = bar.add_task("", total=total, completed=-1)  # the first step has only begun

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield bar, advance


def stamp(machine: Machine, attention: str | None = None) -> dict[str, Any]:
    """When and where results were measured, and by which attention backend of SGLang.

    Args:
        attention: The backend that the program asked for; None: the harness's choice.
    """
    default = CPU_ATTENTION if machine.device == "cpu" else "SGLang's choice"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.name,
        "device_type": machine.device,
        "sglang_version": machine.sglang,
        "attention_backend": attention or default,
    }
