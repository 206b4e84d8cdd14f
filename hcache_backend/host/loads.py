"""Loads from host memory, from SGLang's request for one to the launch of all queued loads as one
restore: missing pages are transferred together, and the same number of first layers is recomputed
in all of them. First layers that are not stored are recomputed here, also those of pages that were
restored while L3 was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend import metrics
from hcache_backend.arena import Arena, Ids
from hcache_backend.metrics import logger
from hcache_backend.plan.restore import Restore
from hcache_backend.ranks import OutOfStep
from hcache_backend.restore.layers import Recompute
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import Recomputer, TokenSpan
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import Stream, current_stream, to_device

# gives the slots of all tokens before some others; None: not all are on the device
Prefix = Callable[[], torch.Tensor | None]


class Prepared(NamedTuple):
    """Device pages for a load."""

    slots: torch.Tensor  # of all pages of the load, int64 [pages * page_size]
    ready: npt.NDArray[np.bool_]  # with K and V of the stored layers, now or later; bool [pages]
    restores: tuple[RunningRestore, ...]  # that write the ready ones, or still read them


@dataclass(eq=False)
class QueuedLoad:
    """A load of whole pages."""

    host_pages: Ids  # int64 [pages]
    span: TokenSpan | None = None  # its tokens; None: they cannot be recomputed
    prepared: Prepared | None = None  # prepared by eager restores; None without these

    @property
    def ready(self) -> npt.NDArray[np.bool_]:
        return self.prepared.ready if self.prepared else np.zeros(len(self.host_pages), np.bool_)


@dataclass(eq=False)
class LoadQueue:
    """Plans loads, and launches those that were queued. Scheduler thread only."""

    _arena: Arena
    _pipeline: RestorePipeline
    methods: Restore  # of each layer
    _recomputer: Recomputer | None  # None: the model cannot be run, or it failed once
    _device: torch.device | str
    _slowdown: Callable[[int], float] = lambda tokens: 1.0  # :meth:`.Estimates.slowdown`
    _on_failure: Callable[[str], None] = lambda reason: None  # nothing can be restored any more
    # A restore of so many tokens took so many seconds.
    _on_restored: Callable[[int, float], None] = lambda tokens, seconds: None

    def __post_init__(self) -> None:
        self.stored_from = len(self.methods.layers("recompute"))  # the first stored layer
        self._layout = self._arena.layout
        self._queued: list[QueuedLoad] = []
        self._forwards: Stream | None = None  # of forward passes, when the last load was planned

    def plan(self, host_pages: Ids, prefix: Prefix) -> QueuedLoad | None:
        """A load of ``host_pages`` (int64 ``[p]``, at least one) behind the tokens of ``prefix``.
        None: layers that are not stored cannot be recomputed."""
        if self.stored_from > self._recomputable:
            return None
        load = QueuedLoad(host_pages, self._span(host_pages, prefix))
        if self._recomputer is not None:
            # Here and not in launch: then SGLang's stream of loads is the current one.
            self._forwards = self._recomputer.stream()
        return None if self.stored_from and load.span is None else load

    def add_load(self, load: QueuedLoad) -> None:
        """SGLang queued ``load``: the next :meth:`launch` is to include it."""
        if load.prepared is not None and load.prepared.restores:
            self._pipeline.mark_handed_out()
        self._queued.append(load)

    def drop_queued(self) -> None:
        self._queued.clear()

    @metrics.timed("host_load")
    def launch(self, slots: torch.Tensor) -> tuple[RunningRestore, ...]:
        """Launch all queued loads as one restore, on the current stream. ``slots``: of all loads in
        order, int64 ``[n]``, on the device. Returns all restores that write or still read them.
        Raises if unstored layers could not be recomputed: no batch may use the slots."""
        loads, self._queued = self._queued, []
        pages = self._arena.physical(np.concatenate([load.host_pages for load in loads]))
        missing = ~np.concatenate([load.ready for load in loads])
        all_missing = bool(missing.all())
        recompute = self._recompute_queued(loads, slots, only_unstored=not all_missing)
        prepared = [load.prepared for load in loads if load.prepared is not None]
        restores = tuple({id(one): one for each in prepared for one in each.restores}.values())
        if recompute is not None or missing.any():
            missing_pages = pages[missing]
            missing_slots = slots if all_missing else self._slots(slots, missing)
            restore = self._pipeline.start(missing_pages, missing_slots, recompute)
            restores = (*restores, restore)
            if restore.failed is not None:
                self.recomputation_failed(restore.failed)
                if self.stored_from:
                    raise restore.failed
                # It may have written some layers.
                current_stream(self._device).wait(restore.layers[0])
                restores = (*restores, self._pipeline.start(missing_pages, missing_slots))
        return restores

    def recomputation_failed(self, problem: Exception) -> None:
        """From now on nothing is recomputed, and if layers are not stored nothing is restored.
        Raises OutOfStep if there are other ranks, which may wait in collectives of the model."""
        if self.methods.ranks > 1:
            raise OutOfStep(str(problem)) from problem
        if self._recomputer is not None:
            self._recomputer = None
            metrics.PROBLEMS.count("recomputation_failed")
            logger.error("hcache: recomputing layers failed and is not tried again: %r", problem)
            if self.stored_from:
                self._on_failure("layers that are not stored cannot be recomputed any more")

    def count_finished(self) -> None:
        """Count the restores that are done; never raises, because no count is worth a restore."""
        try:
            for report in self._pipeline.take_finished():
                metrics.TOKENS.count("restored", report.tokens)
                for method, number in report.bytes.items():
                    metrics.BYTES.count(f"restored_{method}", number)
                metrics.STAGE_SECONDS.observe("restore", report.total_ms / 1e3)
                self._on_restored(report.tokens, report.total_ms / 1e3)
                for stream in ("copy", "compute"):
                    metrics.STREAM_SECONDS.count(f"{stream}_busy", report.busy_ms(stream) / 1e3)
                    metrics.STREAM_SECONDS.count(f"{stream}_idle", report.idle_ms(stream) / 1e3)
        except Exception:
            logger.exception("hcache: restores could not be counted")

    @property
    def recomputes_pages(self) -> bool:
        """True if whole pages can be recomputed, and every layer is stored in pages."""
        return self._recomputable == len(self.methods.methods) and not self.stored_from

    @property
    def _recomputable(self) -> int:
        return 0 if self._recomputer is None else self._recomputer.layers

    def recompute_pages(self, span: TokenSpan, slots: torch.Tensor) -> Recompute | None:
        """Recomputation of all layers of ``span`` to ``slots``; None: the model cannot be run."""
        if self._recomputer is None:
            return None
        return self._recompute(len(self.methods.methods), slots, [span], self._recomputer.stream())

    def _recompute_queued(
        self, loads: Sequence[QueuedLoad], slots: torch.Tensor, *, only_unstored: bool
    ) -> Recompute | None:
        """Recomputation of first layers of ``loads`` to ``slots``: of the unstored ones, and
        without ``only_unstored`` of as many as make the load fastest. None: no layer is
        recomputed."""
        spans = [load.span for load in loads if load.span is not None]
        first = self.stored_from
        if len(spans) < len(loads) or self._recomputer is None:
            assert first == 0, "pages without their first layers were queued"
            return None
        if not only_unstored:
            tokens = sum(len(span.token_ids) for span in spans)
            pairs = sum(len(span.token_ids) * len(span.prefix) for span in spans)
            mean_prefix, slowdown = pairs // tokens, self._slowdown(tokens)
            first = max(first, self.methods.first_layers(tokens, mean_prefix, slowdown))
        return self._recompute(first, slots, spans, self._forwards) if first else None

    def _recompute(
        self, layers: int, slots: torch.Tensor, spans: Sequence[TokenSpan], forwards: Stream | None
    ) -> Recompute:
        """Recomputation of the first ``layers`` of ``spans`` to ``slots``, on ``forwards``."""
        recomputer = self._recomputer
        assert recomputer is not None and forwards is not None

        def fill() -> None:
            # The prefixes were made on the scheduler's stream, and may die there before this ran.
            now = current_stream(self._device)
            for span in spans:
                now.keep(span.prefix)
            recomputer.recompute(layers, slots, spans)

        return Recompute(layers, slots, fill, forwards)

    def _span(self, host_pages: Ids, prefix: Prefix) -> TokenSpan | None:
        """Tokens of pages, to be recomputed; None if impossible, or the prefix is not there."""
        if self._recomputer is None or not self.methods.recomputable:
            return None
        pages = self._arena.pages(host_pages, header=True)
        positions = np.concatenate([self._layout.positions(page) for page in pages])
        token_ids = np.concatenate([self._layout.token_ids(page) for page in pages])
        first, slots = int(positions[0]), None
        if np.array_equal(positions, np.arange(first, first + len(positions))):
            slots = prefix() if first else torch.empty(0, dtype=torch.int64, device=self._device)
        is_whole = slots is not None and len(slots) == first
        return TokenSpan(token_ids.astype(np.int64), slots) if is_whole else None

    def _slots(self, slots: torch.Tensor, pages: npt.NDArray[np.bool_]) -> torch.Tensor:
        indices = to_device(np.flatnonzero(pages), slots.device)
        return slots.view(-1, self._layout.page_size).index_select(0, indices).view(-1)
