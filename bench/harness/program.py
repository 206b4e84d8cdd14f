"""What programs that measure have in common: progress, errors, the date of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.progress import Progress

from bench.harness.machine import Machine, MachineError
from bench.harness.server import ServerError
from bench.workload.base import WorkloadError
from hcache_backend.cli.client import UnusableServer
from hcache_backend.cli.common import fail, progress_bar

VOCABULARY = 1000
"""Random token ids are below it: any model has more."""


@contextmanager
def failing() -> Iterator[None]:
    """End the program with status 2 and a line, not with a traceback, if it cannot run."""
    try:
        yield
    except (UnusableServer, MachineError, ServerError, WorkloadError, OSError) as error:
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
