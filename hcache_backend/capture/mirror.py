"""Hidden states of every token that is on the device, indexed by its slot in the KV pool."""

from __future__ import annotations

import numpy as np
import torch

from hcache_kernels.codecs import Codec


class HiddenMirror:
    """Keeps, encoded, for each slot of the device's KV pool the rows that made its K and V.

    A row is valid only for the current allocation of its slot: allocating the slot again, or
    loading other KV into it, invalidates the row until a forward pass or a restore fills all
    layers of it. A slot with a row that the codec cannot hold stays invalid. Only the scheduler
    thread may use a mirror.

    Args:
        slots: Slots of the KV pool, the padding page included.
        layers: Layers of this stage.
        codec: Encodes the rows; pages hold them as it does.

    Attributes:
        rows: Encoded rows, uint8 ``[layers, slots, row_bytes]``.
    """

    def __init__(self, slots: int, layers: int, codec: Codec) -> None:
        self.codec = codec
        self.rows = torch.zeros((layers, slots, codec.row_bytes), dtype=torch.uint8)
        self.positions = torch.zeros(slots, dtype=torch.int32)
        self.token_ids = torch.zeros(slots, dtype=torch.int32)
        self._valid = torch.zeros(slots, dtype=torch.bool)
        self._unencodable = torch.zeros(slots, dtype=torch.bool)

    def invalidate(self, slots: torch.Tensor) -> None:
        """Forget the rows of ``slots`` (int64 ``[n]``)."""
        slots = slots.to("cpu")
        self._valid[slots] = False
        self._unencodable[slots] = False

    def clear(self) -> None:
        """Forget every row."""
        self._valid.zero_()
        self._unencodable.zero_()

    def put_layer(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode ``rows`` (``[n, hidden]``) of one layer for ``slots``; does not make them valid.

        ``slots`` must have been invalidated since their last allocation.
        """
        slots = slots.to("cpu")
        encoded, ok = self.codec.encode(rows)
        self.put_encoded(layer, slots, encoded.to("cpu"))
        self._unencodable[slots] |= ~ok.to("cpu")

    def put_encoded(self, layer: int, slots: torch.Tensor, encoded: torch.Tensor) -> None:
        """As :meth:`put_layer`, for rows that are encoded already (uint8 ``[n, row_bytes]``)."""
        self.rows[layer].index_copy_(0, slots.to("cpu"), encoded)

    def commit(self, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> int:
        """All layers of ``slots`` have been put: note their tokens and make them valid.

        Returns:
            How many became valid; the codec could not hold the others.
        """
        slots = slots.to("cpu")
        self.positions[slots] = positions.to("cpu", torch.int32)
        self.token_ids[slots] = ids.to("cpu", torch.int32)
        self._valid[slots] = ~self._unencodable[slots]
        return int(self._valid[slots].sum())

    def all_valid(self, slots: torch.Tensor) -> bool:
        """Whether every one of ``slots`` has rows of its current allocation."""
        return bool(self.valid(slots).all())

    def valid(self, slots: torch.Tensor) -> torch.Tensor:
        """For each of ``slots`` whether its row is valid, bool ``[n]``."""
        return self._valid[slots.to("cpu")]

    def any_unencodable(self, slots: torch.Tensor) -> bool:
        """Whether the codec could not hold a row of one of ``slots``."""
        return bool(self._unencodable[slots.to("cpu")].any())

    def are_consecutive(self, slots: torch.Tensor, page_size: int) -> bool:
        """Whether ``slots`` hold consecutive positions that start at a page boundary."""
        positions = self.positions[slots.to("cpu")]
        first = int(positions[0])
        wanted = torch.arange(first, first + len(positions), dtype=torch.int32)
        return first % page_size == 0 and torch.equal(positions, wanted)

    def tokens(self, slots: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Positions and token ids of ``slots``, int32 ``[n]`` each."""
        slots = slots.to("cpu")
        return self.positions[slots].numpy(), self.token_ids[slots].numpy()
