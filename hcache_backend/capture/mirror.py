"""Hidden states of every token that is on the device, indexed by its slot in the KV pool."""

from __future__ import annotations

import numpy as np
import torch


class HiddenMirror:
    """Keeps, for each slot of the device's KV pool, the rows that made its K and V.

    A row is valid only for the current allocation of its slot: allocating the slot again, or
    loading other KV into it, invalidates the row until a forward pass or a restore fills all
    layers of it. Only the scheduler thread may use a mirror.

    Args:
        slots: Slots of the KV pool, the padding page included.
        layers: Layers of this stage.
        hidden_size: Width of a hidden state.
        dtype: Data type of the hidden states.
    """

    def __init__(self, slots: int, layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.rows = torch.zeros((layers, slots, hidden_size), dtype=dtype)
        self.positions = torch.zeros(slots, dtype=torch.int32)
        self.token_ids = torch.zeros(slots, dtype=torch.int32)
        self._valid = torch.zeros(slots, dtype=torch.bool)

    def invalidate(self, slots: torch.Tensor) -> None:
        """Forget the rows of ``slots`` (int64 ``[n]``)."""
        self._valid[slots.to("cpu")] = False

    def clear(self) -> None:
        """Forget every row."""
        self._valid.zero_()

    def put_layer(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` (``[n, hidden]``) of one layer to ``slots``; does not make them valid."""
        self.rows[layer].index_copy_(0, slots.to("cpu"), rows.to("cpu"))

    def commit(self, slots: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> None:
        """All layers of ``slots`` have been put: note their tokens and make them valid."""
        slots = slots.to("cpu")
        self.positions[slots] = positions.to("cpu", torch.int32)
        self.token_ids[slots] = ids.to("cpu", torch.int32)
        self._valid[slots] = True

    def all_valid(self, slots: torch.Tensor) -> bool:
        """Whether every one of ``slots`` has rows of its current allocation."""
        return bool(self.valid(slots).all())

    def valid(self, slots: torch.Tensor) -> torch.Tensor:
        """For each of ``slots`` whether its row is valid, bool ``[n]``."""
        return self._valid[slots.to("cpu")]

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
