"""The cost of this package on the scheduler thread, without kernels: launches and Python time.

- copies: a backup and a load of pages of several layers, as on a GPU. Launches are those of kernels
  and of torch's operations on the device
- capture: its addition to a decode step without CUDA graphs, of modules with a projection each.
  Time per layer is the slope between 8 and 40 layers, time per step the rest at 0 layers

Times are medians of the thread's processor time: this package's Python and torch's dispatch, on
this CPU. To compare two versions, run both in turn on one machine: only ratios mean anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness.program import Program, Run, Setting, at_least
from bench.harness.report import Results, Row, Table
from hcache_backend.arena import Arena
from hcache_backend.capture import staging
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments
from hcache_backend.restore.layers import MOST_LAUNCHES
from hcache_kernels.codecs import make_codec
from hcache_kernels.launch import Launch

PAGE, HEADS, DIM = 16, 2, 16
WIDTH, PAGES = 16, 64
FEW, MANY = 8, 40
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
        """All layers together: nothing waits for some of them."""
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
        took = [seconds_of(work) for _ in range(WARM_UPS + times)]
        kernels, counted = 0, _Counted()
        with counted:
            work()
    return kernels + counted.seen, 1e6 * median(took[WARM_UPS:])


def seconds_of(work: Callable[[], None]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.qkv(hidden)


class Steps:
    """Decode steps of ``tokens`` requests on a model of ``layers`` layers."""

    def __init__(self, layers: int, tokens: int, *, captured: bool) -> None:
        self._model = [_Attention() for _ in range(layers)]
        self._hidden = torch.zeros(tokens, WIDTH)
        self._where = torch.arange(PAGE, PAGE + tokens)
        self._told = self._where.repeat(3)
        codec = make_codec("none", WIDTH, torch.float32)
        layout = PageLayout(PAGE, (hidden_layer(PAGE, codec.row_bytes, WIDTH),) * layers)
        memory = torch.zeros((PAGES, layout.page_bytes), dtype=torch.uint8)
        arena = Arena(memory.numpy(), layout, 1, PAGES - 1, lambda page: None)
        room = Staging(layers, WIDTH, torch.float32, 4 * tokens, "cpu")
        self._capture = StagedCapture(arena, memory, room, range(layers), codec)
        self._hooks: HiddenCapture | None = None
        if captured:
            self._hooks = HiddenCapture([(layer, [layer.qkv]) for layer in self._model])
            self._hooks.watch_only(layer.qkv for layer in self._model)
            self._hooks.use(self._capture, tokens_only=False, order=None)

    def run(self) -> None:
        where = self._where
        batch = SimpleNamespace(out_cache_loc=where, input_ids=where, positions=where)
        if self._hooks is None:
            self._forward()
        else:
            self._hooks.allocated(where)
            self._hooks.forward(batch, self._forward)

    def tell(self, _tokens: Any, where: torch.Tensor, copied: torch.Tensor, *_: Any) -> None:
        """In the place of the kernel that begins a step and tells the host."""
        where.view(-1).copy_(self._told)
        copied.copy_(self._told)

    def timed(self) -> float:
        """Seconds of a step, without waiting for the copies that it left."""
        took = seconds_of(self.run)
        self._capture.transfers().synchronize()
        return took

    def _forward(self) -> Any:
        for layer in self._model:
            layer(self._hidden)
        return SimpleNamespace(can_run_graph=False)


def added(tokens: int, times: int) -> dict[str, float]:
    """Microseconds that capture adds to a decode step."""
    steps = [Steps(n, tokens, captured=c) for n in (FEW, MANY) for c in (False, True)]
    left_out: dict[str, Any] = {
        "stage_rows": lambda *_: None,
        "save_rows": lambda *_: None,
        "begin_rows": steps[0].tell,
        "judge_rows": lambda marks, step, verdicts: verdicts.fill_(1),
    }
    with patch.multiple(staging, **left_out), torch.inference_mode():
        rounds = [[step.timed() for step in steps] for _ in range(WARM_UPS + times)]
    few, few_captured, many, many_captured = (
        1e6 * median(took) for took in zip(*rounds[WARM_UPS:], strict=True)
    )
    layer = (many_captured - many - few_captured + few) / (MANY - FEW)
    step = few_captured - few - FEW * layer
    return {"layer": layer, "step": step, "32 layers": step + 32 * layer}


def measure(run: Run) -> Results:
    given = run.given
    rows: list[Row] = []
    for codec in ("none", "exp4"):
        copies = Copies(given.layers, given.pages, codec)
        for name in ("backup", "load", "eager"):
            launches, us = count(getattr(copies, name), given.times)
            rows.append({"codec": codec, "copy": name, "launches": launches, "us": us})
    capture = [{"per": per, "us": us} for per, us in added(given.tokens, given.times).items()]
    return {"layers": given.layers, "pages": given.pages, "rows": rows, "capture": capture}


PROGRAM = Program(
    name="launches",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("--layers", at_least(1), 32, "of the model that is copied"),
        Setting("--pages", at_least(1), 64, "of a copy"),
        Setting("--tokens", at_least(1), 8, "of a decode step"),
        Setting("--times", at_least(1), 400, "how often each is timed"),
    ),
    tables=(
        Table("rows", "codec | copy | launches | microseconds = us :,.1f"),
        Table("capture", "capture, per = per | microseconds = us :.1f"),
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
