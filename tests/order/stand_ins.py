"""Streams and events on the clocks: torch's, which do nothing on a CPU, and the product's.

SGLang takes its streams from the module of its device, so on a CPU it takes these.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from hcache_backend import streams
from tests.order import edges
from tests.order.clocks import Clocks, Point, site
from tests.order.memory import Memory


class CheckedEvent(streams.Event):
    """A point of a stream, once it is recorded."""

    def __init__(self, clocks: Clocks) -> None:
        self.point: Point | None = None
        self.error: BaseException | None = None  # that stopped the stream before it
        self._clocks, self._time = clocks, 0.0

    def record(self, stream: CheckedStream | None = None) -> None:
        clocks = self._clocks
        self.point = clocks.record(clocks.current if stream is None else stream.actor)
        self._time = time.perf_counter()

    def wait(self, stream: CheckedStream | None = None) -> None:
        if self.point is not None:
            clocks = self._clocks
            clocks.wait(clocks.current if stream is None else stream.actor, self.point)

    def query(self) -> bool:
        return self.point is None or self._clocks.query(self.point)

    def synchronize(self) -> None:
        if self.point is not None:
            self._clocks.host_waits_for(self.point, "Event.synchronize")
        if self.error is not None:
            raise streams.StreamFailed(f"{type(self.error).__name__}: {self.error}") from self.error

    def elapsed_time(self, later: CheckedEvent) -> float:
        return 1e3 * (later._time - self._time)


class CheckedStream(streams.Stream):
    """Runs work at once, on the clock of its actor. What raises on a stream of ``ours`` stops it,
    and not the caller."""

    def __init__(self, memory: Memory, actor: int, *, ours: bool = False) -> None:
        self.actor, self.clocks = actor, memory.clocks
        self.error: BaseException | None = None
        self._memory, self._ours = memory, ours

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckedStream) and other.actor == self.actor

    def __hash__(self) -> int:
        return hash(self.actor)

    # ---- as the product's ----

    def run(self, work: streams.Work) -> None:
        with self.as_current():
            if not self._ours:
                work()
            elif self.error is None:
                try:
                    with torch.inference_mode():
                        work()
                except Exception as error:
                    self.error = error

    def record(self, *, timed: bool = False) -> CheckedEvent:
        event = self.record_event()
        event.error = self.error
        return event

    def wait(self, event: streams.Event) -> None:
        assert isinstance(event, CheckedEvent)
        if not edges.is_left_out():
            event.wait(self)
            self.error = self.error or event.error

    def keep(self, tensor: torch.Tensor) -> None:
        if not edges.is_left_out():
            self._memory.keep(tensor, self.actor)

    def as_current(self) -> Any:
        return StreamContext(self)

    # ---- as torch's ----

    def wait_event(self, event: CheckedEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: CheckedStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: CheckedEvent | None = None) -> CheckedEvent:
        event = event or CheckedEvent(self.clocks)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.clocks.host_waits_for_stream(self.actor, "Stream.synchronize")


class StreamContext:
    """As torch's, which is entered again and again."""

    def __init__(self, stream: CheckedStream | None) -> None:
        self._stream, self._before = stream, list[int]()

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before.append(self._stream.clocks.current)
            self._stream.clocks.current = self._stream.actor

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.clocks.current = self._before.pop()


def stand_ins(memory: Memory) -> dict[str, Any]:
    """What takes the place of ``torch.cpu``'s functions and classes, by name."""
    clocks = memory.clocks

    class Event(CheckedEvent):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(clocks)

    class Stream(CheckedStream):
        def __init__(self, *_: Any, actor: int | None = None, **__: Any) -> None:
            name = str((*site(1), "stream")[0])
            super().__init__(memory, clocks.new_stream(name) if actor is None else actor)

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "synchronize":  # SGLang puts an empty function there on a CPU
                object.__setattr__(self, name, value)

    def synchronize(device: object = None) -> None:
        clocks.host_waits_for_stream(clocks.current, "synchronize")
        clocks.join_all()

    return {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": lambda device=None: Stream(actor=clocks.current),
        "synchronize": synchronize,
    }
