"""Checks at the start: K and V, and hidden states, reach pages of host memory and come back as they
were. They compile the kernels: what was not tried at the start is not trusted later. Nothing may be
allocated or served yet: pages of the KV pool are overwritten, and the host may wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from hcache_backend.arena import NOT_ENCODABLE, Arena, Ids
from hcache_backend.checks.comparison import (
    difference_problem,
    kv_differences,
    projection_problem,
    rows_equal,
)
from hcache_backend.checks.self_check import CHECK_TOKENS, first_argument, keep_rows, refuse_errors
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import Shard
from hcache_backend.host.ports import HiddenPages
from hcache_backend.host.segments import KVSegments
from hcache_backend.projection.exactness import CODEC_TOLERANCE, relative_difference
from hcache_backend.projection.projector import Projector
from hcache_backend.ranks import Refused
from hcache_backend.restore.exchange import CollectiveOrder, Exchange, Fetch
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.streams import StreamFailed, host_tensor

# Pages of the pool that are copied, those to which they come back, and pages of host memory.
_SOURCES, _TARGETS, _HOST = (1, 2), (4, 3), (1, 0)


class _OwnShare(Exchange):
    """An exchange without other ranks: their shards are zeros."""

    on_scheduler_thread = False

    def __init__(self, shard: Shard) -> None:
        self.number, self.shards = shard

    def gather(self, shards: torch.Tensor, fetch: Fetch) -> None:
        shards.zero_()
        fetch(shards[self.number])


def check_copies(layout: PageLayout, kv: KVSegments) -> None:
    """Round-trip two pool pages through host memory, in the layers stored as K and V. Latents that
    ranks share come back for this rank's tokens. With a codec, the first must decode to the codec's
    reference. The second has random bits, and must come back if the codec says that it fits. The
    pool gets its content back. Raises Refused for wrong or missing pages, or if the codec does not
    hold normally distributed values."""
    by_layer = [kv.planes(layer) for layer in kv.layers]  # of each K and V, or latents
    planes = [plane for layer in by_layer for plane in layer]
    size, device = layout.page_size, planes[0].device
    if len(planes[0]) <= size * max(*_SOURCES, *_TARGETS):
        raise Refused("the KV pool is too small to try copies of its pages")
    slots, others = (
        torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages]).to(device)
        for pages in (_SOURCES, _TARGETS)
    )
    memory = host_tensor((len(_HOST), layout.stride), torch.uint8, device).zero_()
    layout.divide(memory.numpy())
    index_keys = [keys for layer in kv.layers for keys in kv.keys.rows(layer)]
    buffers = [*(plane.view(torch.uint8) for plane in planes), *index_keys]
    touched, first_page = torch.cat((slots, others)), kv.kept(slots[:size])
    sources, targets = kv.kept(slots), kv.kept(others)  # the tokens that must come back
    with keep_rows(buffers, touched), refuse_errors("K and V cannot be copied: "):
        for buffer in buffers:
            buffer[slots] = torch.randint_like(buffer[slots], 1, 256)
            buffer[others] = 0
        wanted = [buffer[sources] for buffer in buffers]
        if kv.codec != "none":
            for plane in planes:
                plane[first_page] = torch.randn_like(plane[first_page])
            first_planes = [[plane[first_page] for plane in layer] for layer in by_layer]
            decoded_layers = kv.through_codec(layout, first_planes)[0]
            decoded = [plane for layer in decoded_layers for plane in layer]
            for content, plane in zip(wanted, decoded, strict=False):  # index keys are as they are
                content[: len(first_page)] = plane.view(torch.uint8).to(device)
        pages = torch.tensor(_HOST, device="cpu" if kv.by_header else device)
        fits = kv.save(layout, memory, pages, slots)  # [layer, page]; None: there is no codec
        untouched = RestoredLayer("kv", copy=lambda *_: None)
        restored = [untouched] * len(layout.segment_bytes)
        for layer in kv.layers:
            restored[layer] = kv.restored_layer(layer)
        exchange = _OwnShare(layout.shard) if kv.shares_tokens else None
        # Shares of one page at a time: those of several ranks are next to each other otherwise.
        chunk = len(slots) if exchange is None else size
        pipeline = RestorePipeline(memory, layout, restored, chunk, device, exchange=exchange)
        pipeline.start(np.array(_HOST), others).synchronize()
        must_be_equal: list[torch.Tensor | None] = [None] * len(buffers)  # rows of each; None: all
        if fits is not None:
            of_rows = fits.repeat_interleave(len(first_page), 1)  # [layer, token]
            must_be_equal[: len(planes)] = of_rows.repeat_interleave(len(by_layer[0]), 0)
        compared = zip(buffers, wanted, must_be_equal, strict=True)
        are_equal = [rows_equal(buffer[targets], content, fit) for buffer, content, fit in compared]
    if not all(are_equal[: len(planes)]):
        layer = kv.layers[are_equal.index(False) // len(by_layer[0])]
        raise Refused(f"K or V of layer {layer} come back from host memory as something else")
    if not all(are_equal):
        raise Refused("an indexer's keys come back from host memory as something else")
    if fits is not None and not bool(fits[:, 0].all()):
        layer = kv.layers[fits[:, 0].tolist().index(False)]
        what = f"normally distributed K and V of layer {layer}"
        raise Refused(f"codec {kv.codec!r} does not hold {what}")


def whole_pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """``slots`` (int64 ``[n]``) of full pages only; without any, ``slots`` repeated to fill one."""
    tokens = max(1, len(slots) // page_size) * page_size
    return slots[torch.arange(tokens, device=slots.device) % len(slots)]


def check_lossy(kv: KVSegments, layout: PageLayout, slots: torch.Tensor, most: float) -> None:
    """Encode and decode the model's K and V in ``slots`` (int64 ``[p * page_size]``). Raises
    Refused if a layer does not fit, or changes more than its codec may (a plug-in's: ``most``)."""
    planes = [[plane[slots].cpu() for plane in kv.planes(layer)] for layer in kv.layers]
    decoded_layers, fits = kv.through_codec(layout, planes)
    for layer, exact, decoded, fit in zip(kv.layers, planes, decoded_layers, fits, strict=True):
        if not bool(fit.all()):
            raise Refused(f"it cannot hold K and V of layer {layer}")
        differences = []
        for got, wanted in zip(decoded, map(torch.Tensor.float, exact), strict=True):
            # All tokens count alike: an outlier would hide the losses of the others.
            scale = wanted.square().mean(2, keepdim=True).sqrt().clamp_min(1e-12)
            differences.append(relative_difference(got.float() / scale, wanted / scale))
        allowed = CODEC_TOLERANCE.get(kv.code_of(layout, layer), most)
        problem = difference_problem(f"it changes {{}} of layer {layer}", differences, allowed)
        if problem is not None:
            raise Refused(problem)


class CaptureCheck:
    """A few pages that go from the model to host memory and on to other slots, as in service, also
    by the CUDA graphs that serve. All tensor-parallel ranks must take its steps, in their order."""

    def __init__(
        self, plan: HiddenPages, projector: Projector, order: CollectiveOrder | None
    ) -> None:
        """Take the memory for a few pages. ``order``: of collectives; None: there is one rank."""
        layout, device = plan.layout.page, plan.layout.kvcache.device
        self._plan, self._layout, self._codec = plan, plan.layout, plan.codec
        self._pages = np.arange(-(-CHECK_TOKENS // layout.page_size))  # in host memory
        self.tokens = len(self._pages) * layout.page_size
        shadows = len(self._pages) + 1  # of the pool's page 0, and of the first that it hands out
        shape = (len(self._pages) + shadows, layout.stride)
        self._memory = host_tensor(shape, torch.uint8, device).zero_()
        self._arena = Arena(self._memory.numpy(), layout, len(self._pages), shadows)
        self._capture = plan.capture(self._arena, self._memory)
        # Made before the restores, which have collectives: one rank may lack memory for it.
        self._pipeline = plan.pipeline(self._memory, projector, order)
        self._not_encoded: set[int] = set()  # layers whose K and V the codec does not hold

    def capture(self, run: Callable[[], torch.Tensor], *, seen: bool, by_layer: bool) -> None:
        """Let ``run`` run the model on :attr:`tokens` tokens and return their slots. Capture the
        hidden states meanwhile and back them up. Raises Refused for lost or wrong rows. ``seen``:
        Python sees the inputs of projections, so rows are compared with these. It sees none in
        recorded prefill graphs. ``by_layer``: the prefill passes staging layer by layer, as
        prompts too long for the ring of rows do."""
        plan = self._plan
        received: dict[int, torch.Tensor] = {}

        def receive(layer: int, _: Any, args: Any, kwargs: Any) -> None:
            received.setdefault(layer, first_argument(args, kwargs).detach().clone())

        watched = [
            layer.projection.register_forward_pre_hook(
                partial(receive, layer.index), with_kwargs=True
            )
            for layer in self._layout.hidden_layers
            if seen
        ]
        by_layer = by_layer and bool(plan.staging.layers)
        self._capture.most_at_once = 1 if by_layer else plan.staging.capacity  # tokens
        try:
            with plan.hooks.capture_trial(self._capture):
                self._slots = run()
            self._capture.transfers().synchronize()
            self._capture.ledger.settle()
            problem = self._back_up(self._slots.cpu().numpy()) or self._rows_problem(received)
        except Exception as error:
            problem = _describe_error(error)
            with suppress(StreamFailed):  # staging may be given back
                self._capture.transfers().synchronize()
        finally:
            plan.staging.forget_marks()
            for hook in watched:
                hook.remove()
        if problem is not None:
            raise Refused(f"hidden states do not get to host memory: {problem}")

    def restore(self, projector: Projector) -> None:
        """Restore the backed-up pages to other pages of the pool, except first layers that pages do
        not hold. Raises Refused if K or V differ from those that the model wrote."""
        layout, size = self._layout, self._layout.page.page_size
        first = len(layout.methods.layers("recompute"))
        targets = self._slots + (int(self._slots.max()) // size) * size  # behind the used pages
        if int(targets.max()) >= len(layout.kvcache.k_buffer[0]):
            raise Refused("the KV pool is too small to try a restore")
        try:
            pages = self._arena.physical(self._pages)
            restore = self._pipeline.start(pages, targets, first_layer=first)
            for event in restore.layers[first:]:
                event.synchronize()
        except Exception as error:
            problem: str | None = _describe_error(error)
        else:
            problem = self._kv_problem(first, targets, projector)
        if problem is not None:
            raise Refused(f"hidden states do not come back from host memory: {problem}")

    def _back_up(self, slots: Ids) -> str | None:
        """Back up captured rows of ``slots``, and K and V, to the host pages; returns a problem."""
        layout, problem = self._layout, self._capture.ledger.broken or self._arena.problem(slots)
        if problem not in (None, NOT_ENCODABLE):  # that it holds enough was decided before
            return problem
        self._fits = torch.from_numpy(~self._arena.unfit_rows(slots))
        self._capture.back_up(slots, self._pages)
        if layout.kv.layers:
            pages = torch.from_numpy(self._arena.physical(self._pages)).to(layout.kvcache.device)
            if (fits := layout.kv.save(layout.page, self._memory, pages, self._slots)) is not None:
                of_layers = zip(layout.kv.layers, fits.all(1).tolist(), strict=True)
                self._not_encoded = {layer for layer, fit in of_layers if not fit}
        self._capture.transfers().synchronize()
        if not self._fits.any():
            return "no row is encodable"
        whole = self._pages[self._fits.view(len(self._pages), -1).all(1).numpy()]
        return None if self._arena.usable(whole) else "rows are not proven"

    def _rows_problem(self, received: dict[int, torch.Tensor]) -> str | None:
        """A message if a layer's rows in host memory differ from ``received``, its projection's
        input by layer, or None. The last token, which a decode step adds, is not compared."""
        layout, codec = self._layout.page, self._codec
        for layer in self._layout.hidden_layers if received else ():
            rows = codec.encode(received[layer.index][: self.tokens - 1])[0].cpu()
            for number, page in enumerate(self._arena.pages(self._pages)):
                first = number * layout.page_size
                kept = slice(first + layout.kept.start, first + layout.kept.stop)
                wanted, segment = rows[kept], page[layout.segment(layer.index)]
                stored = torch.from_numpy(segment).view(-1, codec.row_bytes)[: len(wanted)]
                if not rows_equal(stored, wanted, self._fits[kept][: len(wanted)]):
                    return f"other rows of {layer.name} than its projection received"
        return None

    def _kv_problem(self, first: int, targets: torch.Tensor, projector: Projector) -> str | None:
        """A message if K or V in ``targets`` differ from the model's, in a layer from ``first`` on
        and in rows that the codec holds; otherwise None."""
        pool, fits = projector.pool, self._fits.to(targets.device)
        for layer in self._layout.layers[first:]:
            if layer.index in self._not_encoded:
                continue
            read = partial(pool.fetch, layer.kernel, dtype=self._codec.dtype)
            differences = kv_differences(read(targets[fits]), read(self._slots[fits])).tolist()
            problem = projection_problem(layer, differences, pool.dtype, self._codec.name)
            if problem is not None:
                return problem
        return None


def _describe_error(error: Exception) -> str:
    """An error for a message; one of a stream carries a description already."""
    return str(error) if isinstance(error, StreamFailed) else f"{type(error).__name__}: {error}"
