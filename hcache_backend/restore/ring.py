"""The ring of device buffers that segments of hidden states arrive in."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hcache_backend.page import PageLayout
from hcache_backend.streams import Event, Stream

RUN_AHEAD = 3
"""Segments of the longest restore that the ring holds: one is projected, one has arrived, and one
is arriving. A shorter restore runs further ahead in the same memory."""


def largest_segment(layout: PageLayout, hidden: Iterable[int]) -> int:
    """Bytes of the largest segment of ``hidden`` layers, its shares together; at least 1."""
    return max((layout.segment_bytes[layer] * layout.share.of for layer in hidden), default=1)


def ring_bytes(layout: PageLayout, chunk_tokens: int, hidden: Iterable[int]) -> int:
    """Device memory that a pipeline takes; projections need theirs for one chunk besides.

    K and V of layers that are stored as such go past it, straight to the pool.
    """
    chunk_pages = max(1, chunk_tokens // layout.page_size)
    return RUN_AHEAD * chunk_pages * largest_segment(layout, hidden)


class Ring:
    """The ring of one restore: equal parts, each free again when its last user is done."""

    def __init__(self, memory: torch.Tensor, part_bytes: int) -> None:
        self._memory = memory
        self._part_bytes = part_bytes
        self._taken = 0
        self._users: list[Event] = []
        self.parts = len(memory) // part_bytes

    def next(self, stream: Stream) -> torch.Tensor:
        """The next part, uint8 ``[part_bytes]``; ``stream`` waits until it is free."""
        if self._taken >= self.parts:
            stream.wait(self._users[self._taken - self.parts])
        start = self._taken % self.parts * self._part_bytes
        self._taken += 1
        return self._memory[start : start + self._part_bytes]

    def used(self, until: Event) -> None:
        """The oldest part for which this was not called yet is in use until then."""
        self._users.append(until)
