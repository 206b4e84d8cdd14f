"""A forward pass while it is captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hcache_backend.capture.ledger import StepEntry
from hcache_backend.streams import Event


class LayerRing:
    """Staging memory for a step that is too long for its places: layers use its parts in turn."""

    def __init__(self, memory: torch.Tensor, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        parts = len(memory) // part_bytes
        self._parts = memory[: parts * part_bytes].split(part_bytes)
        self._moved: list[Event | None] = [None] * parts
        self._last = -1

    def next(self) -> tuple[torch.Tensor, Event | None]:
        """The next part, uint8 ``[part_bytes]``, and the event after which it may be written."""
        self._last = (self._last + 1) % len(self._parts)
        return self._parts[self._last], self._moved[self._last]

    def used(self, moved: Event) -> None:
        """The last part may be written again once ``moved`` has passed."""
        self._moved[self._last] = moved


@dataclass
class Step:
    """One forward pass that is being captured."""

    tokens: int
    number: int  # in the marks
    where: torch.Tensor  # slots, positions and token ids, int64 [3, tokens] on the device
    entry: StepEntry
    first: int | None  # in the ring of places; None: its layers go round in the ring
    marks: torch.Tensor  # the step that wrote each row, int64 [layers, tokens] on the device
    layers_seen: list[int]  # how often Python saw each layer being staged
    ring: LayerRing | None = None
