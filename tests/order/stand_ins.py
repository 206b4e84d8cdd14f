"""Streams and events on the clocks, in the place of ``torch.cpu``'s, which do nothing.

SGLang takes its streams from the module of its device, so on a CPU it takes these.
"""

from __future__ import annotations

import time
from typing import Any

from tests.order.clocks import Clocks, Point, site


def stand_ins(clocks: Clocks) -> dict[str, Any]:
    """What takes the place of ``torch.cpu``'s functions and classes, by name."""

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.point: Point | None = None
            self.time = 0.0

        def record(self, stream: Stream | None = None) -> None:
            self.point = clocks.record(clocks.current if stream is None else stream.actor)
            self.time = time.perf_counter()

        def wait(self, stream: Stream | None = None) -> None:
            if self.point is not None:
                clocks.wait(clocks.current if stream is None else stream.actor, self.point)

        def query(self) -> bool:
            return self.point is None or clocks.query(self.point)

        def synchronize(self) -> None:
            if self.point is not None:
                clocks.host_waits_for(self.point, "Event.synchronize")

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.time - self.time)

    class Stream:
        def __init__(self, *_: Any, actor: int | None = None, **__: Any) -> None:
            where = site(1)
            name = str(where[0]) if where else "stream"
            self._actor = clocks.new_stream(name) if actor is None else actor

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "synchronize":  # SGLang puts an empty function there on a CPU
                object.__setattr__(self, name, value)

        @property
        def actor(self) -> int:
            return self._actor

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def wait_stream(self, other: Stream) -> None:
            clocks.wait(self.actor, clocks.record(other.actor))

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def query(self) -> bool:
            return clocks.query(clocks.record(self.actor))

        def synchronize(self) -> None:
            clocks.host_waits_for_stream(self.actor, "Stream.synchronize")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.actor == self.actor

        def __hash__(self) -> int:
            return hash(self.actor)

    class StreamContext:
        def __init__(self, stream: Stream | None) -> None:
            self.stream, self.before = stream, list[int]()

        def __enter__(self) -> None:
            self.before.append(clocks.current)
            if self.stream is not None:
                clocks.current = self.stream.actor

        def __exit__(self, *_: object) -> None:
            clocks.current = self.before.pop()

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
