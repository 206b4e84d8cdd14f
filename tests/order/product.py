"""The backend's streams on modelled clocks: another door of :mod:`hcache_backend.streams`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hcache_backend import streams
from tests.order.checker import Checker
from tests.order.memory import Kind
from tests.order.stand_ins import CheckedStream


class CheckedDoor(streams.Door):
    """Streams of the backend, and the engine's, on the clocks of a checker."""

    def __init__(self, checker: Checker) -> None:
        self._memory, self._clocks = checker.memory, checker.clocks
        self._own: list[CheckedStream] = []

    @property
    def errors(self) -> list[BaseException]:
        """What stopped streams of the backend: nothing of theirs is checked behind it."""
        return [stream.error for stream in self._own if stream.error is not None]

    def new_stream(
        self, device: torch.device, name: str, *, in_turn: bool = False
    ) -> streams.Stream:
        actor = self._clocks.new_stream(f"hcache {name}")
        self._own.append(CheckedStream(self._memory, actor, ours=True))
        return self._own[-1]

    def current_stream(self, device: torch.device) -> streams.Stream:
        return CheckedStream(self._memory, self._clocks.current)

    def run_here(self, device: torch.device, work: Callable[..., object], *args: Any) -> None:
        self.current_stream(device).run(partial(work, *args))

    def wrap_engine_stream(self, engine_stream: Any) -> streams.Stream:
        return CheckedStream(self._memory, engine_stream.actor)

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
