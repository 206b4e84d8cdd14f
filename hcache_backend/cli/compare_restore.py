"""How long a history takes to come back, method by method, timed in the server.

TTFT also holds the question's prefill, and on a CPU attention hides the rest; so the server's own
trace is read: from the start of the prefetch to the last layer on the device, one at a time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hcache_backend.cli.bench_server import METHODS, PAGE_SIZE, launch
from hcache_backend.cli.demo_report import Restore, read_trace, recomputed, restored_from_l3
from hcache_backend.cli.machine import Machine
from hcache_backend.cli.serving import ServerProcess

METHODS_RESTORED = ("hcache-hidden", "hcache-kv", "hcache", "file", "recompute")
"""The one that decides what a balanced bus is comes first."""
BALANCED = ("hcache-hidden", "hcache-kv", "file")
_BUS_VARIABLE = "HCACHE_CPU_BUS_FILE"
"""Of the CPU engine: a file with the bytes a second that copies to the device may reach."""


@dataclass(frozen=True)
class RestorePlan:
    """What is restored.

    Attributes:
        model: A folder, or a name that SGLang knows.
        tokens: Of a history; whole pages.
        rounds: Histories that are timed; one more is restored before.
        vocabulary: Random tokens are below it.
        server_args: More arguments of SGLang.
        folder: For L3, logs and traces; a folder below it for each method.
    """

    machine: Machine
    model: str
    tokens: int
    rounds: int
    vocabulary: int
    server_args: Sequence[str]
    folder: Path
    seed: int = 1

    def histories(self) -> list[list[int]]:
        """The first is restored to warm up."""
        source = random.Random(self.seed)
        return [
            [source.randrange(self.vocabulary) for _ in range(self.tokens)]
            for _ in range(self.rounds + 1)
        ]


@dataclass
class Restored:
    """Restores of one method.

    Attributes:
        disk: With L3 as it is, from a cold page cache.
        balanced: Over a bus at which hidden states take as long to copy as to project; empty where
            it was not tried.
        bytes_per_token: In L3.
        said: The mode and partition that the server logged; empty where it is not ours.
    """

    disk: list[Restore] = field(default_factory=list)
    balanced: list[Restore] = field(default_factory=list)
    bytes_per_token: float = 0.0
    said: str = ""


def restore_all(
    plan: RestorePlan, methods: Sequence[str], advance: Callable[[str], None]
) -> tuple[dict[str, Restored], float | None]:
    """Restore with each method; also the bytes a second of the balanced bus, where it was tried.

    Args:
        advance: Called :func:`steps` times, with what comes next.

    Raises:
        ServerError: A server did not start, a request failed, or a history did not come back.
    """
    rows: dict[str, Restored] = {}
    balance: float | None = None
    for name in sorted(methods, key=METHODS_RESTORED.index):
        advance(f"{METHODS[name].title}: starting")
        with _server(plan, name) as (server, bus):
            times = _Times(plan, name, server)
            row = rows[name] = Restored()
            if name == "recompute":
                row.disk = times.recompute(advance)
                continue
            times.store(advance)
            row.bytes_per_token = l3_bytes(times.l3) / (plan.tokens * (plan.rounds + 1))
            row.said = times.said()
            row.disk = times.restore(advance)
            if bus is None or name not in BALANCED:
                continue
            if name == BALANCED[0]:
                copied = row.bytes_per_token * plan.tokens
                balance = copied / (1e-3 * median_of(row.disk, "load_ms"))
            if balance is not None:
                bus.write_text(f"{balance}")
                row.balanced = times.restore(advance)
    return rows, balance


def steps(plan: RestorePlan, methods: Sequence[str]) -> int:
    """How often :func:`restore_all` calls ``advance``."""
    each = plan.rounds + 1
    total = 0
    for name in methods:
        total += 1 + each
        if name != "recompute":
            total += each
        if name in BALANCED and BALANCED[0] in methods and plan.machine.device == "cpu":
            total += each
    return total


def median_of(restores: Sequence[Restore], part: str) -> float:
    """Median milliseconds of ``ms``, ``l3_ms`` or ``load_ms``."""
    values = sorted(getattr(restore, part) for restore in restores)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def l3_bytes(folder: Path) -> int:
    """Bytes of the files of pages in an L3 folder, ours or SGLang's."""
    pages = [path for kind in ("*.page", "*.bin") for path in folder.rglob(kind)]
    return sum(path.stat().st_size for path in pages)


