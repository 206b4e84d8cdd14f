"""Restore: pages of the arena -> K and V in the device's pool, layer by layer, without bubbles.

Two streams work at once (paper section 4.1). The copy stream brings layer segments to a ring of
device buffers, as far ahead as the ring allows; the compute stream projects them. Segments that
hold K and V need no compute and go to the pool on the copy stream; layers that are recomputed need
no segment, and hold up no copy. Each layer has an event, so the engine's forward pass may start on
layer 0 while layer 1 is on its way.

Whatever a restore consists of (many nodes, many requests), every layer is one copy and one
projection, unless it has more tokens than a projection may take at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class RestoredLayer(NamedTuple):
    """How one layer comes back.

    Attributes:
        method: ``hidden``: ``fill`` projects, on the compute stream. ``kv``: it only stores, on
            the copy stream. ``recompute``: it needs no segment (its length is 0), and is called
            once with all tokens, on the compute stream.
        fill: Writes the layer to the pool.
    """

    method: Literal["hidden", "kv", "recompute"]
    fill: Fill


class Span(NamedTuple):
    """What a stream did for one layer, in milliseconds since the restore began."""

    stream: Literal["copy", "compute"]
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
        self._timed: list[tuple[Literal["copy", "compute"], int, Event, Event]] = []

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
    def start(self, pages: npt.NDArray[np.int64], slots: torch.Tensor) -> Restore:
        """Launch the restore of whole pages, behind the current stream's work of this moment.

        The pages must stay as they are until all layers are done.

        Args:
            pages: Physical pages of the arena, int64 ``[p]``, any order.
            slots: Slots of their tokens, int64 ``[p * page_size]``, on the device.

        Returns:
            The restore. Its layers are in the pool when their events have passed.
        """
        size, device = self._layout.page_size, self._device
        moved: Counter[str] = Counter()
        for layer, length in zip(self._layers, self._layout.segment_bytes, strict=True):
            moved[layer.method] += len(pages) * length
        headers = self._layout.positions(self._memory.numpy())
        held_pages = held_for_device(pages, device)
        held_positions = held_for_device(headers[pages].reshape(-1).astype(np.int64), device)
        page_ids = torch.empty(len(pages), dtype=torch.int64, device=device)
        positions = torch.empty(len(slots), dtype=torch.int64, device=device)
        self._copy.wait(current_stream(device).record())
        self._copy.wait(self._compute.record())  # the restore before may still use the ring
        for stream in (self._copy, self._compute):
            for tensor in (page_ids, positions, slots):
                stream.keep(tensor)

        def bring_indices() -> None:
            page_ids.copy_(held_pages, non_blocking=True)
            positions.copy_(held_positions, non_blocking=True)

        restore = Restore(len(slots), moved, self._copy.record(timed=True), device)
        self._copy.run(bring_indices)
        self._compute.wait(self._copy.record())  # a recomputed layer needs them before any segment
        ring = _Ring(self._ring, min(len(pages), self._chunk_pages) * self._largest)
        for index, layer in enumerate(self._layers):
            step = self._chunk_pages if layer.method != "recompute" else len(pages)
            for start in range(0, len(pages), step):
                chunk = slice(start, start + step)
                tokens = slice(start * size, (start + step) * size)
                done = self._launch(
                    restore,
                    index,
                    layer,
                    page_ids[chunk],
                    positions[tokens],
                    slots[tokens],
                    ring,
                )
            restore.layers.append(done)
        self._unread.append(restore)
        return restore

    def _launch(
        self,
        restore: Restore,
        index: int,
        layer: RestoredLayer,
        page_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        ring: _Ring,
    ) -> Event:
        """Copy and fill one chunk of one layer; an event behind both."""
        offset = self._layout.segment_offsets[index]
        length = self._layout.segment_bytes[index]
        if layer.method == "recompute":
            buffer = self._ring[:0].view(len(page_ids), 0)
            return self._fill(restore, index, layer, buffer, positions, slots)
        buffer = ring.next(self._copy)[: len(page_ids) * length].view(-1, length)
        start = self._copy.record(timed=True)
        self._copy.run(lambda: self._gather(self._memory, page_ids, offset, buffer))
        if layer.method == "kv":
            self._copy.run(lambda: layer.fill(buffer, positions, slots))
        copied = self._copy.record(timed=True)
        restore._timed.append(("copy", index, start, copied))
        if layer.method == "kv":
            ring.used(copied)
            return copied
        self._compute.wait(copied)
        filled = self._fill(restore, index, layer, buffer, positions, slots)
        ring.used(filled)
        return filled

    def _fill(
        self,
        restore: Restore,
        index: int,
        layer: RestoredLayer,
        buffer: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> Event:
        start = self._compute.record(timed=True)
        self._compute.run(lambda: layer.fill(buffer, positions, slots))
        filled = self._compute.record(timed=True)
        restore._timed.append(("compute", index, start, filled))
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


class _Ring:
    """The ring of one restore: equal parts, each free again when its last user is done."""

    def __init__(self, memory: torch.Tensor, part_bytes: int) -> None:
        self._memory = memory
        self._part_bytes = part_bytes
        self._parts = len(memory) // part_bytes
        self._users: list[Event] = []

    def next(self, stream: Stream) -> torch.Tensor:
        """The next part, uint8 ``[part_bytes]``; ``stream`` waits until it is free."""
        taken = len(self._users)
        if taken >= self._parts:
            stream.wait(self._users[taken - self._parts])
        start = taken % self._parts * self._part_bytes
        return self._memory[start : start + self._part_bytes]

    def used(self, until: Event) -> None:
        """The part that was taken last is in use until then."""
        self._users.append(until)


def gather_segments(
    memory: torch.Tensor, pages: torch.Tensor, offset: int, out: torch.Tensor
) -> None:
    """:data:`Gather` by one kernel that reads over the bus, or by torch on the CPU."""
    gather_pages(memory, pages, offset, out.shape[1], out=out)
