"""Pages, a pool and a restore pipeline between them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer, kv_layer
from hcache_backend.restore.layers import Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import current_stream

SIZE, WIDTH, PAGES, SLOTS = 4, 6, 20, 160
METHODS = ("hidden", "kv", "hidden", "hidden", "kv")


class Server:
    """Pages with random content, a pool that starts poisoned, and a pipeline between them."""

    def __init__(self, methods: Sequence[str] = METHODS, chunk_tokens: int = 1024) -> None:
        stored = {
            "hidden": hidden_layer(SIZE, 4 * WIDTH, WIDTH),
            "kv": kv_layer(SIZE, WIDTH, WIDTH, 4, 1),
        }
        self.layout = PageLayout(SIZE, tuple(stored[method] for method in methods))
        self.memory = torch.zeros((PAGES, self.layout.page_bytes), dtype=torch.uint8)
        self.methods = methods
        for page in range(PAGES):
            for layer in range(len(methods)):
                values = torch.randn(self.layout.segment_bytes[layer] // 4)
                self.memory[page, self.layout.segment(layer)] = values.view(torch.uint8)
            self.layout.positions(self.memory.numpy())[page] = np.arange(SIZE) + 1000 * page
        self.k = torch.full((len(methods), SLOTS, WIDTH), float("nan"))
        self.v = torch.full((len(methods), SLOTS, WIDTH), float("nan"))
        self.calls: list[tuple[int, int]] = []  # layer, tokens
        layers = [self.restored(layer) for layer in range(len(methods))]
        self.pipeline = RestorePipeline(self.memory, self.layout, layers, chunk_tokens, "cpu")

    def restored(self, layer: int) -> RestoredLayer:
        def fill(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            rows = segments.view(torch.float32).view(-1, WIDTH)
            self.k[layer, slots] = rows + positions[:, None]
            self.v[layer, slots] = rows * 2
            self.calls.append((layer, len(slots)))

        if self.methods[layer] == "hidden":
            return RestoredLayer("hidden", fill)
        return RestoredLayer("kv", copy=self.copy)

    def copy(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        for layer, offset in zip(layers, offsets, strict=True):
            segments = memory[pages, offset : offset + self.layout.segment_bytes[layer]]
            k, v = segments.view(torch.float32).view(-1, 2, SIZE, WIDTH).unbind(1)
            self.k[layer, slots] = k.reshape(-1, WIDTH)
            self.v[layer, slots] = v.reshape(-1, WIDTH)
            self.calls.append((layer, len(slots)))

    def before_filling(self, layer: int, work: Callable[[], object]) -> None:
        """From now on, ``work`` runs on the stream before a layer is filled."""
        layers = [*self.pipeline._layers]
        fill = layers[layer].fill
        assert fill is not None
        layers[layer] = layers[layer]._replace(fill=lambda *parts: (work(), fill(*parts))[1])
        self.pipeline._layers = layers

    def assert_restored(self, layer: int, pages: Sequence[int], slots: torch.Tensor) -> None:
        for page, at in zip(pages, slots.view(-1, SIZE), strict=True):
            segment = self.memory[page, self.layout.segment(layer)].clone().view(torch.float32)
            if self.methods[layer] == "kv":
                want_k, want_v = segment.view(2, SIZE, WIDTH)
            else:
                rows = segment.view(SIZE, WIDTH)
                want_k = rows + (torch.arange(SIZE)[:, None] + 1000 * page)
                want_v = rows * 2
            assert torch.equal(self.k[layer, at], want_k), (layer, page)
            assert torch.equal(self.v[layer, at], want_v), (layer, page)

    def assert_whole(
        self, restore: RunningRestore, pages: np.ndarray, slots: torch.Tensor, first: int = 0
    ) -> None:
        """Wait for the layers from ``first`` on, one after the other; all of them are right."""
        for layer in range(first, len(self.methods)):
            restore.wait_for_layer(layer)
            self.assert_restored(layer, pages.tolist(), slots)


def positions_of(pages: np.ndarray) -> list[int]:
    return [1000 * int(page) + i for page in pages for i in range(SIZE)]


def recompute(layers: int, fill: Callable[[np.ndarray, torch.Tensor], None]) -> Recompute:
    """First layers by ``fill``, on the calling thread: the engine runs its forward passes there."""
    return Recompute(layers, fill, current_stream("cpu"))


def some(pages: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(PAGES)[:pages].astype(np.int64)
    return chosen, torch.from_numpy(rng.permutation(SLOTS)[: pages * SIZE])


def wait(server: Server, pages: np.ndarray, slots: torch.Tensor) -> None:
    server.assert_whole(server.pipeline.start(pages, slots), pages, slots)


def without_first_layer(server: Server) -> RestorePipeline:
    """The server's pages as if nothing were stored of layer 0."""
    layout = PageLayout(SIZE, (RECOMPUTED, *server.layout.layers[1:]))
    memory = torch.zeros((PAGES, layout.page_bytes), dtype=torch.uint8)
    memory[:, layout.header_bytes :] = server.memory[:, server.layout.segment(1).start :]
    layout.positions(memory.numpy())[:] = server.layout.positions(server.memory.numpy())
    layers = [RestoredLayer("recompute"), *server.pipeline._layers[1:]]
    return RestorePipeline(memory, layout, layers, SIZE, "cpu")  # one page a chunk
