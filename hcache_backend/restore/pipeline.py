"""Restore: pages of the arena -> K and V in the device's pool, layer by layer, without bubbles.

Two streams work at once (paper section 4.1). The copy stream brings layer segments to a ring of
device buffers, as far ahead as the ring allows; the compute stream projects them. Segments that
hold K and V need no compute and go to the pool on the copy stream. The first layers may be
recomputed instead, whatever is stored of them: that runs on the engine's stream, whose state the
model's code wants, while segments of later layers arrive, and before any is projected. Each layer
has an event, so the engine's forward pass may start on layer 0 while layer 1 is on its way.

Where the projection is not to begin at once the ring would soon be full and the bus idle. Segments
then wait in the pool itself: the slots of their layer have as much room, and nobody reads them
before the layer is done.

Whatever a restore consists of (many nodes, many requests), every layer is one copy and one
projection, unless it has more tokens than a projection may take at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.page import PageLayout
from hcache_backend.streams import (
    Event,
    Stream,
    current_stream,
    held_for_device,
    new_stream,
)
from hcache_kernels.pages import gather_pages

RUN_AHEAD = 3
"""Segments of the longest restore that the ring holds: one is projected, one has arrived, and one
is arriving. A shorter restore runs further ahead in the same memory."""

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes K and V of one layer to the pool: ``fill(segments, positions, slots)`` with uint8
``[pages, segment_bytes]`` and int64 ``[pages * page_size]`` twice, all on the device."""

Gather = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
"""Copies a segment of many pages: ``gather(memory, pages, offset, out)`` with uint8
``[all pages, page_bytes]``, int64 ``[p]`` on the device, bytes, uint8 ``[p, segment_bytes]``."""


class Parking(Protocol):
    """Room for segments in the slots that their K and V will take."""

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        """Leave ``segments`` (uint8 ``[pages, segment_bytes]``) in ``slots`` (int64 ``[n]``)."""

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """What was left in ``slots``, as it was given but for the first dimension."""


class RestoredLayer(NamedTuple):
    """How one layer comes back.

    Attributes:
        method: ``hidden``: ``fill`` projects, on the compute stream. ``kv``: it only stores, on
            the copy stream. ``recompute``: nothing is stored (the segment's length is 0).
        fill: Writes the layer to the pool; None for ``recompute``.
        parking: Where segments can wait for ``fill``, if they can.
    """

    method: Literal["hidden", "kv", "recompute"]
    fill: Fill | None
    parking: Parking | None = None


class Recompute(NamedTuple):
    """How the first layers of one restore are recomputed.

    Attributes:
        layers: How many, at least those of which nothing is stored.
        fill: Writes K and V of all of them for all tokens, on the current stream:
            ``fill(positions, slots)``, int64 ``[pages * page_size]`` each, on the device.
    """

    layers: int
    fill: Callable[[torch.Tensor, torch.Tensor], None]


StreamName = Literal["copy", "compute"]


class Span(NamedTuple):
    """What a stream did for one layer, in milliseconds since the restore began.

    Recomputation of several layers is one span of the first one's on the compute stream, which
    waits for it.
    """

    stream: StreamName
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class RestoreReport:
    """One finished restore.

    Attributes:
        tokens: How many were restored.
        bytes: What crossed the bus, by method.
        spans: What the streams did.
    """

    tokens: int
    bytes: Mapping[str, int]
    spans: tuple[Span, ...]

    @property
    def total_ms(self) -> float:
        return max(span.end for span in self.spans)

    def busy_ms(self, stream: str) -> float:
        return sum(span.end - span.start for span in self.spans if span.stream == stream)

    def idle_ms(self, stream: str) -> float:
        """The stream's bubbles."""
        return self.total_ms - self.busy_ms(stream)


