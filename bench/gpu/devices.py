"""What the benchmarks of restore and capture ask of the device, and how they keep results.

As a program it prints the folder for the GPU's results; exit status 1: there is no GPU.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


class Device:
    """A GPU, or the CPU in a dry run, where no time means anything."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.name = "cpu" if dry_run else torch.cuda.get_device_name()
        self.kind = "cpu" if dry_run else "cuda"
        # The CPU's flash attention has no float16.
        self.dtype = torch.bfloat16
        self._cycles_per_second = 0.0
        self._registered: list[torch.Tensor] = []
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

    def pinned(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Host memory that the device reads, until :meth:`release`.

        Registered by hand: torch's own pinned memory is rounded up to powers of two and kept.
        """
        memory = torch.empty(shape, dtype=dtype)
        if not self.dry_run:
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            self._registered.append(memory)
        return memory

    def release(self) -> None:
        """Give back what :meth:`pinned` gave; nobody may use it any more."""
        if self._registered:
            torch.cuda.synchronize()
        for memory in self._registered:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
        self._registered.clear()

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

    def write(self, name: str, content: dict[str, Any], folder: Path | None) -> Path | None:
        """Keep results as ``bench/results/DEVICE/NAME.json``; a dry run only where it is told.

        Returns:
            The folder, or None when nothing was kept.
        """
        if folder is None and not self.dry_run:
            folder = results_folder(self.name)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            head = {"device": self.name, "torch": torch.__version__, "dry_run": self.dry_run}
            (folder / f"{name}.json").write_text(json.dumps({**head, **content}, indent=1))
        return folder


def results_folder(device: str) -> Path:
    """Where results of the device of this name are kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return ROOT / "bench" / "results" / slug


def at_least(goal: str, bound: float, values: list[tuple[float, str]]) -> dict[str, Any]:
    """A goal that every value must reach; None when there is no value to tell."""
    if not values:
        return {"goal": goal, "met": None, "worst": None}
    worst = min(values)
    return {"goal": goal, "met": worst[0] >= bound, "worst": {"value": worst[0], "of": worst[1]}}


def print_goals(goals: list[dict[str, Any]]) -> None:
    """One line a goal."""
    words = {True: "met", False: "NOT MET", None: "not measured"}
    print("\ngoals")
    for goal in goals:
        worst = goal["worst"]
        detail = "" if worst is None else f" (worst: {worst['value']:.3f}, {worst['of']})"
        print(f"{words[goal['met']]:12} {goal['goal']}{detail}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(1)
    print(results_folder(torch.cuda.get_device_name()))
