"""The backend's streams on modelled clocks: another door of :mod:`hcache_backend.streams`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hcache_backend import streams
from tests.order import edges
from tests.order.checker import Checker
from tests.order.clocks import Clocks, Point
from tests.order.memory import Kind, Memory


class CheckedEvent(streams.Event):
    """A point of a modelled stream, with the error that stopped the stream before it, if any."""

    def __init__(self, clocks: Clocks, point: Point, error: BaseException | None) -> None:
        self.point, self.error = point, error
        self._clocks, self._time = clocks, time.perf_counter()

    def query(self) -> bool:
        return self._clocks.query(self.point)

    def synchronize(self) -> None:
        self._clocks.host_waits_for(self.point, "Event.synchronize")
        if self.error is not None:
            raise streams.StreamFailed(f"{type(self.error).__name__}: {self.error}") from self.error

    def elapsed_time(self, later: CheckedEvent) -> float:
        return 1e3 * (later._time - self._time)


class CheckedStream(streams.Stream):
    """Runs work at once, on the clock of its actor.

    Args:
        ours: A stream of the backend's own: what raises there stops the stream, not the caller.

    Attributes:
        error: What stopped it.
    """

    def __init__(self, memory: Memory, actor: int, *, ours: bool) -> None:
        self.actor = actor
        self._memory, self._clocks, self._ours = memory, memory.clocks, ours
        self.error: BaseException | None = None

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

    def record(self, *, timed: bool = False) -> streams.Event:
        return CheckedEvent(self._clocks, self._clocks.record(self.actor), self.error)

    def wait(self, event: streams.Event) -> None:
        assert isinstance(event, CheckedEvent)
        if edges.is_left_out():
            return
        self._clocks.wait(self.actor, event.point)
        self.error = self.error or event.error

    def keep(self, tensor: torch.Tensor) -> None:
        if not edges.is_left_out():
            self._memory.keep(tensor, self.actor)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        before, self._clocks.current = self._clocks.current, self.actor
        try:
            yield
        finally:
            self._clocks.current = before


class CheckedDoor(streams.Door):
    """Streams of the backend, and the engine's, on the clocks of a checker."""

    def __init__(self, checker: Checker) -> None:
        self._memory, self._clocks = checker.memory, checker.clocks
        self._ours: list[CheckedStream] = []

    @property
    def errors(self) -> list[BaseException]:
        """What stopped streams of the backend: nothing of theirs is checked behind it."""
        return [stream.error for stream in self._ours if stream.error is not None]

    def new_stream(
        self, device: torch.device, name: str, *, in_turn: bool = False
    ) -> streams.Stream:
        actor = self._clocks.new_stream(f"hcache {name}")
        self._ours.append(CheckedStream(self._memory, actor, ours=True))
        return self._ours[-1]

    def current_stream(self, device: torch.device) -> streams.Stream:
        return CheckedStream(self._memory, self._clocks.current, ours=False)

    def run_here(self, device: torch.device, work: Callable[..., object], *args: Any) -> None:
        self.current_stream(device).run(partial(work, *args))

    def of(self, engine_stream: Any) -> streams.Stream:
        return CheckedStream(self._memory, engine_stream.actor, ours=False)

    def host_tensor(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self._memory.register(tensor, Kind.PINNED)
        return tensor

    def free_memory(self, device: torch.device) -> float:
        return float("inf")

    def recording_graph(self) -> bool:
        return False
