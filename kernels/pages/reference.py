"""Gathering and scattering in plain torch."""

from __future__ import annotations

import torch


def gather_pages_reference(
    pages: torch.Tensor, page_ids: torch.Tensor, offset: int, out: torch.Tensor
) -> None:
    """``out[i] = pages[page_ids[i], offset : offset + length]``."""
    out.copy_(pages[:, offset : offset + out.shape[1]].index_select(0, page_ids))


def scatter_rows_reference(
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    row_ids: torch.Tensor,
    offset: int,
) -> None:
    """Row ``i`` becomes row ``row_ids[i]`` of the segment at ``offset`` of page ``page_ids[i]``."""
    page_rows = (pages.shape[1] - offset) // rows.shape[1]
    segment = pages[:, offset : offset + page_rows * rows.shape[1]]
    segment.unflatten(1, (page_rows, -1))[page_ids.long(), row_ids.long()] = rows