def report(rows: Mapping[str, Restored], tokens: int, balance: float | None) -> dict[str, Any]:
    """What ``compare.json`` says of restores; times are medians, in milliseconds."""
    return {
        "tokens": tokens,
        "balanced_bus_bytes_per_second": balance,
        "methods": {
            name: {
                "title": METHODS[name].title,
                "bytes_per_token": row.bytes_per_token,
                "said": row.said,
                "disk": _medians(row.disk),
                "balanced": _medians(row.balanced) if row.balanced else None,
            }
            for name, row in rows.items()
        },
    }


def _medians(restores: Sequence[Restore]) -> dict[str, Any]:
    return {
        **{part: round(median_of(restores, part), 2) for part in ("ms", "l3_ms", "load_ms")},
        "all_ms": [round(restore.ms, 2) for restore in restores],
    }


@contextmanager
def _server(plan: RestorePlan, name: str) -> Iterator[tuple[ServerProcess, Path | None]]:
    """A server of a method, and the file with its bus's rate where there is one."""
    folder = plan.folder / name
    folder.mkdir(parents=True)
    bus = folder / "bus" if plan.machine.device == "cpu" else None
    environment = {}
    if bus is not None:
        bus.write_text("0")
        environment[_BUS_VARIABLE] = str(bus)
    command, variables = launch(
        METHODS[name],
        plan.machine,
        plan.model,
        folder,
        pool_tokens=plan.tokens + 4 * PAGE_SIZE,
        trace=True,
        extra=plan.server_args,
        environment=environment,
    )
    with ServerProcess(command, variables, folder / "server.log") as server:
        yield server, bus


class _Times:
    """Asks one server, and reads its trace."""

    def __init__(self, plan: RestorePlan, name: str, server: ServerProcess) -> None:
        self.l3 = plan.folder / name / "l3"
        self._plan, self._server = plan, server
        self._title = METHODS[name].title
        self._trace, self._offset = plan.folder / name / "trace.jsonl", 0

    def store(self, advance: Callable[[str], None]) -> None:
        """Have every history computed and written to L3."""
        for history in self._plan.histories():
            advance(f"{self._title}: storing a history")
            self._server.generate(history, 1)
            self._server.flush_cache()

    def restore(self, advance: Callable[[str], None]) -> list[Restore]:
        """Bring every history back from L3, with the page cache empty."""
        found = []
        for history in self._plan.histories():
            advance(f"{self._title}: restoring")
            forget_files(self.l3)
            self._skip_trace()
            self._server.generate([*history, 0], 1)
            events, self._offset = read_trace(self._trace, self._offset)
            restore = restored_from_l3(events)
            if restore is None or restore.tokens < len(history):
                came = restore.tokens if restore else 0
                raise self._server.error(f"only {came} of {len(history)} tokens came from L3")
            found.append(restore)
            self._server.flush_cache()
        return found[1:]

    def recompute(self, advance: Callable[[str], None]) -> list[Restore]:
        """Have every history computed."""
        found = []
        for history in self._plan.histories():
            advance(f"{self._title}: computing a history")
            self._skip_trace()
            self._server.generate(history, 1)
            events, self._offset = read_trace(self._trace, self._offset)
            restore = recomputed(events)
            if restore is None:
                raise self._server.error("the trace shows no prefill")
            found.append(restore)
        return found[1:]

    def said(self) -> str:
        """What our plugin logged about how it stores."""
        lines = self._server.log_text().splitlines()
        signs = ("hcache: hidden mode", "hcache: KV mode", "hcache: partition:")
        found = [line.split("hcache: ", 1)[1] for line in lines if any(s in line for s in signs)]
        return "; ".join(dict.fromkeys(found))

    def _skip_trace(self) -> None:
        self._offset = self._trace.stat().st_size if self._trace.exists() else 0


def forget_files(folder: Path) -> None:
    """Take the files of an L3 folder out of the kernel's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # what is not on disk yet cannot be forgotten
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
