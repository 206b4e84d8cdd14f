"""What programs that measure have in common: progress, errors, files of results, tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.harness.machine import Machine, MachineError
from bench.harness.server import ServerError
from bench.workload.base import WorkloadError
from hcache_backend.cli.client import BenchError
from hcache_backend.cli.common import fail, progress_bar

OUT = Path("out")
"""Where programs write unless they are told otherwise; git ignores it."""
VOCABULARY = 1000
"""Random token ids are below it: any model has more."""


@contextmanager
def failing() -> Iterator[None]:
    """End the program with status 2 and a line, not with a traceback, if it cannot run."""
    try:
        yield
    except (BenchError, MachineError, ServerError, WorkloadError, OSError) as error:
        fail(str(error))


@contextmanager
def steps(total: int) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """A progress bar on standard error, and what to call with the name of each next step."""
    with progress_bar(hidden=False) as bar:
        task = bar.add_task("", total=total, completed=-1)  # the first step has only begun

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield bar, advance


def stamp(machine: Machine) -> dict[str, Any]:
    """When and where results were measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.name,
        "device_type": machine.device,
        "sglang_version": machine.sglang,
    }


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write results; numbers that JSON cannot hold become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(results), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns, but for the first, are aligned to the right."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def save_picture(figure: Any, path: Path) -> Path:
    """Write a figure of matplotlib as a PNG; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
