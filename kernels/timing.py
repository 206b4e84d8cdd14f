"""How long GPU work takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UPS = 3
FLUSH_BYTES = 256 << 20
"""More than any GPU's L2 cache holds."""


def gpu_microseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of ``work`` on the current CUDA device, each with a cold L2 cache."""
    for _ in range(WARM_UPS):
        work()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    spans = []
    for _ in range(repeats):
        # The flush also keeps the GPU busy while the work is being queued.
        flush.zero_()
        span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        span[0].record()
        work()
        span[1].record()
        spans.append(span)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in spans)