class Restore:
    """A restore that was launched.

    Attributes:
        layers: For each layer, an event behind the last of its K and V.
    """

    def __init__(
        self, tokens: int, size: Mapping[str, int], begin: Event, device: torch.device
    ) -> None:
        self.layers: list[Event] = []
        self._device = device
        self._tokens = tokens
        self._bytes = size
        self._begin = begin
        self._timed: list[tuple[StreamName, int, Event, Event]] = []

    def wait_for_layer(self, layer: int) -> None:
        """Let the current stream wait until K and V of ``layer`` are in the pool.

        Raises:
            StreamFailed: On a CPU, when they could not be restored: they must not be used.
        """
        current_stream(self._device).wait(self.layers[layer])

    def done(self) -> bool:
        """Whether all layers are in the pool."""
        return all(event.query() for event in self.layers)

    def report(self) -> RestoreReport:
        """Times of a restore that is done."""
        first = self._begin
        spans = (
            Span(stream, layer, start.milliseconds_since(first), end.milliseconds_since(first))
            for stream, layer, start, end in self._timed
        )
        return RestoreReport(self._tokens, self._bytes, tuple(spans))


class RestorePipeline:
    """Launches restores. Only the scheduler thread may use it.

    Args:
        memory: The arena, uint8 ``[pages, page_bytes]``; pinned where the device is a GPU.
        layout: Layout of a page.
        layers: How every layer comes back.
        chunk_tokens: Tokens that one projection takes at most.
        device: Where the model is.
        gather: Copies segments to the device; None: :func:`gather_segments`.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        layout: PageLayout,
        layers: Sequence[RestoredLayer],
        chunk_tokens: int,
        device: torch.device | str,
        gather: Gather | None = None,
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._layers = layers
        self._chunk_pages = max(1, chunk_tokens // layout.page_size)
        self._device = torch.device(device)
        self._gather = gather or gather_segments
        self._largest = max(1, *layout.segment_bytes)  # 0: all layers are recomputed
        size = ring_bytes(layout, chunk_tokens)
        self._ring = torch.empty(size, dtype=torch.uint8, device=device)
        self._copy = new_stream(device, "copy")
        self._compute = new_stream(device, "compute")
        self._unread: deque[Restore] = deque()

    @torch.no_grad()
    def start(
        self,
        pages: npt.NDArray[np.int64],
        slots: torch.Tensor,
        recompute: Recompute | None = None,
    ) -> Restore:
        """Launch the restore of whole pages, behind the current stream's work of this moment.

        The pages must stay as they are until all layers are done.

        Args:
            pages: Physical pages of the arena, int64 ``[p]``, any order.
            slots: Slots of their tokens, int64 ``[p * page_size]``, on the device.
            recompute: For the first layers; None: all segments are there.

        Returns:
            The restore. Its layers are in the pool when their events have passed.

        Raises:
            ValueError: Nothing is stored of a layer, and it is not to be recomputed.
        """
        first = recompute.layers if recompute else 0
        loaded = range(first, len(self._layers))
        if any(self._layers[index].fill is None for index in loaded):
            raise ValueError(f"layers after the first {first} are not stored")
        device, moved = self._device, Counter[str]()
        for index in loaded:
            moved[self._layers[index].method] += len(pages) * self._layout.segment_bytes[index]
        headers = self._layout.positions(self._memory.numpy())
        held_pages = held_for_device(pages, device)
        held_positions = held_for_device(headers[pages].reshape(-1).astype(np.int64), device)
        page_ids = torch.empty(len(pages), dtype=torch.int64, device=device)
        positions = torch.empty(len(slots), dtype=torch.int64, device=device)
        now = current_stream(device)
        self._copy.wait(now.record())
        self._copy.wait(self._compute.record())  # the restore before may still use the ring
        for stream in (self._copy, self._compute):
            for tensor in (page_ids, positions, slots):
                stream.keep(tensor)

        def bring_indices() -> None:
            page_ids.copy_(held_pages, non_blocking=True)
            positions.copy_(held_positions, non_blocking=True)

        restore = Restore(len(slots), moved, self._copy.record(timed=True), device)
        self._copy.run(bring_indices)
        ready = self._copy.record()
        ring = _Ring(self._ring, min(len(pages), self._chunk_pages) * self._largest)
        parts = deque(self._parts(loaded, page_ids, positions, slots))
        arrived: deque[_Arrived] = deque()
        parks = recompute is not None and all(self._can_wait(index) for index in loaded)
        while parts and len(arrived) < ring.parts - parks:
            arrived.append(self._bring(restore, parts.popleft(), ring))
        if parks and parts:
            room = ring.next(self._copy)  # what passes through it is gone before the next comes
            arrived += [self._park(restore, part, room) for part in parts]
            parts.clear()
        if recompute is not None:
            now.wait(ready)  # and what restores before it wrote of the prefix
            start = now.record(timed=True)
            now.run(lambda: recompute.fill(positions, slots))
            done = now.record(timed=True)
            self._compute.wait(done)
            restore._timed.append(("compute", 0, start, done))
            restore.layers += [done] * first
        while arrived:
            item = arrived.popleft()
            filled = self._fill(restore, item, ring)
            if item.part.is_last:
                restore.layers.append(filled)
            if parts:
                arrived.append(self._bring(restore, parts.popleft(), ring))
        self._unread.append(restore)
        return restore

    def _parts(
        self,
        layers: range,
        page_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> Iterator[_Part]:
        step, size = self._chunk_pages, self._layout.page_size
        for index in layers:
            for start in range(0, len(page_ids), step):
                tokens = slice(start * size, (start + step) * size)
                yield _Part(
                    index,
                    page_ids[start : start + step],
                    positions[tokens],
                    slots[tokens],
                    start + step >= len(page_ids),
                )

    def _can_wait(self, layer: int) -> bool:
        method, _, parking = self._layers[layer]
        return method == "kv" or parking is not None

    def _bring(self, restore: Restore, part: _Part, ring: _Ring) -> _Arrived:
        """Copy a part to the ring; a part of K and V goes on to the pool at once."""
        return self._copy_part(restore, part, ring.next(self._copy), None)

    def _park(self, restore: Restore, part: _Part, room: torch.Tensor) -> _Arrived:
        """Copy a part through ``room`` to the pool, where hidden states wait."""
        return self._copy_part(restore, part, room, self._layers[part.layer].parking)

    def _copy_part(
        self, restore: Restore, part: _Part, room: torch.Tensor, parking: Parking | None
    ) -> _Arrived:
        offset = self._layout.segment_offsets[part.layer]
        length = self._layout.segment_bytes[part.layer]
        buffer = room[: len(part.page_ids) * length].view(-1, length)
        method, fill, _ = self._layers[part.layer]
        start = self._copy.record(timed=True)
        self._copy.run(lambda: self._gather(self._memory, part.page_ids, offset, buffer))
        if method == "kv" and fill is not None:
            self._copy.run(lambda: fill(buffer, part.positions, part.slots))
        elif parking is not None:
            self._copy.run(lambda: parking.put(buffer, part.slots))
        copied = self._copy.record(timed=True)
        restore._timed.append(("copy", part.layer, start, copied))
        return _Arrived(part, None if parking else buffer, copied)

    def _fill(self, restore: Restore, arrived: _Arrived, ring: _Ring) -> Event:
        """Write a part to the pool; an event behind that."""
        part, buffer, copied = arrived
        method, fill, parking = self._layers[part.layer]
        if method == "kv" or fill is None:
            ring.used(copied)
            return copied

        def project() -> None:
            segments = buffer
            if segments is None:
                assert parking is not None
                segments = parking.take(part.slots)
            fill(segments, part.positions, part.slots)

        self._compute.wait(copied)
        start = self._compute.record(timed=True)
        self._compute.run(project)
        filled = self._compute.record(timed=True)
        restore._timed.append(("compute", part.layer, start, filled))
        ring.used(filled)
        return filled

    def finished(self) -> list[RestoreReport]:
        """Reports of the restores that are done and were not reported yet, oldest first."""
        reports = []
        while self._unread and self._unread[0].done():
            reports.append(self._unread.popleft().report())
        return reports


def ring_bytes(layout: PageLayout, chunk_tokens: int) -> int:
    """Device memory that a pipeline takes; projections need theirs for one chunk besides."""
    chunk_pages = max(1, chunk_tokens // layout.page_size)
    return RUN_AHEAD * chunk_pages * max(1, *layout.segment_bytes)


class _Part(NamedTuple):
    """What one copy brings: a layer of some pages."""

    layer: int
    page_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    is_last: bool


class _Arrived(NamedTuple):
    """A part whose copy was launched, where it is (None: parked), and the event behind the copy."""

    part: _Part
    buffer: torch.Tensor | None
    copied: Event


class _Ring:
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


def gather_segments(
    memory: torch.Tensor, pages: torch.Tensor, offset: int, out: torch.Tensor
) -> None:
    """:data:`Gather` by one kernel that reads over the bus, or by torch on the CPU."""
    gather_pages(memory, pages, offset, out.shape[1], out=out)
