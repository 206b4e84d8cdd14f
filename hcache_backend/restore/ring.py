"""The ring of device buffers in which segments arrive, or are encoded before they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from hcache_backend.format.page import PageLayout
from hcache_backend.plan.restore import RUN_AHEAD
from hcache_backend.streams import Event, Stream


def part_bytes(layout: PageLayout, layers: Iterable[int]) -> int:
    """Bytes that ``layers`` have in a page, of all shards."""
    return sum(layout.segment_bytes[layer] for layer in layers) * layout.shard.of


def ring_bytes(layout: PageLayout, chunk_tokens: int, arriving: Iterable[range]) -> int:
    """Device memory of a pipeline's ring, for groups of layers that arrive together. Projections
    need memory for one chunk besides; K and V that are stored as such bypass the ring."""
    chunk_pages = max(1, chunk_tokens // layout.page_size)
    largest = max((part_bytes(layout, layers) for layers in arriving), default=1)
    return RUN_AHEAD * chunk_pages * largest


class Ring:
    """The ring of a pipeline; each restore takes equal parts in turn. A part is taken behind the
    projections of any restore that still use its memory, and nothing else."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._part_bytes = len(memory)
        self._next = 0  # number of the part to be taken next
        self._taken: deque[range] = deque()  # parts whose last use is not known yet
        self._users: list[tuple[range, Event]] = []  # who uses which bytes, and until when

    @property
    def bytes(self) -> int:
        return len(self._memory)

    def begin(self, part_bytes: int) -> int:
        """Divide the ring into parts of ``part_bytes`` for a new restore; returns how many."""
        behind = self._next * self._part_bytes  # the part that was taken last
        self._part_bytes, self._next = part_bytes, -(-behind // part_bytes)
        self._taken.clear()  # the stream that copies to them will take them again
        return len(self._memory) // part_bytes

    def next(self, stream: Stream) -> torch.Tensor:
        """Take the next part, uint8 ``[part_bytes]``; ``stream`` waits until it is free."""
        start = self._next % (len(self._memory) // self._part_bytes) * self._part_bytes
        part = range(start, start + self._part_bytes)
        self._next = part.stop // self._part_bytes
        users, self._users = self._users, []
        for used, until in users:
            if used.start < part.stop and part.start < used.stop:
                stream.wait(until)
                outside = range(used.start, part.start), range(part.stop, used.stop)
                self._users += [(piece, until) for piece in outside if piece]
            else:
                self._users.append((used, until))
        self._taken.append(part)
        return self._memory[part.start : part.stop]

    def mark_used(self, until: Event) -> None:
        """The oldest taken part for which this was not called yet is in use until that event."""
        self._users.append((self._taken.popleft(), until))
