"""Copies between pages and the device, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernel import WORD


def gather_pages_reference(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    rows: torch.Tensor,
    *,
    save: bool = False,
) -> None:
    """``rows[i] = pages[page_ids[i], offset : offset + length]``, or the other way round."""
    end = offset + rows.shape[1]
    if save:
        words = pages.view(torch.int64)[:, offset // WORD : end // WORD]
        words[page_ids.long()] = rows.view(torch.int64)
    else:
        torch.index_select(pages[:, offset:end], 0, page_ids, out=rows)


def gather_planes_reference(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: Sequence[torch.Tensor],
    pool_ids: torch.Tensor,
) -> None:
    """``plane[pool_ids[i], token, group] = plane of page_ids[i] [group, token]``, for K and V."""
    start = offset // WORD
    for plane in pool:
        words = plane.view(torch.int64)
        _, tokens, groups, row = words.shape
        end = start + tokens * groups * row
        found = pages.view(torch.int64)[:, start:end].index_select(0, page_ids)
        words.index_copy_(0, pool_ids.long(), found.view(-1, groups, tokens, row).transpose(1, 2))
        start = end
