"""Every way to get K and V of a history back, on the same data."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu.program import Device
from bench.gpu.restore_models import Layer
from bench.gpu.shapes import PAGE, Shape
from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import WHOLE, Segment
from hcache_backend.host.segments import KVSegments
from hcache_backend.restore.layers import Copy, Fill, Part, Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline, RestoreReport
from hcache_backend.streams import current_stream
from hcache_kernels.codecs import Codec, make_codec
from hcache_kernels.project_kv import KVPool, ProjectionCall, project_kv

SPARE_PAGES = 8


class Way(NamedTuple):
    """One measured way.

    Attributes:
        milliseconds: Median.
        bytes: That crossed the bus.
        flops: Of the projections.
        right: K and V were those of the forward pass, up to rounding.
        report: Of the pipeline, if the way goes through it.
        layers: How many layers came back by which method.
    """

    method: str
    milliseconds: float
    bytes: int
    flops: float
    right: bool
    report: RestoreReport | None
    layers: str


class _Pieces:
    """Layout of pages that hold every layer three times (exact, exp4, KV); one form is restored."""

    def __init__(self, whole: PageLayout, segments: Sequence[int]) -> None:
        self.page_size = whole.page_size
        self.shard = WHOLE  # there is no other rank to gather shards from
        self.positions = whole.positions
        self.segment_bytes = tuple(whole.segment_bytes[s] if s >= 0 else 0 for s in segments)
        self.segment_offsets = tuple(whole.segment_offsets[s] if s >= 0 else 0 for s in segments)


class History:
    """Sequences whose KV was dropped: pages in host memory, and the pool of K and V."""

    def __init__(
        self, device: Device, shape: Shape, layers: list[Layer], lengths: Sequence[int]
    ) -> None:
        self.device, self.shape, self.layers, self.lengths = device, shape, layers, lengths
        self.tokens = sum(lengths)
        self.own = PAGE // shape.ranks  # tokens of a page that this rank stores
        self.codecs = [make_codec(name, shape.hidden, device.dtype) for name in ("none", "exp4")]
        kind, pages = device.kind, self.tokens // PAGE
        kv_row = 2 * shape.width * device.dtype.itemsize
        segments = [codec.row_bytes * self.own for codec in self.codecs] + [kv_row * PAGE]
        stored = tuple(StoredLayer((Segment(length),)) for length in segments)
        self.layout = PageLayout(PAGE, stored * len(layers))
        self.memory = device.pinned(pages + SPARE_PAGES, self.layout.page_bytes)
        rng = np.random.default_rng(0)
        self.pages = rng.permutation(pages + SPARE_PAGES)[:pages].astype(np.int64)
        device_pages = torch.from_numpy(rng.permutation(pages + SPARE_PAGES)[:pages])
        slots = device_pages[:, None] * PAGE + torch.arange(PAGE)
        self.slots = slots.reshape(-1).to(kind)
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(kind)
        size = (len(layers), (pages + SPARE_PAGES) * PAGE, shape.heads, shape.head_dim)
        k, v = (list(torch.empty(size, device=kind, dtype=device.dtype)) for _ in "kv")
        self.pools = list(map(KVPool, k, v))
        pool = SimpleNamespace(k_buffer=k, v_buffer=v)
        self.kv = KVSegments(pool, range(len(layers)), PAGE, WHOLE, 1)
        self.ids = torch.randn(self.tokens, shape.hidden, device=kind, dtype=device.dtype)
        self.others: list[torch.Tensor] = []  # hidden states that other ranks read
        self.bulk = device.pinned(len(layers), 2, self.tokens, shape.width, dtype=device.dtype)
        self._store()

    def _store(self) -> None:
        """Run the model once, and keep all three forms of its layers."""
        on_pages = torch.from_numpy(self.pages)
        positions = self.layout.positions(self.memory.numpy())
        positions[self.pages] = self.positions.cpu().to(torch.int32).view(-1, PAGE).numpy()
        x, shape = self.ids, self.shape
        for index, layer in enumerate(self.layers):
            hidden = layer.norm(x, 0).view(-1, PAGE, shape.hidden)
            x, k, v = layer.forward(x, self.positions, self.lengths)
            stored = hidden[:, : self.own].reshape(-1, shape.hidden)
            for which, codec in enumerate(self.codecs):
                encoded, ok = codec.encode(stored)
                assert bool(ok.all()), f"{codec.name} cannot hold these rows"
                self._segment(index, which)[on_pages] = encoded.view(len(on_pages), -1).cpu()
            if shape.ranks > 1:
                self.others.append(hidden[:, self.own :].contiguous())
            pool = self.pools[index]
            pool.k[self.slots], pool.v[self.slots] = k, v
            self.bulk[index] = torch.stack((k, v)).view(2, self.tokens, -1).cpu()
        on_device = on_pages.to(self.device.kind)
        self.kv.save(self._pieces(2), self.memory, on_device, self.slots)
        self.device.synchronize()

    def _pieces(self, which: int) -> Any:
        """The places of one of the three forms of every layer in the pages."""
        return _Pieces(self.layout, [3 * i + which for i in range(len(self.layers))])

    def kv_of(self, layer: int) -> torch.Tensor:
        """K and V of a layer in the pages: ``[all pages, 2, page_size, heads, head_dim]``."""
        rows = self._segment(layer, 2).view(self.device.dtype)
        return rows.unflatten(1, (2, PAGE, *self.pools[layer].k.shape[1:]))

    def _segment(self, layer: int, which: int) -> torch.Tensor:
        return self.memory[:, self.layout.segment(3 * layer + which)]

    @property
    def kv_bytes(self) -> int:
        """Of a layer's K and V."""
        return 2 * self.tokens * self.shape.width * self.device.dtype.itemsize

    def fill_hidden(self, index: int, which: int = 0) -> Fill:
        """Decode, get the other ranks' rows, project to the pool."""
        layer, pool, own = self.layers[index], self.pools[index], self.own
        codec: Codec = self.codecs[which]

        def fill(
            _: range, segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> None:
            rows = codec.decode(segments.view(-1, codec.row_bytes))
            if self.shape.ranks > 1:
                # Stands for the all-gather over NVLink: the same bytes arrive, by a device copy.
                whole = rows.new_empty(len(segments), PAGE, self.shape.hidden)
                whole[:, :own] = rows.view(-1, own, self.shape.hidden)
                whole[:, own:] = self.others[index]
                rows = whole.view(-1, self.shape.hidden)
            project_kv(ProjectionCall(rows, positions, slots, layer.projection, pool))

        return fill

    def recompute(self, layers: int) -> Recompute:
        slots = self.slots

        def fill() -> None:
            x = self.ids
            for layer, pool in zip(self.layers[:layers], self.pools, strict=False):
                x, pool.k[slots], pool.v[slots] = layer.forward(x, self.positions, self.lengths)

        return Recompute(layers, slots, fill, current_stream(self.device.kind))

    def poison(self) -> None:
        """A slot that is not restored shows."""
        for pool in self.pools:
            pool.k.fill_(float("nan"))
            pool.v.fill_(float("nan"))

    def is_right(self) -> bool:
        """Whether the pool holds the K and V of the forward pass, up to rounding."""
        for index, pool in enumerate(self.pools):
            for got, want in zip((pool.k, pool.v), self.bulk[index], strict=True):
                rows = got[self.slots].view(self.tokens, -1).float()
                true = want.to(rows.device).float()
                if not float((rows - true).norm() / true.norm()) < 2e-2:
                    return False
        return True


class Ways:
    """Measures every way; ``bus``: bytes per second that the bus reaches."""

    def __init__(self, history: History, bus: float) -> None:
        self.history, self.bus = history, bus

    @cached_property
    def costs(self) -> tuple[float, float]:
        """Milliseconds of one layer's projection and of one layer's forward pass."""
        history, layer = self.history, self.history.layers[0]
        rows, at, milliseconds = history.ids, history.positions, history.device.milliseconds
        call = ProjectionCall(rows, at, history.slots, layer.projection, history.pools[0])
        forward = partial(layer.forward, rows, at, history.lengths)
        return milliseconds(partial(project_kv, call)), milliseconds(forward)

    @cached_property
    def recomputed(self) -> Way:
        """Everything by the forward pass: no copies, so the same over every bus."""
        methods = ["recompute"] * len(self.history.layers)
        return self._through_pipeline("recompute", methods, self.bus)

    def at(self, rate: float) -> Iterator[Way]:
        """Every way, with copies of ``rate`` bytes per second."""
        history, n_layers = self.history, len(self.history.layers)
        c_hidden, c_recompute = self.costs
        yield self.recomputed
        layerwise, bulk = self._layerwise_kv(rate), self._bulk_kv(rate)
        yield min(filter(None, (layerwise, bulk)), key=lambda way: way.milliseconds)
        if layerwise is not None:
            yield layerwise._replace(method="plain pages")
        yield self._through_pipeline("own pages", ["kv"] * n_layers, rate)
        yield self._by_copy_engine(rate)
        yield self._through_pipeline("hidden", ["hidden"] * n_layers, rate)
        yield self._through_pipeline("hidden exp4", ["hidden"] * n_layers, rate, codec=1)
        hidden_bytes = history.codecs[0].row_bytes * history.own * len(history.pages)
        io_hidden, io_kv = (1e3 * size / rate for size in (hidden_bytes, history.kv_bytes))
        fewest = 1 if history.device.dry_run else 0  # the dry run is to go every way
        # The other method takes as many layers as make the restore shortest (paper section 4.1).
        for method, compute, io in (("kv", 0.0, io_kv), ("recompute", c_recompute, 0.0)):

            def took(other: int, compute: float = compute, io: float = io) -> float:
                hidden = n_layers - other
                return max(compute * other + c_hidden * hidden, io * other + io_hidden * hidden)

            other = min(range(fewest, n_layers), key=took)
            hidden, others = ["hidden"] * (n_layers - other), [method] * other
            methods = others + hidden if method == "recompute" else hidden + others
            yield self._through_pipeline(f"hidden + {method}", methods, rate)

    def _slow_down(self, size: int, rate: float) -> None:
        """Keep the current stream busy for the additional time of a slower bus."""
        self.history.device.spin(size / rate - size / self.bus)

    def _slow(self, copy: Copy, rate: float) -> Copy:
        """``copy`` as over a bus of ``rate`` bytes per second."""

        def slow(layers: Sequence[int], *parts: Any) -> None:
            copy(layers, *parts)
            slots = parts[-1]
            size = self.history.kv_bytes * len(slots) // self.history.tokens
            self._slow_down(len(layers) * size, rate)

        return slow

    def _through_pipeline(
        self, name: str, methods: Sequence[str], rate: float, codec: int = 0
    ) -> Way:
        history, device = self.history, self.history.device
        kv = RestoredLayer("kv", copy=self._slow(history.kv.load, rate))
        restored, segments = [], []
        for i, method in enumerate(methods):
            if method == "hidden":
                restored.append(RestoredLayer("hidden", history.fill_hidden(i, codec)))
            else:
                restored.append(kv if method == "kv" else RestoredLayer("recompute"))
            segments.append({"hidden": 3 * i + codec, "kv": 3 * i + 2, "recompute": -1}[method])

        layout: Any = _Pieces(history.layout, segments)
        given = (history.memory, layout, restored, history.tokens, device.kind)
        pipeline = RestorePipeline(*given)
        bring = pipeline._bring_own

        def slow(part: Part, target: torch.Tensor) -> None:
            bring(part, target)
            self._slow_down(target.numel(), rate)

        pipeline._bring_own = slow  # type: ignore[method-assign]
        first = methods.count("recompute")
        recompute = history.recompute(first) if first else None

        def restore() -> None:
            started = pipeline.start(history.pages, history.slots, recompute)
            for layer in range(len(methods)):
                started.wait_for_layer(layer)

        history.poison()
        took = device.milliseconds(restore)
        report = pipeline.take_finished()[-1]
        of_layer = 4.0 * history.tokens * history.shape.hidden * history.shape.width
        flops = of_layer * methods.count("hidden")
        counted = ", ".join(f"{methods.count(m)} {m}" for m in dict.fromkeys(methods))
        size = sum(report.bytes.values())
        return Way(name, took, size, flops, history.is_right(), report, counted)

    def _layerwise_kv(self, rate: float) -> Way | None:
        """As HiCache does: SGLang's kernel, from host memory to the slots of a layer."""
        history = self.history
        try:
            from sglang.kernels.ops.kvcache.hicache import transfer_hicache_one_layer as transfer
        except Exception:  # whatever an installation of SGLang lacks
            return None
        if history.device.dry_run:
            return None
        order = torch.arange(history.tokens, device=history.slots.device)
        width = history.shape.width

        def restore() -> None:
            for pool, (k, v) in zip(history.pools, history.bulk, strict=True):
                transfer(pool.k, pool.v, history.slots, k, v, order, element_dim=width)
                self._slow_down(history.kv_bytes, rate)

        return self._kv_offload(restore, "by SGLang's kernel")

    def _by_copy_engine(self, rate: float) -> Way:
        """K of a page is one piece in the page and in the pool, as is V: no kernel is needed."""
        history = self.history
        starts, layers = history.slots[::PAGE].tolist(), []
        for index, pool in enumerate(history.pools):
            targets = [plane[at : at + PAGE] for plane in (pool.k, pool.v) for at in starts]
            held = history.kv_of(index)
            layers.append((targets, [held[page, kv] for kv in (0, 1) for page in history.pages]))

        def restore() -> None:
            for targets, sources in layers:
                torch._foreach_copy_(targets, sources, non_blocking=True)
                self._slow_down(history.kv_bytes, rate)

        way = self._kv_offload(restore, "by a copy per page and plane")
        return way._replace(method="own pages, copy engine")

    def _bulk_kv(self, rate: float) -> Way:
        """One copy of everything, then one scatter a layer."""
        history = self.history
        arrived = torch.empty_like(history.bulk, device=history.device.kind)
        heads = history.pools[0].k.shape[1:]

        def restore() -> None:
            arrived.copy_(history.bulk, non_blocking=True)
            self._slow_down(arrived.nbytes, rate)
            for pool, (k, v) in zip(history.pools, arrived, strict=True):
                pool.k[history.slots] = k.view(-1, *heads)
                pool.v[history.slots] = v.view(-1, *heads)

        return self._kv_offload(restore, "in one copy")

    def _kv_offload(self, restore: Callable[[], None], how: str) -> Way:
        history, n_layers = self.history, len(self.history.layers)
        history.poison()
        took = history.device.milliseconds(restore)
        size, counted = n_layers * history.kv_bytes, f"{n_layers} kv {how}"
        return Way("kv offload", took, size, 0.0, history.is_right(), None, counted)
