"""What capture costs the scheduler thread: Python time of a decode step, per step and per layer.

A decode step without CUDA graphs: modules with a projection each, called with and without capture.
Kernels of a step are left out (only what they tell the host is there), so that what is timed is
Python between SGLang's calls, on this CPU. Time per layer is the slope between 8 and 40 layers, per
step what is left at 0 layers; medians. To compare
two versions, run both in turn on one machine: only ratios mean anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from bench.harness.program import Program, Run, Setting, at_least
from bench.harness.report import Results, Table
from hcache_backend.arena import Arena
from hcache_backend.capture import staging
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_kernels.codecs import make_codec

WIDTH, PAGE, PAGES = 16, 16, 64
FEW, MANY = 8, 40
WARM_UPS = 20


class Attention(torch.nn.Module):
    """An attention module that does nothing but project."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.qkv(hidden)


class Steps:
    """Decode steps of ``tokens`` requests on a model of ``layers`` layers, captured or not."""

    def __init__(self, layers: int, tokens: int) -> None:
        self._model = [Attention() for _ in range(layers)]
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

    def watch(self) -> None:
        """Capture from now on."""
        hooks = self._hooks = HiddenCapture([(layer, [layer.qkv]) for layer in self._model])
        hooks.watch_only(layer.qkv for layer in self._model)
        hooks.use(self._capture, tokens_only=False, order=None)

    def run(self) -> None:
        """One step."""
        where = self._where
        batch = SimpleNamespace(out_cache_loc=where, input_ids=where, positions=where)
        if self._hooks is None:
            self._forward()
        else:
            self._hooks.allocated(where)
            self._hooks.forward(batch, self._forward)

    def tell(self, where: torch.Tensor, copied: torch.Tensor) -> None:
        """In the place of the kernel that begins a step."""
        where.view(-1).copy_(self._told)
        copied.copy_(self._told)

    def settled(self) -> None:
        """What the last step left has arrived; not timed."""
        self._capture.transfers().synchronize()

    def _forward(self) -> Any:
        for layer in self._model:
            layer(self._hidden)
        return SimpleNamespace(can_run_graph=False)


def added(tokens: int, count: int) -> tuple[float, float]:
    """What capture adds to a step of ``FEW`` and of ``MANY`` layers: microseconds of this thread's
    processor time, so that other processes disturb little."""
    with torch.inference_mode():
        steps = [Steps(layers, tokens) for layers in (FEW, FEW, MANY, MANY)]
        leave_out_kernels(steps[0])
        steps[1].watch()
        steps[3].watch()
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(WARM_UPS + count):
            for step, of_step in zip(steps, times, strict=True):
                start = time.thread_time()
                step.run()
                of_step.append(time.thread_time() - start)
                step.settled()
    few, few_captured, many, many_captured = (
        1e6 * statistics.median(of_step[WARM_UPS:]) for of_step in times
    )
    return few_captured - few, many_captured - many


def leave_out_kernels(steps: Steps) -> None:
    """Kernels do nothing, but for telling the host what it goes by."""
    nothing: Callable[..., None] = lambda *args: None  # noqa: E731
    tell: Callable[..., None] = lambda tokens, where, copied, *rest: steps.tell(where, copied)  # noqa: E731
    for name in ("stage_rows", "save_rows"):
        setattr(staging, name, nothing)
    setattr(staging, "begin_rows", tell)  # noqa: B010
    setattr(staging, "judge_rows", lambda marks, step, verdicts: verdicts.fill_(1))  # noqa: B010


def measure(run: Run) -> Results:
    """Time per step and layer."""
    few, many = added(run.given.tokens, run.given.steps)
    per_layer = (many - few) / (MANY - FEW)
    times = {"layer": per_layer, "step": few - FEW * per_layer}
    times["32 layers"] = times["step"] + 32 * per_layer
    return {"times": [{"per": per, "us": us} for per, us in times.items()]}


PROGRAM = Program(
    name="step_time",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("--steps", at_least(1), 400, "that are timed"),
        Setting("--tokens", at_least(1), 8, "of a step"),
    ),
    tables={"table": Table("times", "capture, per = per | microseconds = us :.1f")},
)

if __name__ == "__main__":
    PROGRAM.run()
