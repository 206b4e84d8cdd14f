"""Scenarios of the restore pipeline: pages in host memory become K and V under forward passes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend import streams
from hcache_backend.format.page import RECOMPUTED, PageLayout, StoredLayer
from hcache_backend.format.units import Segment, Shard
from hcache_backend.host.segments import KVSegments
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.layers import Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import TokenSpan
from hcache_backend.restore.report import RunningRestore
from tests.order.checker import Checker

GPU = torch.device("cpu")
"""A variable: on a machine with a GPU it would name that."""
SIZE, WIDTH, PAGES = 4, 64, 24
SLOTS = SIZE * PAGES


class Pool:
    """K and V of a few layers on the modelled device, and pages in pinned memory.

    Besides memory, the links to other ranks, which one kernel at a time may use, stand as memory
    that all of them write. ``methods``: how each layer is restored; with ``latent`` all have
    latents, which K stands for. ``shards``: as many ranks have a shard of every page.
    """

    stream: Callable[[], streams.Stream]  # of the forward passes; the :class:`Engine` sets it
    fails = False  # a recomputation ends with an error when it has written everything
    _take: Callable[[int, torch.Tensor], None] | None = None

    def __init__(
        self, checker: Checker, methods: Sequence[str], shards: int = 1, codec: str = "none"
    ) -> None:
        dtype = torch.bfloat16 if codec == "exp4" else torch.float32
        shape = (len(methods), SLOTS, WIDTH)
        self.k = checker.on_device(torch.zeros(shape, dtype=dtype), "K")
        latent = "latent" in methods
        self.v = self.k if latent else checker.on_device(torch.zeros(shape, dtype=dtype), "V")
        k, v = ([rows[:, None] for rows in plane] for plane in (self.k, self.v))
        kvcache = SimpleNamespace(k_buffer=k, v_buffer=v)
        if latent:
            kvcache = SimpleNamespace(kv_buffer=k, kv_lora_rank=WIDTH)
        shard, self.size = Shard(0, shards), 2 * SIZE if latent else SIZE
        self._kv = KVSegments(kvcache, range(len(methods)), self.size, shard, shards, codec)
        stored = {
            "hidden": StoredLayer((Segment(SIZE * 4 * WIDTH, shards),)),
            "kv": self._kv.stored_layer(0),
            "latent": self._kv.stored_layer(0),
            "recompute": RECOMPUTED,
        }
        self.methods = methods
        self.layers = len(methods)  # that can be recomputed
        self.layout = PageLayout(self.size, tuple(stored[m] for m in methods), shard)
        self.memory = checker.pinned(
            torch.zeros((2 * PAGES, self.layout.stride), dtype=torch.uint8), "arena"
        )
        positions = self.layout.positions(self.memory.numpy())
        positions[: SLOTS // self.size] = np.arange(SLOTS).reshape(-1, self.size)
        self.links = checker.on_device(torch.zeros(1), "links to other ranks")

    def restored(self, layer: int) -> RestoredLayer:
        """How ``layer`` comes back: its K and V as the product copies and decodes them."""

        def fill(
            _: range, segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> None:
            rows = segments.view(torch.float32).view(-1, WIDTH)
            self.k[layer, slots] = (rows + positions[:, None]).to(self.k.dtype)
            self.v[layer, slots] = (rows * 2).to(self.v.dtype)

        ways = {
            "hidden": RestoredLayer("hidden", fill),
            "kv": self._kv.restored_layer(layer),
            "latent": self._kv.restored_layer(layer),
            "recompute": RestoredLayer("recompute"),
        }
        return ways[self.methods[layer]]

    def save(self, pages: npt.NDArray[np.int64], slots: torch.Tensor) -> None:
        """Copy K and V from ``slots`` to ``pages`` of the memory, as a backup does."""
        self._kv.save(self.layout, self.memory, streams.to_device(pages, GPU), slots)

    @contextmanager
    def divert_to(self, take: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """As :meth:`hcache_backend.capture.hooks.HiddenCapture.to`, of hidden layers."""
        self._take = take
        yield
        self._take = None

    def talk(self) -> None:
        """Use the links to other ranks, if there are any."""
        if self.layout.shard.of > 1:
            self.links.add_(1)

    def recomputation(self, layers: int, slots: torch.Tensor) -> Recompute | None:
        """How the first ``layers`` of tokens without a prefix are recomputed; none if 0."""
        fill = partial(self.recompute, layers, slots, ())
        return Recompute(layers, slots, fill, self.stream()) if layers else None

    def recompute(self, layers: int, slots: torch.Tensor, spans: Iterable[TokenSpan]) -> None:
        """Recompute the first layers, as :class:`hcache_backend.restore.recompute.Recomputer`."""
        self.talk()
        positions = torch.arange(len(slots), device=GPU)[:, None]
        for layer in range(layers):
            for rows in (self.k, self.v):
                rows[layer, slots] = positions.to(rows.dtype)
            if self._take is not None and self.methods[layer] == "hidden":
                rows = torch.zeros((len(slots), WIDTH)) + positions
                self._take(self.methods[:layer].count("hidden"), rows)
            for span in spans:
                self.k[layer, span.prefix].sum()
                self.v[layer, span.prefix].sum()
        if self.fails:
            raise RuntimeError("out of memory")

    def pipeline(self, chunk_tokens: int, **others: Any) -> RestorePipeline:
        """A pipeline into this pool; ``others`` are arguments of :class:`RestorePipeline`."""
        layers = [self.restored(layer) for layer in range(len(self.methods))]
        return RestorePipeline(self.memory, self.layout, layers, chunk_tokens, GPU, **others)

    def some(self, pages: int, seed: int) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Pages in any order, and as many slots, made on the current stream."""
        rng = np.random.default_rng(seed)
        every, size = SLOTS // self.size, self.size
        chosen = rng.permutation(every)[:pages].astype(np.int64)
        slots = rng.permutation(every)[:pages, None] * size + np.arange(size)
        return chosen, streams.to_device(slots.ravel(), GPU)


