"""A kernel launch as a value, so that what tests compile ahead of time is what runs; its time."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

COPY_PROGRAMS = 16
"""Programs of a copy over the bus. With 16 KiB each on their way they fill a bus of 64 GB/s whose
latency is 4 microseconds; more would wait on multiprocessors that matrix products want."""

FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache holds
HEAD_START_CYCLES = 500_000  # the GPU waits for them, so that all launches are queued by then


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete; ``arguments`` have the compile-time ones, too."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """How Triton compiles the kernel."""
        # Fused, a product that project_kv rounds would be added before it is rounded; torch rounds
        # it. Of all kernels, because none loses: tl.dot keeps its fma, the others have none.
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}

    def run(self) -> None:
        """Launch it on the current stream; a grid without programs is left alone."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.options)


@lru_cache
def copy_programs(device: torch.device) -> int:
    """Programs of a copy: :data:`COPY_PROGRAMS`, at most a quarter of a GPU's multiprocessors."""
    if device.type != "cuda":
        return COPY_PROGRAMS
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(COPY_PROGRAMS, processors // 4))


def alignment(*sizes: int) -> int:
    """The largest of 16, 8, 4, 2 and 1 of which every one of ``sizes`` is a multiple."""
    return math.gcd(16, *sizes)


def block_launch(
    kernel: Any, grid: tuple[int, ...], block: int, warp_values: int, **arguments: Any
) -> Launch:
    """The launch of a kernel that moves ``BLOCK`` values at a time, ``warp_values`` in a warp."""
    warps = max(1, min(4, block // warp_values))
    return Launch(kernel, grid, {**arguments, "BLOCK": block}, warps, stages=1)


def gpu_microseconds(work: Callable[[], object]) -> float:
    """Median time of ``work`` on the current CUDA device, each with a cold L2 cache."""
    for _ in range(3):  # to warm up
        work()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    spans = []
    for _ in range(20):
        flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        span[0].record()
        work()
        span[1].record()
        spans.append(span)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in spans)
