"""The time that capture adds to decode steps and to prefill. Needs only torch and triton.

Layers of Llama-2-7B's shape with random weights attend to 1024 tokens per request. They have no
embedding and LM head, so shares are of a little less than the real step.

Each step runs alone, and with capture as a server does it: one copy kernel per layer, recorded in
the graph, and one transfer to the shadow pages per step, on its own stream. Decode steps replay a
CUDA graph; prefill of 8192 tokens runs eagerly, and prefill of 2048 also replays a graph, so all
its rows wait in staging at once. Afterwards the shadow pages are compared with the inputs of the
last step's projections.
"""

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.program import Device, GpuProgram, GpuRun, models
from bench.gpu.restore_models import SHAPES, Layer, build, chosen
from bench.gpu.shapes import PAGE, Shape
from bench.harness.program import Setting
from bench.harness.report import Picture, Series, Table, by
from hcache_backend.arena import Arena
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_kernels.codecs import make_codec

BATCHES = (1, 16, 64, 256)
PREFILL, GRAPH_PREFILL = 8192, 2048
CONTEXT = 1024
CACHE_TOKENS = 1 << 16  # shared by all layers of decode steps; large batches see less context
STEPS = 50


class Saving:
    """Shadow pages, and how rows come to them."""

    def __init__(self, device: Device, shape: Shape, tokens: int, capacity: int) -> None:
        codec = make_codec("none", shape.hidden, device.dtype)
        stored = hidden_layer(PAGE, codec.row_bytes, shape.hidden)
        layout = PageLayout(PAGE, (stored,) * shape.layers)
        pages = -(-tokens // PAGE) + 1  # slot 0 belongs to the padding page
        self.memory = device.pinned(pages + 1, layout.page_bytes)
        self.memory.fill_(0xEE)
        self.arena = Arena(self.memory.numpy(), layout, 1, pages)
        self.staging = Staging(shape.layers, shape.hidden, device.dtype, capacity, device.kind)
        self.capture = StagedCapture(
            self.arena, self.memory, self.staging, range(shape.layers), codec
        )
        self.slots = torch.randperm((pages - 1) * PAGE, device=device.kind)[:tokens] + PAGE
        self.positions = torch.arange(tokens, device=device.kind)

    def watch(self, layer: int) -> Callable[[torch.Tensor], None]:
        return lambda hidden: self.capture.take(layer, hidden)

    def step(self, launch: Callable[[], object], *, replayed: bool) -> None:
        """One forward pass, whose rows are saved."""
        self.capture.ledger.pass_begins()
        step = self.capture.begin(self.slots, self.positions, self.positions)
        launch()
        assert step is not None
        assert self.capture.end(step, replayed=replayed)

    def has(self, hidden: torch.Tensor) -> bool:
        """The pages hold ``hidden``, ``[layers, tokens, hidden]``."""
        self.capture.transfers().synchronize()
        slots = self.slots.cpu().numpy()
        pages = self.arena.memory[self.arena.shadows[slots // PAGE]]
        for layer, rows in enumerate(hidden.cpu()):
            segment = pages[:, self.arena.layout.segment(layer)]
            stored = segment.reshape(len(slots), PAGE, -1)[np.arange(len(slots)), slots % PAGE]
            if not torch.equal(torch.from_numpy(stored), rows.view(torch.uint8)):
                return False
        return True


Watch = Callable[[int], Callable[[torch.Tensor], object]]  # called with inputs of projections


class Forward:
    """A forward pass of random layers over ``tokens`` tokens.

    Args:
        layer: Computes the output of a layer of this number, of its input and its watcher.
        capacity: Rows that staging holds of each layer.
        steps: How many passes one measurement launches.
        recorded: Launched by the replay of a CUDA graph; a CPU records none.
    """

    def __init__(
        self,
        device: Device,
        shape: Shape,
        tokens: int,
        layer: Callable[[int, torch.Tensor, Callable[[torch.Tensor], object]], torch.Tensor],
        *,
        capacity: int,
        steps: int,
        recorded: bool,
    ) -> None:
        self.device, self.shape, self.tokens = device, shape, tokens
        self._layer, self._capacity = layer, capacity
        self.steps = 2 if device.dry_run else steps
        self.recorded = recorded and not device.dry_run
        self.x = torch.randn(tokens, shape.hidden, device=device.kind, dtype=device.dtype)

    def forward(self, watch: Watch) -> None:
        x = self.x
        for number in range(self.shape.layers):
            x = self._layer(number, x, watch(number))

    def launcher(self, watch: Watch) -> Callable[[], object]:
        if not self.recorded:
            return lambda: self.forward(watch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.forward(watch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward(watch)
        return graph.replay

    def alone(self) -> float:
        """Milliseconds of a pass."""
        launch = self.launcher(lambda layer: lambda hidden: None)
        return self._milliseconds(launch)

    def saved(self) -> tuple[float, bool]:
        """Milliseconds of a pass whose rows are saved, and whether the last one's were."""
        saving = Saving(self.device, self.shape, self.tokens, self._capacity)
        # Kernels must not be compiled while the graph is recorded.
        saving.step(lambda: self.forward(saving.watch), replayed=False)
        launch = self.launcher(saving.watch)
        took = self._milliseconds(lambda: saving.step(launch, replayed=self.recorded))
        right = saving.has(self._inputs())
        self.device.release()
        return took, right

    def _milliseconds(self, step: Callable[[], object]) -> float:
        def steps() -> None:
            for _ in range(self.steps):
                step()

        return self.device.milliseconds(steps) / self.steps

    def _inputs(self) -> torch.Tensor:
        """The input of every projection in a pass, ``[layers, tokens, hidden]``."""
        seen = self.x.new_empty(self.shape.layers, *self.x.shape)
        # Launched as the others are: a library may sum in another order without a graph.
        self.launcher(lambda layer: seen[layer].copy_)()
        return seen


def decode(device: Device, shape: Shape, layers: list[Layer], batch: int) -> Forward:
    """Decode steps of a batch of requests; on a GPU replays of one graph."""
    context = min(CONTEXT, CACHE_TOKENS // batch)
    size = (2, batch, shape.heads, 8 if device.dry_run else context, shape.head_dim)
    cache = torch.randn(size, device=device.kind, dtype=device.dtype)
    at = torch.full((batch,), context, device=device.kind)
    return Forward(
        *(device, shape, batch, lambda n, x, watch: layers[n].decode(x, at, cache, watch)),
        capacity=2 * batch,  # two steps, as in the server
        steps=STEPS,
        recorded=True,
    )


def prefill(
    device: Device, shape: Shape, layers: list[Layer], tokens: int, *, graph: bool = False
) -> Forward:
    """Prefill of one prompt in one chunk."""
    at = torch.arange(tokens, device=device.kind)
    return Forward(
        *(device, shape, tokens, lambda n, x, watch: layers[n].forward(x, at, [tokens], watch)[0]),
        # A graph's rows are all staged; an eager pass goes through staging layer by layer.
        capacity=tokens if graph else max(512, -(-2 * tokens // shape.layers)),
        steps=1,
        recorded=graph,
    )


def measure(run: GpuRun) -> None:
    device = run.device
    eager, recorded = (48, 32) if device.dry_run else (PREFILL, GRAPH_PREFILL)
    batches = [2, 3] if device.dry_run else run.given.batches
    for shape in chosen(run.given.models, dry_run=device.dry_run):
        made = (device, shape, build(shape, device.kind, device.dtype))
        steps = {("decode", batch): decode(*made, batch) for batch in batches}
        steps["prefill graph", recorded] = prefill(*made, recorded, graph=True)
        steps["prefill", eager] = prefill(*made, eager)
        for (step, tokens), forward in steps.items():
            alone, (saved, right) = forward.alone(), forward.saved()
            row = {"model": shape.name, "step": step, "tokens": tokens}
            row |= {"name": f"{step}, {tokens}", "alone_ms": alone, "ms": saved}
            row |= {"adds": 100 * (saved / alone - 1), "right": right}
            run.add(row, f"{shape.name}, {step} of {tokens}")


PROGRAM = GpuProgram(
    name="capture",
    doc=__doc__,
    measure=measure,
    settings=(
        models(SHAPES, ["Llama-2-7B"]),
        Setting("--batches", int, BATCHES, "decode batches", {"nargs": "*"}),
    ),
    tables=Table(
        "rows",
        "model | step | tokens | alone, ms = alone_ms | saved = ms | adds, % = adds | right",
    ),
    draw=Picture(
        title=lambda results: f"What saving adds to steps on {results['device']}",
        panels=by("model", lambda results: results["rows"]),
        x="name",
        x_label="step, tokens",
        y_label="added to the step, %",
        series=(Series("saving", "adds", "ours"),),
        bars="%.1f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
