"""How long GPU work takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UPS = 3
FLUSH_BYTES = 256 << 20
"""More than any GPU's L2 cache holds."""
HEAD_START_CYCLES = 500_000
"""The GPU waits for about so long before the work, so that all launches are queued by then."""


def gpu_microseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of ``work`` on the current CUDA device, each with a cold L2 cache."""
    for _ in range(WARM_UPS):
        work()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    spans = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        span[0].record()
        work()
        span[1].record()
        spans.append(span)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in spans)
