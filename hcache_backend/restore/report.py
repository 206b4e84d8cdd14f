"""A restore that was launched, and what it took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from hcache_backend.streams import Event, Stream, current_stream

StreamName = Literal["copy", "compute"]


class Span(NamedTuple):
    """What a stream did for one layer, in milliseconds since the restore began.

    Recomputation of several layers runs on the engine's stream of forward passes. It counts as one
    span of the first layer on the compute stream, which waits for it; the time that it waits for
    forward passes before it counts as a bubble.
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


@dataclass(eq=False)
class RunningRestore:
    """A restore that was launched; see :class:`RestoreReport`.

    Attributes:
        copied: Behind all that is read from host pages, or written there.
        layers: For each layer, an event behind the last of its K and V.
        timed: What the streams do for a layer, between two events.
        failed: Why its first layers were not recomputed: nobody may use them. None: they were, or
            were not to be.
    """

    tokens: int
    bytes: Mapping[str, int]
    begin: Event
    device: torch.device
    copied: Event
    layers: list[Event] = field(default_factory=list)
    timed: list[tuple[StreamName, int, Event, Event]] = field(default_factory=list)
    failed: Exception | None = None

    def save(
        self, stream: Stream, slots: torch.Tensor, work: Callable[[], object]
    ) -> Exception | None:
        """Let ``work()`` copy what was recomputed from ``slots`` to the host, on ``stream``.

        Neither these slots (int64 ``[n]``, on the device) nor host pages are done with before.
        Returns why it could not: not all is in host pages then, nor on its way.
        """
        problem = None
        stream.wait(self.layers[-1])
        stream.keep(slots)
        try:
            with stream.as_current():
                work()
        except Exception as error:  # for want of memory
            problem = error
        self.copied = stream.record()
        self.layers = [self.copied] * len(self.layers)
        return problem

    def wait_for_layer(self, layer: int) -> None:
        """Let the current stream wait until K and V of ``layer`` are in the pool.

        Raises:
            StreamFailed: On a CPU, when they could not be restored: they must not be used.
        """
        current_stream(self.device).wait(self.layers[layer])

    def wait(self) -> None:
        """Let the current stream wait until all layers are in the pool.

        Raises:
            StreamFailed: On a CPU, when they could not be restored; nothing is written any more.
        """
        for event in dict.fromkeys(self.layers):
            current_stream(self.device).wait(event)

    def synchronize(self) -> None:
        """Block the calling thread until all layers are in the pool.

        Raises:
            StreamFailed: As for :meth:`wait`.
        """
        for event in dict.fromkeys(self.layers):
            event.synchronize()

    def wait_until_copied(self) -> None:
        """Block the calling thread until no host page is read any more.

        Not until all is done: recomputation and projections may stand behind a forward pass.

        Raises:
            StreamFailed: On a CPU, when something could not be copied; nothing is read any more.
        """
        self.copied.synchronize()

    def done(self) -> bool:
        """Whether all layers are in the pool."""
        return all(event.query() for event in self.layers)

    def report(self) -> RestoreReport:
        """Times of a restore that is done."""
        first = self.begin
        spans = (
            Span(stream, layer, first.elapsed_time(start), first.elapsed_time(end))
            for stream, layer, start, end in self.timed
        )
        return RestoreReport(self.tokens, self.bytes, tuple(spans))
