"""K and V of several layers in one launch: where each of them is, for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .launch import alignment

Planes = tuple[torch.Tensor, torch.Tensor]


class LayerTable(NamedTuple):
    """Layers whose K and V look alike, on one GPU, and their segments in pages.

    A kernel takes the layer of a program from the grid, or from the number of its part.
    """

    planes: Planes  # K and V of the first layer
    addresses: torch.Tensor  # of K and V of each layer, int64 [layers, 2], on the device
    offsets: torch.Tensor  # of each layer's segment in a page, int64 [layers], on the device
    aligned: int  # the largest of 16, 8, 4, 2 and 1 that divides all of these

    @staticmethod
    def of(planes: Sequence[Planes], offsets: Sequence[int]) -> LayerTable:
        """The table of layers with these ``planes``, contiguous, and ``offsets``; to be kept."""
        first, addresses = planes[0], [[plane.data_ptr() for plane in both] for both in planes]
        device = first[0].device
        flat = [address for both in addresses for address in both]
        return LayerTable(
            first,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.tensor(offsets, dtype=torch.int64, device=device),
            alignment(*flat, *offsets),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def arguments(self) -> dict[str, Any]:
        """What kernels are given; of one layer alone (:data:`ONE_LAYER`) there is no table."""
        return {"table": self.addresses, "offsets": self.offsets}


ONE_LAYER: dict[str, Any] = {"table": None, "offsets": None}
