"""Programs for a GPU: rows that are in the file from the moment they are measured; the device.

Each prints its tables and writes ``out/DEVICE/NAME.json``, row by row, and a picture if matplotlib
is installed.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import Shape
from bench.harness.program import Program, Run, Setting
from bench.harness.report import OUT, Results, write, write_json

Row = dict[str, Any]


def models(shapes: Sequence[Shape], default: Sequence[str] | None = None) -> Setting:
    """Setting ``--models``; its default: all of them."""
    names = [shape.name for shape in shapes]
    more = {"nargs": "*", "choices": names}
    return Setting("--models", str, default or names, "whose shapes", more)


class GpuRun(Run):
    """One run of a program for a GPU: ``rows`` by kind, and the ``folder`` of its files; None: a
    dry run without ``--out`` writes nothing."""

    def __init__(
        self, name: str, given: Namespace, parser: ArgumentParser, *, served: bool = False
    ) -> None:
        super().__init__(given, parser)
        self._name, self._served = name, served
        self.rows: dict[str, list[Row]] = {}

    @cached_property
    def device(self) -> Device:
        return Device(self.given.dry_run)

    @property
    def device_name(self) -> str:
        return self.machine.name if self._served else self.device.name

    @property
    def folder(self) -> Path | None:
        if self.given.out or self.given.dry_run:
            return None if self.given.out is None else Path(self.given.out)
        return folder_of(self.device_name)

    @property
    def content(self) -> Results:
        about = {"device": self.device_name, "torch": torch.__version__}
        return {**about, "dry_run": self.given.dry_run, **self.rows}

    def add(self, row: Row, said: str, kind: str = "rows") -> None:
        """Keep a row of a ``kind``, and write the file; print ``said``."""
        self.rows.setdefault(kind, []).append(row)
        if self.folder is not None:
            write_json(self.folder / f"{self._name}.json", self.content)
        print(f"{said}: measured", flush=True)

    @property
    def right(self) -> bool:
        """No result was wrong. A row whose ``right`` is None has none to check."""
        every = (row for rows in self.rows.values() for row in rows)
        checked = (row for row in every if not row.get("skipped") and row["right"] is not None)
        return all(row["right"] for row in checked)


@dataclass(frozen=True, kw_only=True)
class GpuProgram(Program):
    """A program for a GPU: its ``measure`` adds rows to the run.

    Attributes:
        interpreted: A dry run interprets the kernels that ``measure`` imports.
        served: Servers are asked: the device is theirs, and ``file`` is given the options.
    """

    interpreted: bool = False
    served: bool = False
    package = "bench.gpu"

    def parser(self) -> ArgumentParser:
        made = super().parser()
        made.add_argument(
            "--dry-run",
            action="store_true",
            help="tiny, on the CPU, where times mean nothing; writes only to the folder of --out",
        )
        return made

    def _add_out(self, parsed: ArgumentParser) -> None:
        parsed.add_argument("--out", type=Path, help="folder of results; default: out/DEVICE")

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the program; exit status 1: a result was wrong."""
        parser = self.parser()
        given = parser.parse_args(arguments)
        name = self.file(vars(given)) if self.file else self.name
        run = GpuRun(name, given, parser, served=self.served)
        if not self.served:
            require_device(parser, dry_run=given.dry_run)
        if self.interpreted and run.given.dry_run:
            interpret()
        with torch.inference_mode():
            self.measure(run)
        print(*self.said(run.content), self.table(run.content), sep="\n")
        if run.folder is not None and self.draw is not None:
            write(run.folder, self.name, run.content, self.draw)
        return int(not run.right)


def require_device(parsed: ArgumentParser, *, dry_run: bool) -> None:
    """End a program that has no GPU, except for a dry run."""
    if not dry_run and not torch.cuda.is_available():
        parsed.error("no CUDA device; --dry-run does without")


def device_name(*, dry_run: bool) -> str:
    return "cpu" if dry_run else torch.cuda.get_device_name()


