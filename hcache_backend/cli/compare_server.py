"""One server of a comparison of restores: what is asked of it, and what its trace says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hcache_backend.cli.bench_server import PAGE_SIZE, Method, launch
from hcache_backend.cli.machine import Machine
from hcache_backend.cli.serving import ServerProcess
from hcache_backend.trace import Restore, read_trace, recomputed, restored_from_l3

_BUS_VARIABLE, _L3_VARIABLE = "HCACHE_CPU_BUS_FILE", "HCACHE_CPU_L3_FILE"
"""Of the CPU engine: files with the bytes a second that copies to the device and reads of L3 may
reach; 0: no limit."""
_SIGNS = (
    *("hcache: hidden mode", "hcache: KV mode", "hcache: partition:"),
    "hcache: restores are layer-wise",
)


@dataclass(frozen=True)
class Place:
    """What all servers of a comparison have in common.

    Attributes:
        model: A folder, or a name that SGLang knows.
        server_args: More arguments of SGLang.
        pool_tokens: Tokens of the device's KV pool.
    """

    machine: Machine
    model: str
    server_args: Sequence[str]
    pool_tokens: int


class Server:
    """A server that is up, with a trace. It restores one history at a time.

    Args:
        folder: Its own: log, trace and rates.
        l3: The folder of its L3.
        title: For people.
    """

    def __init__(self, process: ServerProcess, folder: Path, l3: Path, title: str) -> None:
        self.l3 = l3
        self._process = process
        self._folder = folder
        self._title = title
        self._trace, self._offset = folder / "trace.jsonl", 0

    def slow_down(self, bus: float, l3: float) -> None:
        """Copies to the device and reads of L3 reach these bytes a second; 0: no limit.

        Only on the CPU engine.
        """
        (self._folder / "bus").write_text(f"{bus}")
        (self._folder / "link").write_text(f"{l3}")

    def store(self, history: Sequence[int], advance: Callable[[str], None]) -> None:
        """Have the history computed and written to L3."""
        advance(f"{self._title}: storing")
        self._process.generate(history, 1)
        self._process.flush_cache()

    def restore(
        self, history: Sequence[int], times: int, advance: Callable[[str], None]
    ) -> list[Restore]:
        """Bring the history back from L3 so many times, with the page cache empty.

        Raises:
            ServerError: Not all of it came back.
        """
        return [self._restore(history, advance) for _ in range(times)]

    def _restore(self, history: Sequence[int], advance: Callable[[str], None]) -> Restore:
        advance(f"{self._title}: restoring")
        forget_files(self.l3)
        self._skip_trace()
        self._process.generate([*history, 0], 1)
        events, self._offset = read_trace(self._trace, self._offset)
        restore = restored_from_l3(events)
        if restore is None or restore.tokens < len(history):
            came = restore.tokens if restore else 0
            raise self._process.error(f"only {came} of {len(history)} tokens came from L3")
        self._process.flush_cache()
        return restore

    def recompute(
        self, history: Sequence[int], times: int, advance: Callable[[str], None]
    ) -> list[Restore]:
        """Have the history computed so many times.

        Raises:
            ServerError: The trace shows no prefill.
        """
        return [self._recompute(history, advance) for _ in range(times)]

    def _recompute(self, history: Sequence[int], advance: Callable[[str], None]) -> Restore:
        advance(f"{self._title}: computing")
        self._skip_trace()
        self._process.generate(history, 1)
        events, self._offset = read_trace(self._trace, self._offset)
        restore = recomputed(events)
        if restore is None:
            raise self._process.error("the trace shows no prefill")
        return restore

    def said(self) -> str:
        """What our plugin logged about how it stores; empty where it is not ours."""
        lines = self._process.log_text().splitlines()
        found = [line.split("hcache: ", 1)[1] for line in lines if any(s in line for s in _SIGNS)]
        return "; ".join(dict.fromkeys(found))

    def _skip_trace(self) -> None:
        self._offset = self._trace.stat().st_size if self._trace.exists() else 0


@contextmanager
def serving(
    place: Place,
    method: Method,
    folder: Path,
    l3: Path,
    hcache: Mapping[str, Any],
) -> Iterator[Server]:
    """A server of a method, with more options of ours, for the length of the block."""
    folder.mkdir(parents=True)
    environment = {}
    if place.machine.device == "cpu":
        environment = {_BUS_VARIABLE: str(folder / "bus"), _L3_VARIABLE: str(folder / "link")}
        for path in environment.values():
            Path(path).write_text("0")
    command, variables = launch(
        method,
        place.machine,
        place.model,
        folder,
        pool_tokens=place.pool_tokens,
        trace=True,
        extra=place.server_args,
        environment=environment,
        metrics=False,
        l3=l3,
        hcache=hcache,
    )
    with ServerProcess(command, variables, folder / "server.log") as process:
        yield Server(process, folder, l3, method.title)


def pool_tokens(tokens: int) -> int:
    """Tokens of the device's pool of servers that restore ``tokens`` tokens at a time."""
    return tokens + 4 * PAGE_SIZE


def l3_bytes(folder: Path) -> int:
    """Bytes of the files of pages in an L3 folder, ours or SGLang's."""
    pages = [path for kind in ("*.page", "*.bin") for path in folder.rglob(kind)]
    return sum(path.stat().st_size for path in pages)


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
