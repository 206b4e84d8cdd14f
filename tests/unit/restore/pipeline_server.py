"""Pages, a pool and a restore pipeline between them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer, kv_layer
from hcache_backend.format.units import Shard
from hcache_backend.restore.exchange import CollectiveOrder, Exchange
from hcache_backend.restore.layers import Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import current_stream

SIZE, WIDTH, PAGES, SLOTS = 4, 6, 20, 160
METHODS = ("hidden", "kv", "hidden", "hidden", "kv")


class Server:
    """Pages with random content, a pool that starts poisoned, and a pipeline between them.

    With an ``exchange`` each rank has its share of the same hidden states, and its own K and V.
    """

    def __init__(
        self,
        methods: Sequence[str] = METHODS,
        chunk_tokens: int = 1024,
        exchange: Exchange | None = None,
    ) -> None:
        number, shards = (exchange.number, exchange.shards) if exchange else (0, 1)
        gpu = exchange is not None and not exchange.on_scheduler_thread
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        self.size = 8 if exchange else SIZE  # ranks share eighths of the tokens of a page
        width = shards * WIDTH
        stored = {
            "hidden": hidden_layer(self.size, 4 * WIDTH, WIDTH),
            "kv": kv_layer(self.size, width, width, 4, shards),
        }
        layers = tuple(stored[method] for method in methods)
        self.layout = PageLayout(self.size, layers, Shard(number, shards))
        shape = (PAGES, self.layout.stride)
        self.memory = torch.zeros(shape, dtype=torch.uint8, pin_memory=gpu)
        self.methods = methods
        source = torch.Generator().manual_seed(0)
        shape = (len(methods), 2, PAGES, self.size, WIDTH)
        self.content = torch.randn(shape, generator=source)  # hidden states: the first of two
        self.content[[method == "kv" for method in methods]] += number
        for layer, (one, both) in enumerate(zip(self.content[:, 0], self.content, strict=True)):
            kept = one[:, list(self.layout.kept)]
            values = both.transpose(0, 1) if methods[layer] == "kv" else kept
            held = values.contiguous().view(torch.uint8).view(PAGES, -1)
            self.memory[:, self.layout.segment(layer)] = held
        positions = np.arange(self.size) + 1000 * np.arange(PAGES)[:, None]
        self.layout.positions(self.memory.numpy())[:] = positions
        self.k = torch.full((len(methods), SLOTS, WIDTH), float("nan"), device=self.device)
        self.v = self.k.clone()
        self.calls: list[tuple[int, int]] = []  # layer, tokens
        self.order = CollectiveOrder(self.device)
        self.pipeline = RestorePipeline(
            self.memory,
            self.layout,
            [self.restored(layer) for layer in range(len(methods))],
            chunk_tokens,
            self.device,
            exchange,
            self.order if exchange else None,
        )

    def restored(self, layer: int) -> RestoredLayer:
        def fill(
            _: range, segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> None:
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
            segments = memory[pages.cpu(), offset : offset + self.layout.segment_bytes[layer]]
            rows = segments.view(torch.float32).view(-1, 2, self.size, WIDTH).to(self.device)
            for pool, part in zip((self.k, self.v), rows.unbind(1), strict=True):
                pool[layer, slots] = part.reshape(-1, WIDTH)
            self.calls.append((layer, len(slots)))

    def before_filling(self, layer: int, work: Callable[[], object]) -> None:
        """From now on, ``work`` runs on the stream before a layer is filled."""
        layers = [*self.pipeline._layers]
        fill = layers[layer].fill
        assert fill is not None
        layers[layer] = layers[layer]._replace(fill=lambda *parts: (work(), fill(*parts))[1])
        self.pipeline._layers = layers

    def assert_restored(self, layer: int, pages: Sequence[int], slots: torch.Tensor) -> None:
        for page, at in zip(pages, slots.view(-1, self.size), strict=True):
            k, v = self.content[layer, :, page]
            if self.methods[layer] == "hidden":
                positions = torch.arange(self.size)[:, None] + 1000 * page
                k, v = k + positions, k * 2
            assert torch.equal(self.k[layer, at].cpu(), k), (layer, page)
            assert torch.equal(self.v[layer, at].cpu(), v), (layer, page)

    def assert_whole(
        self, restore: RunningRestore, pages: np.ndarray, slots: torch.Tensor, first: int = 0
    ) -> None:
        """Wait for the layers from ``first`` on, one after the other; all of them are right."""
        for layer in range(first, len(self.methods)):
            restore.wait_for_layer(layer)
            self.assert_restored(layer, pages.tolist(), slots)


def positions_of(pages: np.ndarray, size: int = SIZE) -> list[int]:
    return [1000 * int(page) + i for page in pages for i in range(size)]


def recompute(layers: int, slots: torch.Tensor, fill: Callable[[], None]) -> Recompute:
    """First layers by ``fill``, on the calling thread: the engine runs its forward passes there."""
    return Recompute(layers, slots, fill, current_stream("cpu"))


def some(pages: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(PAGES)[:pages].astype(np.int64)
    return chosen, torch.from_numpy(rng.permutation(SLOTS)[: pages * SIZE])


def wait(server: Server, pages: np.ndarray, slots: torch.Tensor) -> None:
    server.assert_whole(server.pipeline.start(pages, slots), pages, slots)


def without_first_layer(server: Server) -> RestorePipeline:
    """The server's pages as if nothing were stored of layer 0."""
    layout = PageLayout(SIZE, (RECOMPUTED, *server.layout.layers[1:]))
    memory = torch.zeros((PAGES, layout.stride), dtype=torch.uint8)
    held = server.memory[:, server.layout.segment(1).start : server.layout.page_bytes]
    memory[:, layout.header_bytes : layout.page_bytes] = held
    layout.positions(memory.numpy())[:] = server.layout.positions(server.memory.numpy())
    layers = [RestoredLayer("recompute"), *server.pipeline._layers[1:]]
    return RestorePipeline(memory, layout, layers, SIZE, "cpu")  # one page a chunk
