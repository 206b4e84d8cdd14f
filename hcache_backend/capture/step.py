"""A forward pass while it is being captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hcache_backend.capture.layer_ring import LayerRing
from hcache_backend.capture.ledger import StepEntry


@dataclass
class Step:
    """One forward pass that is being captured.

    Attributes:
        number: The step's number in the marks.
        where: Slots, positions and token ids, int64 ``[3, tokens]`` on the device.
        entry: What the ledger keeps of it.
        first: First place in the ring of places; or None, and its layers go round in ``ring``.
        marks: Who wrote each row, int64 ``[layers, tokens]`` on the device.
        layers_seen: How often Python saw each layer being staged.
    """

    tokens: int
    number: int
    where: torch.Tensor
    entry: StepEntry
    first: int | None
    marks: torch.Tensor
    layers_seen: list[int]
    ring: LayerRing | None = None
