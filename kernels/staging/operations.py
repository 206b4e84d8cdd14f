"""``stage_rows`` and ``save_rows``: the torch reference of both, and the choice of the kernel.

Stage one takes the rows of one layer out of the forward pass into a staging buffer on the device.
It may be recorded in a CUDA graph, so everything that changes from step to step (where rows go, and
the step's number) is read from device memory. Beside each row it leaves the step's number: proof
that this layer's row was written by this step, and not by an earlier one.

Stage two moves the staged rows of many layers to their pages in host memory, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WRONG_STEP = -1
"""Mark of a row that its codec could not hold; no step has this number."""


@dataclass(frozen=True)
class StagedRows:
    """A staging buffer.

    Attributes:
        rows: Encoded rows, uint8 ``[layers, places, row_bytes]``, contiguous.
        marks: Number of the step that wrote each row, int64 ``[layers, places]``, contiguous.
    """

    rows: torch.Tensor
    marks: torch.Tensor


def stage_rows(
    rows: torch.Tensor,
    ok: torch.Tensor | None,
    places: torch.Tensor,
    step: torch.Tensor,
    staged: StagedRows,
    layer: int,
) -> None:
    """Stage one: copy the rows of one layer to their places in the staging buffer.

    Args:
        rows: Encoded rows, uint8 ``[n, row_bytes]``.
        ok: bool ``[n]``: which rows their codec could hold; None for all.
        places: int64 ``[n]``: where each row goes. Rows that nobody wants share one place.
        step: int64 ``[1]``: number of the step.
        staged: The buffer.
        layer: Which layer of the buffer.
    """
    if rows.is_cuda:
        from . import staging_triton

        if len(rows):
            staging_triton.stage_launch(rows, ok, places, step, staged, layer).run()
        return
    staged.rows[layer].index_copy_(0, places, rows)
    mark = step.expand(len(rows))
    if ok is not None:
        mark = torch.where(ok, mark, WRONG_STEP)
    staged.marks[layer].index_copy_(0, places, mark)


def save_rows(
    staged: torch.Tensor,
    slots: torch.Tensor,
    shadows: torch.Tensor,
    arena: torch.Tensor,
    segments: torch.Tensor,
    page_size: int,
    kept: range | None = None,
) -> None:
    """Stage two: copy staged rows to the shadow pages of their slots.

    Args:
        staged: Encoded rows, uint8 ``[layers, n, row_bytes]``; rows of a layer contiguous.
        slots: Slots of the KV pool, int64 ``[n]``, on the device.
        shadows: Physical page of every device page, int64 ``[device_pages]``, on the device.
        arena: uint8 ``[pages, page_bytes]``, memory that the device can write (pinned).
        segments: Offset in a page of each layer's segment, int64 ``[layers]``, on the device.
        page_size: Tokens a page.
        kept: The tokens of a page whose rows its segments hold, consecutive; None: all. The others
            are left out.
    """
    kept = kept or range(page_size)
    if staged.is_cuda:
        from . import staging_triton

        if len(slots):
            launch = staging_triton.save_launch(
                staged, slots, shadows, arena, segments, page_size, kept
            )
            launch.run()
        return
    row_bytes = staged.shape[-1]
    pages, rows = shadows[slots // page_size], slots % page_size - kept.start
    mine = (rows >= 0) & (rows < len(kept))
    pages, rows = pages[mine], rows[mine]
    for layer, start in enumerate(segments.tolist()):
        segment = arena[:, start : start + len(kept) * row_bytes]
        segment.unflatten(1, (len(kept), row_bytes))[pages, rows] = staged[layer, mine]
