"""Decode steps and prefill, with hidden states saved in different ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.devices import Device
from bench.gpu.restore_methods import PAGE, History
from bench.gpu.restore_models import Layer, Shape
from hcache_backend.capture.arena import Arena
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.page import PageLayout
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_kernels.codecs import make_codec
from hcache_kernels.staging import save_rows

CONTEXT = 1024
CACHE_TOKENS = 1 << 16
"""K and V that decode steps attend to are shared by all layers; large batches see less context."""
STEPS = 50
RESTORED = 4096


class Saving:
    """Shadow pages, and the ways to bring rows to them."""

    def __init__(self, device: Device, shape: Shape, tokens: int) -> None:
        self.device, self.shape, self.tokens = device, shape, tokens
        self.codec = make_codec("none", shape.hidden, device.dtype)
        layout = PageLayout(PAGE, (PAGE * self.codec.row_bytes,) * shape.layers)
        pages = -(-tokens // PAGE) + 1  # slot 0 belongs to the padding page
        self.memory = device.pinned(pages + 1, layout.page_bytes)
        self.memory.fill_(0xEE)
        self.arena = Arena(self.memory.numpy(), layout, 1, pages, lambda page: None)
        # Two decode steps fit, as in the server; a prefill goes layer by layer.
        places = max(2 * min(tokens, 256), -(-2 * tokens // shape.layers))
        self.staging = Staging(shape.layers, self.codec, places, device.kind)
        self.capture = StagedCapture(self.arena, self.memory, self.staging, range(shape.layers))
        self.slots = torch.randperm((pages - 1) * PAGE, device=device.kind)[:tokens] + PAGE
        self.positions = torch.arange(tokens, device=device.kind)
        self._shadows = torch.from_numpy(self.arena.shadows).to(device.kind)
        offsets = torch.tensor(layout.segment_offsets, device=device.kind)
        self._segments = [offsets[i : i + 1] for i in range(shape.layers)]

    def watch(self, way: str, layer: int) -> Callable[[torch.Tensor], None]:
        """What sees the input of the layer's projection."""
        if way == "staged":
            return lambda hidden: self.capture.take(layer, hidden)
        if way == "direct":
            return lambda hidden: save_rows(
                hidden.view(torch.uint8)[None],
                self.slots,
                self._shadows,
                self.memory,
                self._segments[layer],
                PAGE,
            )
        return lambda hidden: None

    def saved(self, hidden: torch.Tensor) -> bool:
        """Whether the pages hold ``hidden``, ``[layers, tokens, hidden]``."""
        self.capture.transfers().synchronize()
        slots = self.slots.cpu().numpy()
        pages = self.arena.memory[self.arena.shadows[slots // PAGE]]
        for layer, rows in enumerate(hidden.cpu()):
            segment = pages[:, self.arena.layout.segment(layer)]
            stored = segment.reshape(len(slots), PAGE, -1)[np.arange(len(slots)), slots % PAGE]
            if not torch.equal(torch.from_numpy(stored), rows.view(torch.uint8)):
                return False
        return True


class Decode:
    """Decode steps of a batch of requests; on a GPU replays of one graph."""

    def __init__(self, device: Device, shape: Shape, layers: list[Layer], batch: int) -> None:
        self.device, self.shape, self.layers, self.batch = device, shape, layers, batch
        context = min(CONTEXT, CACHE_TOKENS // batch)
        kind, dtype = device.kind, device.dtype
        size = (2, batch, shape.heads, 8 if device.dry_run else context, shape.head_dim)
        self.cache = torch.randn(size, device=kind, dtype=dtype)
        self.x = torch.randn(batch, shape.hidden, device=kind, dtype=dtype)
        self.positions = torch.full((batch,), context, device=kind)
        self.seen = torch.empty(shape.layers, batch, shape.hidden, device=kind, dtype=dtype)

    def step(self, watch: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        """All layers."""
        x = self.x
        for i, layer in enumerate(self.layers):
            x = layer.decode(x, self.positions, self.cache, watch(i))

    def launcher(
        self, watch: Callable[[int], Callable[[torch.Tensor], None]]
    ) -> Callable[[], object]:
        """What launches a step: the replay of a graph that was recorded with ``watch``."""
        if self.device.dry_run:
            return lambda: self.step(watch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(watch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(watch)
        return graph.replay

    def run(self, way: str) -> tuple[float, bool]:
        """Milliseconds a step, and whether the last step's rows were saved."""
        saving = Saving(self.device, self.shape, self.batch)
        if way == "staged":  # kernels must not be compiled while the graph is recorded
            step = saving.capture.begin(saving.slots, saving.positions, saving.positions)
            assert step is not None
            self.step(lambda layer: saving.watch(way, layer))
            assert saving.capture.end(step, replayed=False)
        launch = self.launcher(lambda layer: saving.watch(way, layer))
        replayed = not self.device.dry_run

        def steps() -> None:
            for _ in range(STEPS):
                if way != "staged":
                    launch()
                    continue
                step = saving.capture.begin(saving.slots, saving.positions, saving.positions)
                launch()
                assert step is not None
                assert saving.capture.end(step, replayed=replayed)

        took = self.device.milliseconds(steps) / STEPS
        right = way == "none" or saving.saved(self._inputs())
        self.device.release()
        return took, right

    def _inputs(self) -> torch.Tensor:
        """What every projection receives in a step."""

        def note(layer: int) -> Callable[[torch.Tensor], None]:
            def copy(hidden: torch.Tensor) -> None:
                self.seen[layer].copy_(hidden)

            return copy

        # Through a graph of its own: a library may sum in another order than in the eager step.
        self.launcher(note)()
        return self.seen


class Prefill:
    """Prefill of one prompt in one chunk, eager."""

    def __init__(self, device: Device, shape: Shape, layers: list[Layer], tokens: int) -> None:
        self.device, self.shape, self.layers, self.tokens = device, shape, layers, tokens
        self.x = torch.randn(tokens, shape.hidden, device=device.kind, dtype=device.dtype)
        self.positions = torch.arange(tokens, device=device.kind)

    def forward(self, watch: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        """All layers."""
        x = self.x
        for i, layer in enumerate(self.layers):
            x, _, _ = layer.forward(x, self.positions, [self.tokens], watch(i))

    def run(self, way: str) -> tuple[float, bool]:
        """Milliseconds, and whether the rows were saved."""
        saving = Saving(self.device, self.shape, self.tokens)

        def prefill() -> None:
            step = None
            if way == "staged":
                step = saving.capture.begin(saving.slots, saving.positions, saving.positions)
            self.forward(lambda layer: saving.watch(way, layer))
            if step is not None:
                assert saving.capture.end(step, replayed=False)

        took = self.device.milliseconds(prefill)
        seen: list[torch.Tensor] = []
        self.forward(lambda layer: lambda hidden: seen.append(hidden.cpu()))
        right = way == "none" or saving.saved(torch.stack(seen))
        self.device.release()
        return took, right


def decode_during_restores(
    device: Device, shape: Shape, layers: list[Layer], batch: int
) -> tuple[float, float, bool]:
    """Milliseconds of a decode step alone and beside restores, and whether those were right."""
    history = History(device, shape, layers, [2 * PAGE if device.dry_run else RESTORED])
    decode = Decode(device, shape, layers, batch)
    launch = decode.launcher(lambda layer: lambda hidden: None)
    fills = [history.fill_hidden(i, history.codecs[0]) for i in range(len(layers))]
    pipeline = RestorePipeline(
        history.memory,
        history.exact_layout,
        [RestoredLayer("hidden", fill) for fill in fills],
        history.tokens,
        device.kind,
    )

    def steps() -> None:
        for _ in range(STEPS):
            launch()

    def steps_beside_restores() -> None:
        restore = pipeline.start(history.pages, history.slots)
        for _ in range(STEPS):
            launch()
            if restore.done():
                restore = pipeline.start(history.pages, history.slots)

    history.poison()
    alone = device.milliseconds(steps) / STEPS
    during = device.milliseconds(steps_beside_restores) / STEPS
    if not device.dry_run:
        torch.cuda.synchronize()
    else:
        pipeline.start(history.pages, history.slots).layers[-1].synchronize()
    right = history.is_right()
    device.release()
    return alone, during, right
