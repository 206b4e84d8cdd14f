"""What copies of K and V cost the scheduler thread: launches, and Python time around them.

A backup and a load of pages of several layers, as on a GPU, with kernels left out: what is timed is
this package's Python and torch's dispatch, on this CPU; medians of the thread's processor time.
Launches are those of kernels and of torch's operations on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness.program import Program, Run, Setting, at_least
from bench.harness.report import Results, Table
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments
from hcache_backend.restore.parts import MOST_LAUNCHES
from hcache_kernels.launch import Launch

PAGE, HEADS, DIM = 16, 2, 16
WARM_UPS = 20


class _Counted(TorchDispatchMode):
    """Torch's operations that launch a kernel: no views, no memory without values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(result.alias_info is not None for result in func._schema.returns)
        self.seen += not view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


class Copies:
    """K and V of ``layers`` layers in a pool, and ``pages`` pages of them in host memory."""

    def __init__(self, layers: int, pages: int, codec: str) -> None:
        slots = 2 * pages * PAGE
        buffers = [torch.zeros(slots, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2 * layers)]
        pool = SimpleNamespace(k_buffer=buffers[:layers], v_buffer=buffers[layers:])
        self._kv = KVSegments(pool, range(layers), PAGE, WHOLE, 1, codec)
        layout = self._kv.layout([self._kv.stored_layer(n) for n in range(layers)], WHOLE)
        self._offsets = layout.segment_offsets
        self._memory = torch.zeros((pages, layout.page_bytes), dtype=torch.uint8)
        self._pages, self._slots = torch.arange(pages), torch.arange(pages * PAGE)
        most = MOST_LAUNCHES // self._kv.restored_layer(0).launches
        cuts = [layers * n // most for n in range(most + 1)]
        self._groups = [range(a, b) for a, b in pairwise(cuts) if a < b]

    def backup(self) -> None:
        """As on a GPU."""
        self._kv._save_at_once(self._offsets, self._memory, self._pages, self._slots)

    def load(self) -> None:
        """As on a GPU, in the groups of layers of a restore that a forward pass waits for."""
        for group in self._groups:
            self._load(group)

    def eager(self) -> None:
        """All layers together: nobody waits for some of them."""
        self._load(range(len(self._offsets)))

    def _load(self, layers: range) -> None:
        offsets = self._offsets[layers.start : layers.stop]
        self._kv._load_at_once(layers, self._memory, self._pages, offsets, self._slots)


def count(work: Callable[[], None], times: int) -> tuple[int, float]:
    """Launches of ``work``, and microseconds of this thread."""
    kernels = 0

    def left_out(_launch: Launch) -> None:
        nonlocal kernels
        kernels += 1

    with patch.object(Launch, "run", left_out), torch.inference_mode():
        took = []
        for _ in range(WARM_UPS + times):
            start = time.thread_time()
            work()
            took.append(time.thread_time() - start)
        kernels, counted = 0, _Counted()
        with counted:
            work()
    return kernels + counted.seen, 1e6 * statistics.median(took[WARM_UPS:])


def measure(run: Run) -> Results:
    """A row for each codec and copy."""
    rows = []
    for codec in ("none", "exp4"):
        copies = Copies(run.given.layers, run.given.pages, codec)
        for name in ("backup", "load", "eager"):
            launches, microseconds = count(getattr(copies, name), run.given.times)
            rows.append({"codec": codec, "copy": name, "launches": launches, "us": microseconds})
    return {"layers": run.given.layers, "pages": run.given.pages, "rows": rows}


PROGRAM = Program(
    name="launches",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("--layers", at_least(1), 32, "of the model"),
        Setting("--pages", at_least(1), 64, "of a copy"),
        Setting("--times", at_least(1), 300, "how often each is timed"),
    ),
    tables={
        "table": Table(
            "rows",
            "codec | copy | launches | microseconds = us :,.1f",
        )
    },
)

if __name__ == "__main__":
    PROGRAM.run()
