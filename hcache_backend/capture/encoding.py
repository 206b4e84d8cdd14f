"""Stage two with a codec: staged rows are encoded before they go to pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hcache_kernels.codecs import Codec
from hcache_kernels.staging import WRONG_STEP

_AT_ONCE_BYTES = 64 << 20
"""So many bytes of rows are encoded at once: device memory that nobody planned."""


def stored_rows(
    codec: Codec, rows: torch.Tensor, marks: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows as pages hold them, some layers after the other, on the current stream.

    Args:
        rows: Rows as the model has them, uint8 ``[layers, n, row_bytes]``, those of a layer
            contiguous.
        marks: int64 ``[layers, n]``: rows that the codec cannot hold get :data:`WRONG_STEP`.

    Yields:
        Which layers, and their rows, uint8 ``[some layers, n, codec.row_bytes]``.
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
