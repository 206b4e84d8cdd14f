"""What the programs ask of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


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

    def milliseconds(
        self, work: Callable[[], object], repeats: int = 5, head_start: float = 0.0
    ) -> float:
        """Median time of ``work`` on the current stream, everything it waits for included.

        Args:
            work: What to do.
            repeats: How often.
            head_start: Seconds that the stream is busy before, so that its launches are queued.
        """
        if self.dry_run:
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start)
        work()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.spin(head_start)
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
