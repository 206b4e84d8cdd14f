"""Encodes staged rows on their way to pages (stage two of capture)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hcache_kernels.codecs import Codec
from hcache_kernels.staging import WRONG_STEP

_AT_ONCE_BYTES = 64 << 20  # of rows encoded in one call: this device memory is in no plan


def stored_rows(
    codec: Codec, rows: torch.Tensor, marks: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields some layers, and their rows as pages hold them, on the current stream.

    ``rows`` are the model's, uint8 ``[layers, n, row_bytes]``, contiguous by layer; yielded ones
    are uint8 ``[some layers, n, codec.row_bytes]``. ``marks`` (int64 ``[layers, n]``) become
    :data:`WRONG_STEP` for rows that the codec cannot hold.
    """
    if codec.is_view:
        yield slice(None), rows
        return
    at_once = max(1, _AT_ONCE_BYTES // rows[0].numel())
    for first in range(0, len(rows), at_once):
        part = slice(first, first + at_once)
        values = rows[part].reshape(-1, rows.shape[2]).view(codec.dtype)
        encoded, ok = codec.encode(values)
        marks[part].masked_fill_(ok.logical_not_().view_as(marks[part]), WRONG_STEP)
        yield part, encoded.view(*marks[part].shape, -1)
