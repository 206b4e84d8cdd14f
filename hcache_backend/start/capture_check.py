"""Check at start-up: hidden states reach pages of host memory and come back, as in service.

A prefill and a decode step pass capture, transfer, verdicts, backup and restore, also by the CUDA
graphs that serve. This compiles the kernels: what was not tried at the start is not trusted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from hcache_backend.arena import Arena, Ids
from hcache_backend.capture.staging import StagedCapture
from hcache_backend.format.envelope import NAMESPACE_BYTES, WRITER_BYTES
from hcache_backend.projection.check import difference_problem
from hcache_backend.projection.exactness import relative_difference
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.start.agreement import Refused
from hcache_backend.start.page_plan import PagePlan
from hcache_backend.start.self_check import PROBE_TOKENS, prefill_and_decode
from hcache_backend.streams import StreamFailed, host_tensor


class CaptureCheck:
    """A few pages that go from the model to host memory and from there to other slots. Nothing may
    be allocated yet: pages of the pool are overwritten. All ``ranks`` (tensor-parallel) must take
    its steps, in their order."""

    def __init__(self, plan: PagePlan, ranks: Any) -> None:
        layout, device = plan.layout, plan.kvcache.device
        assert plan.codec is not None
        self._plan, self._codec = plan, plan.codec
        self._ranks = ranks
        self._pages = np.arange(-(-PROBE_TOKENS // layout.page_size))
        shadows = len(self._pages) + 1  # an empty pool hands out its first pages, except page 0
        shape = (len(self._pages) + shadows, layout.page_bytes)
        self._memory = host_tensor(shape, torch.uint8, device).zero_()
        self._arena = Arena(
            self._memory.numpy(),
            layout,
            len(self._pages),
            shadows,
            lambda page: layout.stamp(page, b"\1" * NAMESPACE_BYTES, bytes(WRITER_BYTES)),
            keeps_unfit=True,  # whether the codec holds enough was decided before
        )
        segments = [layer.index for layer in plan.hidden_layers]
        self._capture = StagedCapture(
            self._arena, self._memory, plan.staging, segments, self._codec
        )
        self._received: dict[int, torch.Tensor] = {}
        self._not_encoded: set[int] = set()

    def save(self, runner: Any, *, graphs: bool, by_layer: bool = False) -> None:
        """Run the model with capture, and back up the rows; raises Refused for lost or wrong ones.

        Args:
            graphs: Prefills use recorded CUDA graphs, as decode steps always do. Python does not
                see the inputs of projections there, so only K and V are compared.
            by_layer: The prefill passes staging layer by layer, as prompts too long for it do.
        """
        plan = self._plan
        self._received.clear()
        watched = [
            layer.projection.register_forward_pre_hook(self._watch(layer.index), with_kwargs=True)
            for layer in plan.hidden_layers
            if not graphs
        ]
        tokens = len(self._pages) * plan.layout.page_size
        self._capture.most_at_once = 1 if by_layer and plan.staging.layers else plan.staging.places
        try:
            with plan.capture_hooks.trying(self._capture):
                self._slots = prefill_and_decode(runner, tokens, self._ranks, graphs=graphs)
            self._capture.transfers().synchronize()  # nothing is served yet
            self._capture.ledger.settle()
            problem = self._back_up(self._slots.cpu().numpy()) or self._difference()
        except Exception as error:
            problem = _told(error)
            with suppress(StreamFailed):  # staging may be given back
                self._capture.transfers().synchronize()
        finally:
            plan.staging.forget_marks()
            for hook in watched:
                hook.remove()
        if problem is not None:
            raise Refused(f"hidden states do not get to host memory: {problem}")

    def make_pipeline(self, layers: Sequence[RestoredLayer]) -> RestorePipeline:
        """The pipeline that restores the pages by ``layers``. It is no part of :meth:`restore`,
        which has collectives, because one rank may lack memory."""
        plan, device = self._plan, self._plan.kvcache.device
        return RestorePipeline(
            self._memory,
            plan.layout,
            layers,
            plan.methods.chunk_tokens,
            device,
            exchange=plan.exchange,
            order=CollectiveOrder(device) if attention_ranks().world_size > 1 else None,
        )

    def restore(self, pipeline: RestorePipeline, projector: Projector) -> None:
        """Restore to other pages of the pool; raises Refused if K or V differ from the model's."""
        plan, size = self._plan, self._plan.layout.page_size
        first = len(plan.methods.layers("recompute"))
        there = self._slots + (int(self._slots.max()) // size) * size
        if int(there.max()) >= len(plan.kvcache.k_buffer[0]):
            raise Refused("the KV pool is too small to try a restore")
        try:
            pages = self._arena.physical(self._pages)
            restore = pipeline.start(pages, there, first_layer=first)
            for event in restore.layers[first:]:
                event.synchronize()  # nothing is served yet
        except Exception as error:
            problem: str | None = _told(error)
        else:
            problem = self._changed(first, there, projector)
        if problem is not None:
            raise Refused(f"hidden states do not come back from host memory: {problem}")

    def _watch(self, layer: int) -> Any:
        def received(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else next(iter(kwargs.values()))
            self._received.setdefault(layer, hidden.detach().clone())

        return received

    def _back_up(self, slots: Ids) -> str | None:
        plan, problem = self._plan, self._capture.ledger.broken or self._arena.problem(slots)
        if problem is not None:
            return problem
        self._capture.back_up(slots, self._pages)
        if plan.kv.layers:
            pages = torch.from_numpy(self._arena.physical(self._pages)).to(plan.kvcache.device)
            fits = plan.kv.save(plan.layout, self._memory, pages, self._slots)
            if fits is not None:  # K and V that do not fit are kept apart, and pages lack them
                of_layers = zip(plan.kv.layers, fits.all(1).tolist(), strict=True)
                self._not_encoded = {layer for layer, fit in of_layers if not fit}
        self._capture.transfers().synchronize()
        self._fits = torch.from_numpy(~self._arena.unfit_rows(slots))
        if not self._fits.any():
            return "no row is encodable"
        proven = map(plan.layout.is_stamped, self._arena.pages(self._pages))
        return None if all(proven) else "rows are not proven"

    def _difference(self) -> str | None:
        """The layer whose rows in host memory differ from its projection's input. Rows that the
        codec cannot hold are never read, so they do not count."""
        layout, codec = self._plan.layout, self._codec
        layers = {layer.index: layer for layer in self._plan.hidden_layers}
        prefilled = len(self._pages) * layout.page_size - 1
        for index, received in self._received.items():
            rows = codec.encode(received[:prefilled])[0].cpu()
            for number, page in enumerate(self._arena.pages(self._pages)):
                first = number * layout.page_size
                kept = slice(first + layout.kept.start, first + layout.kept.stop)
                wanted = rows[kept]
                stored = torch.from_numpy(page[layout.segment(index)]).view(-1, codec.row_bytes)
                fits = self._fits[kept][: len(wanted)]
                if not torch.equal(stored[: len(wanted)][fits], wanted[fits]):
                    return f"other rows of {layers[index].name} than its projection received"
        return None

    def _changed(self, first: int, there: torch.Tensor, projector: Projector) -> str | None:
        """The layer from ``first`` on whose K or V differ between the two places, in rows of hidden
        states that the codec holds."""
        pool, plan, fits = projector.pool, self._plan, self._fits.to(there.device)
        for layer in plan.layers[first:]:
            if layer.index in self._not_encoded:
                continue
            ours, models = (
                pool.fetch(layer.kernel, slots[fits], plan.runner.dtype)
                for slots in (there, self._slots)
            )
            found = [relative_difference(*pair) for pair in zip(ours, models, strict=True)]
            problem = difference_problem(layer, found, projector, self._codec.name)
            if problem is not None:
                return problem
        return None


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StreamFailed) else f"{type(error).__name__}: {error}"
