"""What the loads of one restore have in common: how many of the first layers are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hcache_backend.capture.arena import Ids
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.startup.partitioning import Partitioning
from hcache_backend.restore.pipeline import Recompute
from hcache_backend.restore.recompute import Recomputer, RestoredSpan
from hcache_backend.restore.reservation import runs
from hcache_backend.store.base import EIGHTHS
from hcache_backend.streams import held_for_device


@dataclass(frozen=True)
class LoadedSpan:
    """The tokens of one load.

    Attributes:
        token_ids: int64 ``[n]``; empty where nothing can be recomputed on this server.
        prefix: Slots of the tokens before them, on the device; None where they are not known, and
            then nothing can be recomputed.
        missing: The first layers whose segments a page lacks.
    """

    token_ids: np.ndarray
    prefix: torch.Tensor | None
    missing: int


class LoadPlanner:
    """Remembers queued loads until they are launched as one restore. Scheduler thread only, except
    :meth:`first_to_read`.

    Args:
        pool: The host pool.
        partitioning: What is stored, and what decides.
        recomputer: Runs the model; None where it cannot.
        device: Where the model is.

    Attributes:
        prefix: Gives the slots of the tokens before those that are being loaded.
    """

    def __init__(
        self,
        pool: HiddenStatePool,
        partitioning: Partitioning,
        recomputer: Recomputer | None,
        device: torch.device | str,
    ) -> None:
        self.prefix: Callable[[], torch.Tensor] | None = None
        self._pool = pool
        self._partitioning = partitioning
        self._recomputer = recomputer
        self._device = device
        self._stored_from = len(partitioning.layers("recompute"))
        self._spans: list[LoadedSpan] = []

    def first_to_read(self, tokens: int) -> int:
        """Layers of which a restore of ``tokens`` tokens is better off without segments from L3.

        Any thread. 0: all that are stored are to be read.
        """
        if self._recomputer is None or self._pool.page_size % EIGHTHS:
            return 0  # the store only divides pages whose tokens divide
        first = self._partitioning.first_layers(tokens, 0, "first")
        return first if first > self._stored_from else 0

    def recompute_of(
        self, host_pages: Ids, layers: int, prefix: Callable[[], torch.Tensor | None]
    ) -> Recompute | None:
        """How ``layers`` first layers of consecutive pages are recomputed; None: they cannot be.

        Args:
            host_pages: The host page of each, int64 ``[p]``.
            layers: At least 1.
            prefix: Gives the slots of all tokens before them, where K and V of these layers are.
        """
        recomputer = self._recomputer
        if recomputer is None:
            return None
        physical = self._pool.arena.physical(host_pages)
        token_ids, behind = self._tokens([self._pool.arena.memory[i] for i in physical], prefix)
        if behind is None:
            return None
        return self._recompute(layers, [LoadedSpan(token_ids, behind, layers)], recomputer)

    def span(self, host_indices: torch.Tensor) -> LoadedSpan | None:
        """What is known of the pages of a load; None: they lack layers, and nothing can help."""
        span = self._span(
            host_indices, max(self._stored_from, self._pool.first_layer(host_indices))
        )
        # All that is queued becomes one restore, in which the same layers are recomputed.
        together = [*self._spans, span]
        if any(one.missing for one in together) and any(one.prefix is None for one in together):
            return None
        return span

    def _span(self, host_indices: torch.Tensor, missing: int) -> LoadedSpan:
        if self._recomputer is None:  # nobody will ask which tokens they are
            return LoadedSpan(np.empty(0, np.int64), None, missing)
        pages = self._pool.pages_of(host_indices)
        token_ids, prefix = self._tokens(pages, self.prefix or (lambda: None))
        return LoadedSpan(token_ids, prefix, missing)

    def _tokens(
        self, pages: Sequence[np.ndarray], prefix: Callable[[], torch.Tensor | None]
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """Token ids of pages, int64 ``[n]``, and the prefix if it is known and theirs."""
        layout = self._pool.page_layout
        positions = np.concatenate([layout.positions(page) for page in pages])
        token_ids = np.concatenate([layout.token_ids(page) for page in pages]).astype(np.int64)
        first = int(positions[0])
        if not np.array_equal(positions, np.arange(first, first + len(positions))):
            return token_ids, None
        if first == 0:
            return token_ids, torch.empty(0, dtype=torch.int64, device=self._device)
        slots = prefix()
        return token_ids, slots if slots is not None and len(slots) == first else None

    def add(self, span: LoadedSpan) -> None:
        """The load was queued."""
        self._spans.append(span)

    def add_lacking(self, span: LoadedSpan, slots: torch.Tensor, whole: np.ndarray) -> None:
        """The load was queued, and of some of its pages all layers are launched already.

        Args:
            span: Its tokens.
            slots: Where they go, int64 ``[n]``.
            whole: Those pages, bool ``[pages]``.
        """
        size = self._pool.page_size
        for run in runs(np.flatnonzero(~whole).tolist()):
            start, stop = run.start * size, run.stop * size
            behind = None if span.prefix is None else torch.cat((span.prefix, slots[:start]))
            self._spans.append(LoadedSpan(span.token_ids[start:stop], behind, span.missing))

    def forget(self) -> None:
        """Queued loads were dropped."""
        self._spans.clear()

    def next_recompute(self, *, any_ready: bool = False) -> Recompute | None:
        """How the first layers of what is queued are to be recomputed; None: all are loaded.

        With ``any_ready`` only those that must be: all others of some pages are restored already.
        """
        spans, self._spans = self._spans, []
        first = max((span.missing for span in spans), default=0)
        restored = _restored(spans)
        recomputer = self._recomputer
        if not spans or recomputer is None or len(restored) < len(spans):
            assert first == 0, "pages without their first layers were queued"
            return None
        tokens = sum(span.tokens for span in restored)
        pairs = sum(span.tokens * len(span.prefix) for span in restored)
        if not any_ready:
            first = max(first, self._partitioning.first_layers(tokens, pairs // tokens, "none"))
        return self._recompute(first, spans, recomputer) if first else None

    def _recompute(
        self, layers: int, spans: Sequence[LoadedSpan], recomputer: Recomputer
    ) -> Recompute:
        restored = _restored(spans)
        held = held_for_device(np.concatenate([span.token_ids for span in spans]), self._device)

        def fill(positions: torch.Tensor, slots: torch.Tensor) -> None:
            token_ids = held.to(slots.device, non_blocking=True)
            recomputer.run(layers, token_ids, positions, slots, restored)

        return Recompute(layers, fill)


def _restored(spans: Iterable[LoadedSpan]) -> list[RestoredSpan]:
    """Those whose prefix is known."""
    return [
        RestoredSpan(len(span.token_ids), span.prefix) for span in spans if span.prefix is not None
    ]
