"""Hidden states wait in the slots that their V will take: for MHA they have as many bytes."""

from __future__ import annotations

from typing import Any

import torch

_WORD = torch.int64


class PoolParking:
    """Room for the hidden states of one layer.

    Args:
        kvcache: SGLang's ``MHATokenToKVPool``; rows of V must hold a row (see :meth:`fits`).
        layer: Layer, as the pool numbers them.
        row_bytes: Bytes of one stored hidden state.
    """

    def __init__(self, kvcache: Any, layer: int, row_bytes: int) -> None:
        buffer = kvcache.v_buffer[layer]
        self._words = buffer.view(len(buffer), -1).view(_WORD)[:, : row_bytes // _WORD.itemsize]

    @staticmethod
    def fits(kvcache: Any, row_bytes: int) -> bool:
        """Whether every row of V has room for a hidden state of ``row_bytes`` bytes."""
        return row_bytes % _WORD.itemsize == 0 and all(
            buffer.is_contiguous()
            and buffer[0].nbytes >= row_bytes
            and buffer[0].nbytes % _WORD.itemsize == 0
            for buffer in kvcache.v_buffer
        )

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        """See :class:`~hcache_backend.restore.pipeline.Parking`."""
        self._words.index_copy_(0, slots, segments.view(_WORD).view(len(slots), -1))

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 ``[n, row_bytes]``."""
        return self._words.index_select(0, slots).view(torch.uint8)
