"""A restore that was launched, and its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from hcache_backend.streams import Event, Stream, current_stream

StreamName = Literal["copy", "compute"]


class Span(NamedTuple):
    """The work of a stream for one layer, in milliseconds since the restore began. Recomputation is
    one span of the first layer on the compute stream, which waits for it. Its own wait for forward
    passes counts as a bubble."""

    stream: StreamName
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class RestoreReport:
    """One finished restore; ``bytes`` crossed the bus, by method."""

    tokens: int
    bytes: Mapping[str, int]
    spans: tuple[Span, ...]

    @property
    def total_ms(self) -> float:
        return max(span.end for span in self.spans)

    def busy_ms(self, stream: str) -> float:
        """Time in which a stream worked for this restore; for the rest of its time it was idle."""
        return sum(span.end - span.start for span in self.spans if span.stream == stream)

    def idle_ms(self, stream: str) -> float:
        return self.total_ms - self.busy_ms(stream)


@dataclass(eq=False)
class RunningRestore:
    """A restore that was launched; see :class:`RestoreReport`. On a CPU, waits raise
    :class:`StreamFailed` if it failed: K and V must not be used, and no page is accessed then."""

    tokens: int
    bytes: Mapping[str, int]
    begin: Event
    device: torch.device
    copied: Event  # behind all that is read from host pages, or written there
    layers: list[Event] = field(default_factory=list)  # by layer, behind the last of its K and V
    timed: list[tuple[StreamName, int, Event, Event]] = field(default_factory=list)
    failed: Exception | None = None  # why first layers, or all, were not made: do not use them

    def save_recomputed(
        self, stream: Stream, slots: torch.Tensor, work: Callable[[], object]
    ) -> Exception | None:
        """Let ``work()`` copy K and V that were recomputed in ``slots`` to host pages; the restore
        ends behind that. Returns the error of ``work``: then host pages have not got all."""
        problem = None
        stream.wait(self.layers[-1])
        stream.keep(slots)
        try:
            with stream.as_current():
                work()
        except Exception as error:  # out of memory
            problem = error
        self.copied = stream.record()
        self.layers = [self.copied] * len(self.layers)
        return problem

    def wait_for_layer(self, layer: int) -> None:
        """Let the current stream wait until K and V of ``layer`` are in the pool."""
        current_stream(self.device).wait(self.layers[layer])

    def wait(self) -> None:
        """Let the current stream wait until all layers are in the pool."""
        for event in dict.fromkeys(self.layers):
            current_stream(self.device).wait(event)

    def synchronize(self) -> None:
        """Block the calling thread until all layers are in the pool."""
        for event in dict.fromkeys(self.layers):
            event.synchronize()

    def wait_until_copied(self) -> None:
        """Block the calling thread until no host page is read any more. Recomputation and
        projections may still stand behind a forward pass."""
        self.copied.synchronize()

    def done(self) -> bool:
        """True if all its work is over, also if it failed; does not wait."""
        return all(event.query() for event in self.layers)

    def report(self) -> RestoreReport:
        ms = self.begin.elapsed_time
        spans = (Span(name, layer, ms(start), ms(end)) for name, layer, start, end in self.timed)
        return RestoreReport(self.tokens, self.bytes, tuple(spans))
