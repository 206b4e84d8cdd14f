"""What gathering and scattering accept. Everything is refused before a kernel is launched."""

from __future__ import annotations

import torch

WORD = 8
"""Bytes that move together; lengths, offsets and page sizes are multiples of it."""


def check_pages(pages: torch.Tensor, offset: int, length: int) -> None:
    """Refuse memory that is no pages, and a segment that a page does not hold.

    Raises:
        ValueError: Names the argument, its value and what would be right.
    """
    if pages.dtype != torch.uint8 or pages.dim() != 2 or not pages.is_contiguous():
        raise ValueError(
            f"pages are {list(pages.shape)} of {pages.dtype}: must be contiguous uint8 "
            "[pages, page_bytes]"
        )
    for name, value in (("page_bytes", pages.shape[1]), ("offset", offset), ("length", length)):
        if value % WORD:
            raise ValueError(f"{name} is {value}: must be a multiple of {WORD}")
    if offset < 0 or length < 0 or offset + length > pages.shape[1]:
        raise ValueError(
            f"bytes {offset} to {offset + length} are not within a page of {pages.shape[1]}"
        )


def check_ids(name: str, ids: torch.Tensor, count: int, limit: int) -> None:
    """Refuse ids that are no vector, and, where they are on the CPU, ids out of range.

    Reads no values of the GPU, so it never synchronises: ids that come from there were checked by
    whoever made them.

    Args:
        name: What the message calls them.
        count: How many there must be.
        limit: What they must be below.

    Raises:
        ValueError: Names the ids and what would be right.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.shape != (count,):
        raise ValueError(
            f"{name} are {list(ids.shape)} of {ids.dtype}: must be int32 or int64 [{count}]"
        )
    if ids.is_cpu and count and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(
            f"{name} go from {int(ids.min())} to {int(ids.max())}: must be from 0 to {limit - 1}"
        )
