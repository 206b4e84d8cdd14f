"""What a decode step makes a GPU and its allocators do: the same after 200 steps as at first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hcache_backend import streams
from hcache_backend.capture import staging
from tests.unit.capture.machine import SIZE, Machine

KERNELS = ("begin_rows", "stage_rows", "save_rows", "judge_rows")


class Event:
    """CUDA's, which are counted; every point has passed."""

    made = 0

    def __init__(self, **_: Any) -> None:
        type(self).made += 1

    def record(self, _stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _later: object) -> float:
        return 0.0


class Gpu(streams.Door):
    """CUDA's streams without CUDA: what is launched is done."""

    def __init__(self) -> None:
        self.pinned = 0

    def new_stream(
        self, device: torch.device, name: str, *, in_turn: bool = False
    ) -> streams.Stream:
        return streams._CudaStream(SimpleNamespace(wait_event=lambda event: None))

    def current_stream(self, device: torch.device) -> streams.Stream:
        return self.new_stream(device, "current")

    def host_tensor(self, *asked: Any) -> torch.Tensor:
        self.pinned += 1
        return super().host_tensor(*asked)


class Launches(TorchDispatchMode):
    """Kernels of ours that were launched, and operations of torch beside them, but for views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._in_kernel = False
        for name in KERNELS:
            monkeypatch.setattr(staging, name, self._counted(name, getattr(staging, name)))

    def _counted(self, name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.seen.append(name)
            self._in_kernel = True
            kernel(*args)
            self._in_kernel = False

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._in_kernel and not func.is_view:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(streams._CudaEvent, "_free", {False: [], True: []})
    monkeypatch.setattr(Event, "made", 0)
    door = Gpu()
    with streams.through(door):
        yield door


def test_a_decode_step_is_three_launches_and_makes_nothing_that_it_could_use_again(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the replay of a graph; the allocation is where slots, positions and token ids go."""
    machine, launches = Machine(), Launches(monkeypatch)
    capture, ledger = machine.capture, machine.capture.ledger

    def decode(number: int) -> tuple[object, ...]:
        where = torch.tensor([SIZE + number % 3, 2 * SIZE + number % 3])
        launches.seen.clear()
        events, pinned = Event.made, gpu.pinned
        with launches:
            ledger.allocated(where)
            ledger.pass_begins()
            step = capture.begin(where, where, where)
            assert step is not None and capture.end(step, replayed=True)
        return tuple(launches.seen), Event.made - events, gpu.pinned - pinned

    costs = [decode(number) for number in range(200)]
    wanted = ("aten.empty.memory_format", "begin_rows", "save_rows", "judge_rows")
    assert set(costs[10:]) == {(wanted, 0, 0)}
    assert Event.made < 20 and gpu.pinned < 20
