"""Hidden states of pages that are recomputed whole, from the model to these pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.arena import Ids
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging, stored_rows
from hcache_backend.restore.layers import Recompute
from hcache_backend.streams import current_stream, host_tensor, to_device
from hcache_kernels.staging import save_rows


class RecomputedRows:
    """What the projections of one slice receive. Scheduler thread only.

    Args:
        capture: Says what pages hold of rows.
        staging: Says which rows these are.
        hooks: See them.
    """

    def __init__(self, capture: StagedCapture, staging: Staging, hooks: HiddenCapture) -> None:
        self._capture = capture
        self._staging = staging
        self._hooks = hooks
        self._rows: torch.Tensor | None = None  # [layers, n, hidden], of the model's dtype
        self._seen: list[int] = []  # of each layer, how many

    def taken_from(self, recompute: Recompute) -> Recompute:
        """The same, and its rows are taken; if a layer shows too few it has failed."""

        def fill(positions: npt.NDArray[np.int64], slots: torch.Tensor) -> None:
            shape = self._staging.layers, len(slots), self._staging.width
            self._rows = torch.empty(shape, dtype=self._staging.dtype, device=slots.device)
            self._seen = [0] * len(self._rows)
            with self._hooks.to(self._take):
                recompute.fill(positions, slots)
            if any(seen != len(slots) for seen in self._seen):
                raise RuntimeError(f"layers showed {self._seen} rows of {len(slots)}")

        return recompute._replace(fill=fill)

    def _take(self, layer: int, hidden: object) -> None:
        assert self._rows is not None and isinstance(hidden, torch.Tensor)
        start = self._seen[layer]
        self._seen[layer] = stop = start + len(hidden)
        self._rows[layer, start:stop] = hidden

    def save(self, pages: Ids) -> torch.Tensor:
        """Copy them to physical ``pages`` (int64 ``[p]``) of the arena, on the current stream.

        Returns:
            Which pages the codec holds whole, bool ``[p]``, on its way to the CPU.
        """
        capture, rows, self._rows = self._capture, self._rows, None
        assert rows is not None
        layout = capture.arena.layout
        current_stream(capture.device).keep(rows)
        marks = torch.zeros(rows.shape[:2], dtype=torch.int64, device=capture.device)
        table = to_device(pages, capture.device)
        slots = torch.arange(rows.shape[1], device=capture.device)
        encoded = stored_rows(capture.codec, rows.view(torch.uint8), marks) if len(rows) else ()
        for part, stored in encoded:
            at = capture.segments[part], layout.page_size, layout.kept
            save_rows(stored, slots, table, capture.memory, *at)
        fits = (marks == 0).all(0).view(-1, layout.page_size).all(1)
        return host_tensor(fits.shape, torch.bool, capture.device).copy_(fits, non_blocking=True)
