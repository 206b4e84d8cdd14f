"""A server that restores one history at a time, timed by its own trace.

TTFT also holds the question's prefill, and on a CPU attention hides the rest; the trace has the
time from the start of the prefetch to the last layer on the device.
"""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import requests

from bench.harness.options import ServerOptions
from bench.harness.server import Reply, Server
from bench.harness.trace import TraceEvent, read_trace, traced

_BUS_VARIABLE, _L3_VARIABLE = "HCACHE_CPU_BUS_FILE", "HCACHE_CPU_L3_FILE"
"""Variables of the CPU engine: files with the bytes per second that copies to the device and reads
of L3 may reach; 0: no limit."""
_SIGNS = tuple(f"hcache: {s}" for s in ("hidden mode", "KV mode", "partition:", "not used:"))


@dataclass(frozen=True)
class Restore:
    """How long a history took to come back.

    Attributes:
        tokens: That came back.
        ms: From the start of the prefetch to the last layer; for recomputation, the prefill.
        l3_ms: From L3 to the host; 0 for recomputation.
        load_ms: From the host to K and V on the device; 0 for recomputation.
    """

    tokens: int
    ms: float
    l3_ms: float = 0.0
    load_ms: float = 0.0


def restored_from_l3(events: Sequence[TraceEvent]) -> Restore | None:
    """The restore that one request's ``events`` show; None when nothing was loaded."""
    reads = [event for event in events if event.stage == "l3"]
    loads = [event for event in events if event.stage == "load"]
    if not reads or not loads:
        return None
    start = min(event.start_ms for event in reads)
    end = max(event.start_ms + event.ms for event in loads)
    return Restore(
        tokens=sum(event.tokens for event in loads),
        ms=end - start,
        l3_ms=sum(event.ms for event in reads),
        load_ms=sum(event.ms for event in loads),
    )


def recomputed(events: Sequence[TraceEvent]) -> Restore | None:
    """The prefill that ``events`` show, chunks added up; None when there was none."""
    prefills = [event for event in events if event.stage == "prefill"]
    if not prefills:
        return None
    return Restore(
        tokens=sum(event.tokens for event in prefills), ms=sum(event.ms for event in prefills)
    )


class Restorer:
    """A server that is up and writes a trace, with log, trace and, on the CPU engine, rates in
    ``folder``."""

    def __init__(self, server: Server, folder: Path, l3: Path) -> None:
        self.server, self.l3 = server, l3
        self._folder = folder
        self._trace, self._offset = folder / "trace.jsonl", 0

    def slow_down(self, bus: float = 0.0, l3: float = 0.0) -> None:
        """Limit copies to the device and reads of L3 to these bytes per second, on the CPU engine
        only; 0: no limit."""
        (self._folder / "bus").write_text(f"{bus}")
        (self._folder / "link").write_text(f"{l3}")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The server runs in the block and is stopped behind it: others have the machine."""
        self.server.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.server.signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """Of all processes of the server."""
        assert self.server.process is not None
        process = psutil.Process(self.server.process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def tokens_from_l3(self) -> int:
        """Prompt tokens that the server has had from L3; it has metrics."""
        said = requests.get(f"{self.server.url}/metrics", timeout=60).text
        counted = r'^sglang:cached_tokens_total\{.*cache_source="storage.*\} (.*)$'
        return sum(int(float(count)) for count in re.findall(counted, said, re.MULTILINE))

    def store(self, history: Sequence[int]) -> None:
        """Have the history computed and written to L3."""
        self.server.generate(history, 1)
        self.server.flush_cache(300)

    def restore(self, history: Sequence[int]) -> Restore:
        """Bring the history back from L3, with the page cache empty, and forget it again.

        Raises:
            ServerError: Not all of it came back.
        """
        found = restored_from_l3(self.ask([*history, 0])[-1])
        if found is None or found.tokens < len(history):
            came = found.tokens if found else 0
            raise self.server.error(f"only {came} of {len(history)} tokens came from L3")
        self.server.flush_cache(300)
        return found

    def recompute(self, history: Sequence[int]) -> Restore:
        """Have the history computed.

        Raises:
            ServerError: The trace shows no prefill.
        """
        found = recomputed(self.ask(history)[-1])
        if found is None:
            raise self.server.error("the trace shows no prefill")
        return found

    def ask(
        self, prompt: Sequence[int], *, cold: bool = True
    ) -> tuple[float, Reply, list[TraceEvent]]:
        """Milliseconds to the first token, reply and trace. ``cold``: L3 is not in the page
        cache."""
        if cold:
            forget_files(self.l3)
        self.skip_trace()
        start = time.perf_counter()
        reply = self.server.generate(prompt, 1)
        return 1e3 * (time.perf_counter() - start), reply, self.events()

    def skip_trace(self) -> None:
        """The next :meth:`events` are those from now on."""
        self._offset = self._trace.stat().st_size if self._trace.exists() else 0

    def events(self) -> list[TraceEvent]:
        """Events since the last look."""
        found, self._offset = read_trace(self._trace, self._offset)
        return found

    def said(self) -> str:
        """Our log lines about how it stores; empty if it is not ours."""
        lines = self.server.log_text().splitlines()
        found = [line.split("hcache: ", 1)[1] for line in lines if any(s in line for s in _SIGNS)]
        return "; ".join(dict.fromkeys(found))


@contextmanager
def restorer(options: ServerOptions, l3: Path) -> Iterator[Restorer]:
    """A server with a trace, and with rates on the CPU engine, for the length of the block."""
    folder = options.log.parent
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict[str, str]()
    if options.device == "cpu":
        rates = {_BUS_VARIABLE: folder / "bus", _L3_VARIABLE: folder / "link"}
        for path in rates.values():
            path.write_text("0")
        environment |= {name: str(path) for name, path in rates.items()}
    served = replace(options, extra_env={**environment, **options.extra_env})
    with Server(traced(served, folder / "trace.jsonl")) as server:
        yield Restorer(server, folder, l3)


@contextmanager
def resting(options: ServerOptions, l3: Path) -> Iterator[Restorer]:
    """Like :func:`restorer`, but the server runs only in its turns: others have the machine."""
    with restorer(options, l3) as restored:
        with restored.turn():
            pass
        try:
            yield restored
        finally:  # a stopped process does not end
            restored.server.signal(signal.SIGCONT)


def l3_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in page_files(folder))


def page_files(folder: Path) -> list[Path]:
    """The files of pages in an L3 folder, ours, SGLang's or NIXL's."""
    return [path for kind in ("*.page", "*.bin", "*_[kv]") for path in folder.rglob(kind)]


def forget_files(folder: Path) -> None:
    """Take the files of an L3 folder out of the kernel's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # a part that is not on disk yet cannot be forgotten
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