class Engine:
    def __init__(self, checker: Checker, pool: Pool, order: CollectiveOrder | None = None) -> None:
        self._checker, self._pool, self._order = checker, pool, order
        self.schedule, self.forward_stream, self.loading = (
            checker.stream(name) for name in ("schedule", "forward", "host to device")
        )
        pool.stream = partial(streams.wrap_engine_stream, self.forward_stream)

    def loads_wait(self) -> None:
        """The stream of loads is put behind what was launched so far."""
        self.loading.wait_stream(self.schedule)
        self.loading.wait_stream(self.forward_stream)

    def layers_done(self, restores: Sequence[RunningRestore]) -> list[Any]:
        """On the stream of loads: an event behind each layer, as HiCache asks for them."""
        done = []
        for layer in range(len(self._pool.methods)):
            for restore in restores:
                restore.wait_for_layer(layer)
            done.append(self.loading.record_event())
        return done

    def forward(self, slots: torch.Tensor, layers: Sequence[Any] = ()) -> None:
        """A forward pass writes ``slots`` and reads them; it waits for each of the ``layers``."""
        pool = self._pool
        self.forward_stream.wait_stream(self.schedule)
        with self._checker.on(self.forward_stream), torch.no_grad():
            if self._order is not None:
                self._order.forward_begins()
            slots.record_stream(self.forward_stream)
            pool.talk()
            for event in layers:
                event.wait()
            for layer in range(len(pool.methods)):
                for rows in (pool.k, pool.v):
                    rows[layer, slots].sum()
                    rows[layer, slots] = 1.0


def restores(
    checker: Checker, methods: Sequence[str], recomputed: int = 0, codec: str = "none"
) -> None:
    """Restores one after the other, of more pages than a projection takes, under forward passes."""
    pool = Pool(checker, methods, codec=codec)
    engine, pipeline = Engine(checker, pool), pool.pipeline(4 * SIZE)
    checker.begin()
    for seed in range(4):
        with checker.on(engine.schedule):
            pages, slots = pool.some(9, seed)
        engine.loads_wait()
        with checker.on(engine.loading):
            slots.record_stream(engine.loading)  # as HiCache does with its indices
            done = engine.layers_done(
                [pipeline.start(pages, slots, pool.recomputation(recomputed, slots))]
            )
        engine.forward(slots, done)
        pipeline.take_finished()


class Exchange:
    """Another rank sends what this one has."""

    shards, number, on_scheduler_thread = 2, 0, False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def gather(self, shards: torch.Tensor, fetch: Callable[[torch.Tensor], None]) -> None:
        """See :meth:`hcache_backend.restore.exchange.Exchange.gather`."""
        fetch(shards[0])
        shards[1].copy_(shards[0])
        self._pool.talk()


def restores_between_ranks(
    checker: Checker,
    methods: Sequence[str] = ("recompute", "hidden", "hidden", "hidden", "kv"),
    codec: str = "none",
) -> None:
    """Restores and forward passes that talk to other ranks, in no order but the pipeline's own."""
    pool = Pool(checker, methods, 2, codec)
    order = CollectiveOrder("cuda")  # on a CPU there would be nothing to order
    engine = Engine(checker, pool, order)
    pipeline = pool.pipeline(4 * SIZE, exchange=Exchange(pool), order=order)
    checker.begin()
    for seed in range(4):
        with checker.on(engine.schedule):
            pages, slots = pool.some(9, seed)
            nothing = torch.empty(0, dtype=torch.int64, device=GPU)
        engine.loading.wait_stream(engine.schedule)
        with checker.on(engine.loading):
            slots.record_stream(engine.loading)
            first = pool.recomputation(1, slots)
            done = engine.layers_done([pipeline.start(pages, slots, first)])
        engine.forward(nothing)  # it only talks, and waits for no layer
        engine.forward(slots, done)