def folder_of(device: str) -> Path:
    return Path(os.environ.get("OUT", OUT)) / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class Device:
    """A GPU, or the CPU in a dry run, whose times mean nothing.

    ``dtype`` is that of layers and hidden states, ``scaled_dtype`` that of values that kernels
    round.
    """

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.name = device_name(dry_run=dry_run)
        self.kind = "cpu" if dry_run else "cuda"
        # The CPU's flash attention has no float16; Triton's interpreter miscalculates bfloat16.
        self.dtype = torch.bfloat16
        self.scaled_dtype = torch.float16 if dry_run else torch.bfloat16
        self._cycles_per_second = 0.0
        self._pinned = ExitStack()
        if not dry_run:
            cycles = 20_000_000
            took = self.milliseconds(lambda: torch.cuda._sleep(cycles))
            self._cycles_per_second = 1e3 * cycles / took

    def milliseconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Median time of ``work`` on the current stream, everything it waits for included."""
        if self.dry_run:
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start)
        work()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def synchronize(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize()

    def microseconds(self, work: Callable[[], object]) -> float:
        """Median time of ``work`` on the current stream, with a cold L2 cache."""
        if self.dry_run:
            return 1e3 * self.milliseconds(work)
        from hcache_kernels.launch import gpu_microseconds

        return gpu_microseconds(work)

    def pinned(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Host memory that the device reads, until :meth:`release`.

        Registered by hand: torch's own pinned memory is rounded up to powers of two and kept.
        """
        memory = torch.empty(shape, dtype=dtype)
        self._pinned.enter_context(registered(memory, self.kind))
        return memory

    def release(self) -> None:
        """Give all of :meth:`pinned` back."""
        self._pinned.close()

    def copy_rate(self) -> float:
        """Bytes a second of one large copy from pinned memory: the bus."""
        size = (1 << 20) if self.dry_run else (1 << 30)
        source, target = self.pinned(size), torch.empty(size, dtype=torch.uint8, device=self.kind)
        took = self.milliseconds(lambda: target.copy_(source, non_blocking=True))
        self.release()
        return 1e3 * size / took

    def gemm_rate(self, n: int, inner: int, outer: int) -> float:
        """FLOP per second of a product ``[n, inner] x [inner, outer]``."""
        a = torch.randn(n, inner, device=self.kind, dtype=self.dtype)
        b = torch.randn(outer, inner, device=self.kind, dtype=self.dtype)
        out = torch.empty(n, outer, device=self.kind, dtype=self.dtype)
        took = self.milliseconds(lambda: torch.mm(a, b.t(), out=out), repeats=20)
        return 2e3 * n * inner * outer / took

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy, as a slower bus would."""
        if self.dry_run or seconds <= 0:
            return
        torch.cuda._sleep(int(seconds * self._cycles_per_second))


def interpret() -> None:
    """Have kernels interpreted that are defined from now on."""
    os.environ["TRITON_INTERPRET"] = "1"
    mend_scalars()


def mend_scalars() -> None:
    """Let loops count to arguments of a kernel, which are arrays with one value.

    Triton 3.6 turns them into integers as NumPy 2.4 no longer does; from 3.7 on it is mended.
    """
    from triton.runtime import interpreter

    shipped = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


@contextmanager
def registered(memory: torch.Tensor, device: torch.device | str) -> Iterator[None]:
    """Within the block ``device`` reaches ``memory``. Torch does not keep it afterwards, unlike
    unused memory of :func:`streams.host_tensor`."""
    if torch.device(device).type != "cuda":
        yield
        return
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    failed = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if failed:
        with suppress(RuntimeError):  # otherwise torch raises it at its next launch
            torch.zeros(1, device=device)
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: CUDA error {failed}")
    try:
        yield
    finally:
        torch.cuda.synchronize(device)  # copies may still be under way
        runtime.cudaHostUnregister(address)
