"""A forward pass while it is being captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hcache_backend.capture.ledger import StepEntry
from hcache_backend.streams import Event


class LayerRing:
    """Staging for a step that is too long for it: parts, which layers pass one by one.

    Args:
        memory: uint8 ``[bytes]``, room for at least one part.
        part_bytes: Bytes of a layer.
    """

    def __init__(self, memory: torch.Tensor, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        parts = len(memory) // part_bytes
        self._parts = memory[: parts * part_bytes].split(part_bytes)
        self._moved: list[Event | None] = [None] * parts
        self._last = -1

    def next(self) -> tuple[torch.Tensor, Event | None]:
        """The next part, uint8 ``[part_bytes]``, and what passes when it may be written."""
        self._last = (self._last + 1) % len(self._parts)
        return self._parts[self._last], self._moved[self._last]

    def used(self, moved: Event) -> None:
        """The part that came last may be written once ``moved`` has passed."""
        self._moved[self._last] = moved


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
