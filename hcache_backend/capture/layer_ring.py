"""Staging for a step that is too long for it: a ring of parts, which layers pass one by one."""

from __future__ import annotations

import torch

from hcache_backend.streams import Event


class LayerRing:
    """Parts of a piece of device memory, each for one layer of a step.

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
