"""K and V in pages of the KV pool <-> their encoded segments in our pages, by codec ``exp4``.

The segments of a layer are K, then V; each is one group of heads after the other, and each group
its units, which are runs of tokens (:mod:`hcache_backend.units`). One launch takes all pages of a
save or a load. Encoding writes device memory, or pages in pinned memory right over the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..pages import check_ids
from .base import UnsupportedRows
from .exp4 import Cut, Exp4Codec, decode_launch, encode_launch
from .exp4_code import REFERENCE_VALUES, decode_units, encode_units


def segment_bytes(planes: int, cut: Cut) -> int:
    """Bytes of the encoded units of a page in so many planes.

    Raises:
        UnsupportedRows: ``exp4`` does not take units of that size.
    """
    if cut.width % 2:
        raise UnsupportedRows(
            f"codec 'exp4' takes an even number of values per token and group, not {cut.width}"
        )
    return planes * cut.units * Exp4Codec(cut.values, torch.bfloat16).row_bytes


def encode_segments(
    planes: Sequence[torch.Tensor],
    items: torch.Tensor,
    cut: Cut,
    memory: torch.Tensor,
    pages: torch.Tensor,
    offset: int,
    fits: torch.Tensor,
) -> None:
    """Encode pages of the pool; the bytes of a unit that does not fit mean nothing.

    Args:
        planes: K and V of a layer, or one of them: bfloat16 ``[slots, heads, dim]`` of one shape,
            contiguous, whose slots are whole pages of the pool.
        items: Which pages of the pool, int64 ``[p]``, on their device. Their values are checked
            only on the CPU, as those of ``pages``.
        cut: The units of such a page.
        memory: uint8 ``[all pages, page_bytes]``, contiguous: memory that the device can write.
        pages: The page of each item there, int64 ``[p]``, likewise.
        offset: Where the units of a page begin in it, a multiple of 8; K and V follow each other.
        fits: Which units fit, bool ``[p, planes * units]``, contiguous: written likewise.

    Raises:
        ValueError: The arguments do not fit together. Nothing was written.
    """
    length = _check(planes, items, cut)
    if memory.dtype != torch.uint8 or memory.dim() != 2 or not memory.is_contiguous():
        raise ValueError(
            f"memory is {list(memory.shape)} of {memory.dtype}: must be contiguous uint8 "
            "[pages, page_bytes]"
        )
    if offset % 8 or memory.shape[1] % 8 or not 0 <= offset <= memory.shape[1] - length:
        raise ValueError(
            f"bytes {offset} to {offset + length} of pages of {memory.shape[1]} bytes: must be "
            "within a page and begin at a multiple of 8, as each page"
        )
    check_ids("pages", pages, len(items), len(memory), (torch.int64,))
    shape = (len(items), len(planes) * cut.units)
    if fits.dtype != torch.bool or fits.shape != shape or not fits.is_contiguous():
        raise ValueError(
            f"fits is {list(fits.shape)} of {fits.dtype}: must be contiguous bool {list(shape)}"
        )
    if planes[0].is_cuda:
        encode_launch(planes, items, cut, memory, pages, offset, fits).run()
        return
    encoded, fits[:] = encode_segments_reference(planes, items, cut)
    memory[pages, offset : offset + length] = encoded


def decode_segments(
    encoded: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor, cut: Cut
) -> None:
    """Decode segments into pages of the pool, whatever their bytes are.

    Args:
        encoded: Contiguous uint8 ``[p, segment_bytes]``, on the device of the pool.
        planes: As in :func:`encode_segments`; so ``items`` and ``cut``. An item that is there
            twice gets the values of either.

    Raises:
        ValueError: The arguments do not fit together. Nothing was written.
    """
    shape = (len(items), _check(planes, items, cut))
    if encoded.dtype != torch.uint8 or encoded.shape != shape or not encoded.is_contiguous():
        raise ValueError(
            f"encoded is {list(encoded.shape)} of {encoded.dtype}: must be contiguous uint8 "
            f"{list(shape)}"
        )
    if planes[0].is_cuda:
        decode_launch(encoded, planes, items, cut).run()
        return
    decode_segments_reference(encoded, planes, items, cut)


def encode_segments_reference(
    planes: Sequence[torch.Tensor], items: torch.Tensor, cut: Cut
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoded segments of pages, uint8 ``[p, segment_bytes]``, and which of their units fit."""
    at_once = max(1, REFERENCE_VALUES // (len(planes) * cut.units * cut.values))
    encoded, fits = [], []
    for some in items.split(at_once):
        units = torch.cat([_by_unit(plane, cut)[some] for plane in planes], dim=1)
        parts, fit = encode_units(units.reshape(-1, cut.values))
        encoded.append(parts.view(len(some), -1))
        fits.append(fit.view(len(some), -1))
    return torch.cat(encoded), torch.cat(fits)


def decode_segments_reference(
    encoded: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor, cut: Cut
) -> None:
    """What :func:`decode_segments` does, in plain torch."""
    units = len(planes) * cut.units
    at_once = max(1, REFERENCE_VALUES // (units * cut.values))
    for some, there in zip(encoded.split(at_once), items.split(at_once), strict=True):
        decoded = decode_units(some.view(len(some) * units, -1), cut.values)
        parts = decoded.view(len(some), len(planes), cut.groups, cut.pieces, cut.tokens, cut.width)
        for number, plane in enumerate(planes):
            _by_unit(plane, cut)[there] = parts[:, number]


def _by_unit(plane: torch.Tensor, cut: Cut) -> torch.Tensor:
    """View of a plane: ``[pages, groups, pieces, tokens, width]``."""
    return plane.view(-1, cut.pieces, cut.tokens, cut.groups, cut.width).permute(0, 3, 1, 2, 4)


def _check(planes: Sequence[torch.Tensor], items: torch.Tensor, cut: Cut) -> int:
    """Bytes of the encoded units of a page; a ValueError for what is no planes cut like that."""
    length = segment_bytes(len(planes), cut)
    if len(planes) not in (1, 2):
        raise ValueError(f"planes are {len(planes)}: must be K and V, or one of them")
    first = planes[0]
    for plane in planes:
        if plane.dtype != torch.bfloat16 or not plane.is_contiguous() or plane.shape != first.shape:
            raise ValueError(
                f"planes have one of {list(plane.shape)} of {plane.dtype}: all must be contiguous "
                f"bfloat16 {list(first.shape)}"
            )
    row = plane[0].numel()
    tokens = cut.tokens * cut.pieces
    if row != cut.groups * cut.width or len(first) % tokens:
        raise ValueError(
            f"planes have {len(first)} slots of {row} values: must be whole pages of {tokens} "
            f"slots of {cut.groups * cut.width} values"
        )
    check_ids("items", items, len(items), len(first) // tokens, (torch.int64,))
    return length
