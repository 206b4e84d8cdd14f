"""The slots that a restore's recomputation reads, if streams are late and memory is used again.

Slots of the tokens before a restore are made on one stream (SGLang's schedule stream), read by the
recomputation on another (that of forward passes), and dropped as soon as the restore is launched:

- made late: the first stream is held up, so a reader that does not wait reads the values before
- freed early: the second stream is held up, so a reader that does not keep them reads later values

Each is done by the product's code (host/loads.py and restore/pipeline.py) and without waiting or
keeping. Then the wrong values must show, otherwise the check proves nothing. On a CPU only the
product runs: the caller is the only current stream, and memory is not used again too early.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.gpu.program import Device, GpuProgram, GpuRun, Row
from bench.gpu.shapes import PAGE
from bench.harness.report import Column, Table
from hcache_backend import streams
from hcache_backend.arena import Arena
from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.restore.layers import Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import TokenSpan
from hcache_backend.streams import Stream

BEFORE, RESTORED, WIDTH = 64, 4, 64  # pages before the restore, and of it; bytes per token
LATE = 0.05  # seconds that a stream is held up
JUNK, JUNK_TENSORS = -7, 64

CASES = ("made late", "freed early")
Ask = Callable[[torch.Tensor], Recompute]


def load_queue() -> Any:
    """The class of host/loads.py, without its imports for other work than this."""
    stand_ins: dict[str, dict[str, Any]] = {
        "hcache_backend.metrics": {"timed": lambda stage: lambda work: work},
        "hcache_backend.plan.restore": {"Restore": object},
    }
    for name, content in stand_ins.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(content)
        sys.modules.setdefault(name, stand_in)
    from hcache_backend.host.loads import LoadQueue

    return LoadQueue


class Recorder:
    """Stands for the model: notes which slots it would read and write. See ``Recomputer``."""

    def __init__(self, device: str, forwards: Stream) -> None:
        self.stream = lambda: forwards
        self.before = torch.zeros(BEFORE * PAGE, dtype=torch.int64, device=device)
        self.slots = torch.zeros(RESTORED * PAGE, dtype=torch.int64, device=device)

    def run(self, layers: int, positions: Any, slots: Any, spans: Any) -> None:
        """Keep the slots that recomputation reads when it runs."""
        self.before.copy_(spans[0].prefix)
        self.slots.copy_(slots)


class Scene:
    """Pages whose first layer is recomputed and whose second is loaded."""

    def __init__(self, device: Device) -> None:
        self.device = device
        kind = device.kind
        layout = PageLayout(PAGE, (RECOMPUTED, hidden_layer(PAGE, WIDTH, WIDTH)))
        self.memory = device.pinned(RESTORED + 1, layout.page_bytes)
        self.memory.zero_()
        first = BEFORE * PAGE
        tokens = np.arange(first, first + RESTORED * PAGE).reshape(RESTORED, PAGE)
        layout.positions(self.memory.numpy())[:RESTORED] = tokens
        arena = Arena(self.memory.numpy(), layout, RESTORED, 1, lambda page: None)
        self.pages = np.arange(RESTORED, dtype=np.int64)
        self.physical = arena.physical(self.pages)
        kv = torch.zeros((BEFORE + RESTORED) * PAGE, WIDTH, dtype=torch.uint8, device=kind)

        def fill(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            kv[slots] = segments.view(-1, WIDTH)

        layers = [RestoredLayer("recompute"), RestoredLayer("hidden", fill)]
        self.pipeline = RestorePipeline(self.memory, layout, layers, RESTORED * PAGE, kind)
        forwards = None if device.dry_run else torch.cuda.Stream()
        self._forwards = streams.of(forwards)
        self.recorder = Recorder(kind, self._forwards)
        methods = SimpleNamespace(layers=lambda method: range(1), recomputable=4)
        recomputer: Any = self.recorder
        self.loads = load_queue()(arena, self.pipeline, methods, recomputer, kind)
        self.want_slots = torch.arange(first, first + RESTORED * PAGE, device=kind)
        self._rounds = 0
        self._loading = None if device.dry_run else torch.cuda.Stream()

    def by_product(self, prefix: torch.Tensor) -> Recompute:
        """Recomputation as eager and ordinary loads ask for it."""
        made = self.loads.recompute_of(self.pages, 1, lambda: prefix)
        assert made is not None
        return made

    def by_hand(self, prefix: torch.Tensor) -> Recompute:
        """The same, that does not keep ``prefix``."""

        def fill(positions: npt.NDArray[np.int64], slots: torch.Tensor) -> None:
            nothing = np.empty(0, np.int64)
            self.recorder.run(1, positions, slots, [TokenSpan(nothing, prefix)])

        return Recompute(1, fill, self._forwards)

    def is_right(self, case: str, recompute_of: Ask, *, loads_wait: bool = True) -> bool:
        """Recomputation read the right slots. ``loads_wait``: as HiCache's stream of loads does for
        work that was launched before a load."""
        for seen in (self.recorder.before, self.recorder.slots):
            seen.zero_()
        self._rounds += 1  # values of the round before are wrong in this one
        want = torch.arange(BEFORE * PAGE, device=self.device.kind) + self._rounds
        slots, parts = self.want_slots.clone(), want.split(BEFORE * PAGE // 2)
        junk = self._junk(JUNK_TENSORS)
        self.device.synchronize()
        del junk  # the next tensors take its memory
        if case == "made late":
            self.device.spin(LATE)
        prefix = torch.cat(parts)
        recompute = recompute_of(prefix)
        with self._on_loading_stream(waits=loads_wait):
            if case == "freed early":
                self.device.spin(LATE)
            restore = self.pipeline.start(self.physical, slots, recompute)
        del prefix, slots, recompute
        self._junk(2 * JUNK_TENSORS)  # takes their memory, unless they are kept
        restore.wait()
        self.device.synchronize()
        right = torch.equal(self.recorder.before, want)
        return right and torch.equal(self.recorder.slots, self.want_slots)

    def _junk(self, count: int) -> list[torch.Tensor]:
        kinds = {"dtype": torch.int64, "device": self.device.kind}
        sizes = (BEFORE * PAGE, RESTORED * PAGE)
        return [torch.full((n,), JUNK, **kinds) for n in sizes for _ in range(count)]

    @contextmanager
    def _on_loading_stream(self, *, waits: bool) -> Iterator[None]:
        if self._loading is None:
            yield
        else:
            if waits:
                self._loading.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._loading):
                yield


def measure(run: GpuRun) -> None:
    device, scene = run.device, Scene(run.device)
    for case in CASES:
        row = {"case": case, "by": "the product", "right": scene.is_right(case, scene.by_product)}
        run.add(row, f"{case}, by the product")
        row = {"case": case, "by": "without " + ("wait" if case == "made late" else "keep")}
        if device.dry_run:
            row["skipped"] = "a CPU has one current stream, and reuses no memory that is needed"
        else:
            wrong = not scene.is_right(case, scene.by_hand, loads_wait=case != "made late")
            row |= {"wrong": wrong, "right": wrong}
        run.add(row, f"{case}, {row['by']}")
    device.release()


def read(row: Row) -> str:
    right = row.get("right") and not row.get("wrong")
    return row.get("skipped") or f"{'right' if right else 'wrong'} slots were read"


PROGRAM = GpuProgram(
    name="order",
    doc=__doc__,
    measure=measure,
    tables=Table("rows", ("slots = case | by", Column("", read))),
)

if __name__ == "__main__":
    PROGRAM.run()
