"""What a decode step makes a GPU and its allocators do: the same after 200 steps as at first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hcache_backend import streams
from hcache_backend.capture import staging
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture
from tests.unit.capture.machine import LAYERS, SIZE, WIDTH, Machine

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


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Identity(), torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(self.qkv(hidden))  # type: ignore[no-any-return]


class Model:
    """Layers with a projection each, whose forward passes are captured by ``machine``."""

    def __init__(self, machine: Machine) -> None:
        self.layers = [Attention() for _ in range(LAYERS)]
        self.hooks = HiddenCapture([(layer, (layer.qkv, layer.out)) for layer in self.layers])
        self.hooks.watch_only(layer.qkv for layer in self.layers)
        self.hooks.use(machine.capture, tokens_only=False, order=None)

    def decode(self, where: torch.Tensor, *, replayed: bool) -> None:
        """A decode step of these slots; ``replayed``: by a graph, of which Python sees nothing."""
        hidden = torch.zeros(len(where), WIDTH)
        batch = SimpleNamespace(out_cache_loc=where, input_ids=where, positions=where)

        def run() -> SimpleNamespace:
            for layer in () if replayed else self.layers:
                layer(hidden)
            return SimpleNamespace(can_run_graph=replayed)

        self.hooks.allocated(where)
        self.hooks.forward(batch, run)


@pytest.mark.parametrize("replayed", [True, False])
def test_a_decode_step_is_three_launches_and_makes_nothing_that_it_could_use_again(
    replayed: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for each layer without a graph; the allocation is where slots, positions and token
    ids go."""
    launches, model = Launches(monkeypatch), Model(Machine())
    fed: list[int] = []
    take = StagedCapture.take

    def counted(capture: StagedCapture, layer: int, hidden: object) -> None:
        fed.append(layer)
        take(capture, layer, hidden)

    monkeypatch.setattr(StagedCapture, "take", counted)

    def decode(number: int) -> tuple[object, ...]:
        where = torch.tensor([SIZE + number % 3, 2 * SIZE + number % 3])
        events, pinned = Event.made, gpu.pinned
        with launches:
            launches.seen.clear()
            fed.clear()
            model.decode(where, replayed=replayed)
        return tuple(launches.seen), tuple(fed), Event.made - events, gpu.pinned - pinned

    costs = [decode(number) for number in range(200)]
    layers = () if replayed else tuple(range(LAYERS))
    kernels = ("begin_rows", *("stage_rows" for _ in layers), "save_rows", "judge_rows")
    assert set(costs[10:]) == {
        (("aten.zeros.default", "aten.empty.memory_format", *kernels), layers, 0, 0)
    }
    assert Event.made < 20 and gpu.pinned < 20


def test_a_layer_takes_few_calls_in_python() -> None:
    """Of functions of ours, and of torch's on the way to them."""
    machine = Machine()
    model, where, hidden = Model(machine), torch.tensor([SIZE, 2 * SIZE]), torch.zeros(2, WIDTH)
    assert machine.capture.begin(where, where, where) is not None
    assert calls_of(model.layers[0], hidden) - calls_of(Attention(), hidden) <= 10


def calls_of(layer: Attention, hidden: torch.Tensor) -> int:
    """How many functions written in Python a forward pass calls."""
    calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        layer(hidden)
    finally:
        sys.setprofile(None)
    return calls
