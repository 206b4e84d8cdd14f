"""Decode steps and prefill, with hidden states saved in different ways."""

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.program import Device
from bench.gpu.restore_methods import History
from bench.gpu.restore_models import Layer
from bench.gpu.shapes import PAGE, Shape
from hcache_backend.arena import Arena
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_kernels.codecs import make_codec

CONTEXT = 1024
CACHE_TOKENS = 1 << 16  # shared by all layers of decode steps; large batches see less context
STEPS = 50
RESTORED = 4096


class Saving:
    """Shadow pages, and how rows come to them."""

    def __init__(self, device: Device, shape: Shape, tokens: int, capacity: int) -> None:
        self.device, self.shape, self.tokens = device, shape, tokens
        self.codec = make_codec("none", shape.hidden, device.dtype)
        stored = hidden_layer(PAGE, self.codec.row_bytes, shape.hidden)
        layout = PageLayout(PAGE, (stored,) * shape.layers)
        pages = -(-tokens // PAGE) + 1  # slot 0 belongs to the padding page
        self.memory = device.pinned(pages + 1, layout.page_bytes)
        self.memory.fill_(0xEE)
        self.arena = Arena(self.memory.numpy(), layout, 1, pages, lambda page: None)
        self.staging = Staging(shape.layers, shape.hidden, device.dtype, capacity, device.kind)
        self.capture = StagedCapture(
            self.arena, self.memory, self.staging, range(shape.layers), self.codec
        )
        self.slots = torch.randperm((pages - 1) * PAGE, device=device.kind)[:tokens] + PAGE
        self.positions = torch.arange(tokens, device=device.kind)

    def watch(self, way: str, layer: int) -> Callable[[torch.Tensor], None]:
        if way == "staged":
            return lambda hidden: self.capture.take(layer, hidden)
        return lambda hidden: None

    def saved(self, hidden: torch.Tensor) -> bool:
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

    def run(self, way: str) -> tuple[float, bool | None]:
        """Milliseconds of a pass, and whether the last one's rows were saved; None: none are."""
        saving = Saving(self.device, self.shape, self.tokens, self._capacity)

        def captured(launch: Callable[[], object], *, replayed: bool) -> None:
            saving.capture.ledger.pass_begins()
            step = saving.capture.begin(saving.slots, saving.positions, saving.positions)
            launch()
            assert step is not None
            assert saving.capture.end(step, replayed=replayed)

        def watch(layer: int) -> Callable[[torch.Tensor], None]:
            return saving.watch(way, layer)

        if way == "staged":  # kernels must not be compiled while the graph is recorded
            captured(lambda: self.forward(watch), replayed=False)
        launch = self.launcher(watch)

        def passes() -> None:
            for _ in range(self.steps):
                if way == "staged":
                    captured(launch, replayed=self.recorded)
                else:
                    launch()

        took = self.device.milliseconds(passes) / self.steps
        right = None if way == "none" else saving.saved(self._inputs())
        self.device.release()
        return took, right

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


def decode_during_restores(
    device: Device, shape: Shape, layers: list[Layer], batch: int
) -> tuple[float, float, bool]:
    """Milliseconds of a decode step alone and beside restores, and whether those were right."""
    history = History(device, shape, layers, [2 * PAGE if device.dry_run else RESTORED])
    step = decode(device, shape, layers, batch)
    launch = step.launcher(lambda layer: lambda hidden: None)
    pipeline = history.hidden_pipeline()

    def steps() -> None:
        for _ in range(step.steps):
            launch()

    def steps_beside_restores() -> None:
        restore = pipeline.start(history.pages, history.slots)
        for _ in range(step.steps):
            launch()
            if restore.done():
                restore = pipeline.start(history.pages, history.slots)

    history.poison()
    alone = device.milliseconds(steps) / step.steps
    during = device.milliseconds(steps_beside_restores) / step.steps
    device.synchronize()
    if device.dry_run:
        pipeline.start(history.pages, history.slots).layers[-1].synchronize()
    right = history.is_right()
    device.release()
    return alone, during, right
