"""Breakable graphs: hooks record, and a replay captures its rows. tests/gpu: whole graphs."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hcache_backend import streams
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import Staging
from tests.cuda_standin import device
from tests.cuda_standin.device import CUDA
from tests.cuda_standin.on_device.test_launches import launches
from tests.gpu.test_save_and_restore import DTYPE, LAYERS, WIDTH, Engine, random_slots


class Attention(nn.Module):
    """A layer: what its projection is given is known."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(hidden * 2)


class Model:
    """Layers under the product's hooks, and breakable graphs of them as SGLang records them: a part
    per layer. Between two parts the engine attends, and Python runs."""

    def __init__(self, engine: Engine) -> None:
        self.layers = [Attention() for _ in range(LAYERS)]
        self.hooks = HiddenCapture([(layer, [layer.projection]) for layer in self.layers])
        self.hooks.staging = engine.staging
        self._graphs: dict[int, tuple[torch.Tensor, list[Any]]] = {}

    def record(self, size: int) -> None:
        """Record the graphs of ``size`` tokens; ``init_cuda_graphs`` warms up first."""
        static = torch.zeros((LAYERS, size, WIDTH), device=CUDA, dtype=DTYPE)
        self._run(static, range(LAYERS))
        torch.cuda.synchronize()
        graphs = []
        for layer in range(LAYERS):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                self._run(static, [layer])
        self._graphs[size] = static, graphs

    def _run(self, hidden: torch.Tensor, layers: Any) -> None:
        for layer in layers:
            self.layers[layer](hidden[layer])

    def forward(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """A replay with ``rows``, filled up to the next size with what was there."""
        count = rows.shape[1]
        static, graphs = self._graphs[min(size for size in self._graphs if size >= count)]
        static[:, :count] = rows

        def run() -> Any:
            for graph in graphs:
                graph.replay()
            return SimpleNamespace(can_run_graph=True)

        batch = SimpleNamespace(out_cache_loc=slots, input_ids=slots, positions=slots + 7)
        self.hooks.forward(batch, run)
        static.fill_(float("nan"))  # the next batch comes at once


def test_replays_capture_what_projections_are_given() -> None:
    engine, rng = Engine("cuda"), random.Random(4)
    model = Model(engine)
    for size in (4, 16):
        model.record(size)
    model.hooks.use(engine.capture, tokens_only=False)
    expected: dict[int, torch.Tensor] = {}
    for count in (3, 16, 9):
        slots = random_slots(rng, count)
        rows = torch.randn((LAYERS, count, WIDTH), device=CUDA).to(DTYPE)
        model.forward(rows, slots)
        doubled = (rows * 2).cpu()
        expected |= {slot: doubled[:, at] for at, slot in enumerate(slots.tolist())}
    engine.settle()
    every = torch.tensor(sorted(expected))
    want = torch.stack([expected[slot] for slot in every.tolist()], 1)
    assert torch.equal(engine.stored(every).view(torch.int16), want.view(torch.int16))
    assert engine.capture.ledger.missing_tokens == 0


def test_rows_behind_those_of_a_step_are_left_out() -> None:
    """Without a graph SGLang may fill a batch up, too."""
    engine = Engine("cuda")
    slots = random_slots(random.Random(6), 3)
    hidden = torch.randn((LAYERS, 8, WIDTH), device=CUDA).to(DTYPE)
    engine.capture.ledger.pass_begins()
    step = engine.capture.begin(slots, slots, slots)
    assert step is not None
    for layer in range(LAYERS):
        engine.capture.take(layer, hidden[layer])
    assert engine.capture.end(step, replayed=False)
    engine.settle()
    want = hidden[:, :3].cpu()
    assert torch.equal(engine.stored(slots).view(torch.int16), want.view(torch.int16))


def test_a_step_whose_places_cannot_be_unnamed_ends_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recorded copy would go to rows that a transfer still reads."""
    engine = Engine("cuda")
    monkeypatch.delattr(Staging, "name_none")
    engine.capture.give_up_step()
    assert str(engine.capture.ledger.broken).startswith("capture broke: AttributeError")


class Pinned(streams.Door):
    """Counts memory of the host that is made for the device."""

    made = 0

    def host_tensor(self, *asked: Any) -> torch.Tensor:
        self.made += 1
        return super().host_tensor(*asked)


@pytest.mark.parametrize("replayed", [True, False])
def test_a_decode_step_is_three_launches_and_makes_nothing_that_it_could_use_again(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for each layer without a graph; the allocation is where slots, positions and token
    ids go. It is the same after 12 steps as after four."""
    events: list[device.Event] = []

    def event(**given: Any) -> device.Event:
        events.append(device.Event(**given))
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(streams._CudaEvent, "_free", {False: [], True: []})
    door = Pinned()
    with streams.through(door):
        engine = Engine("cuda")
        model = Model(engine)
        model.hooks.use(engine.capture, tokens_only=False)
        layers = () if replayed else model.layers
        hidden = torch.zeros((2, WIDTH), device=CUDA, dtype=DTYPE)

        def decode(number: int) -> tuple[object, ...]:
            where = torch.tensor([16 + number % 3, 32 + number % 3]).to(CUDA)
            batch = SimpleNamespace(out_cache_loc=where, input_ids=where, positions=where)
            made = len(events), door.made

            def run() -> Any:
                for layer in layers:
                    layer(hidden)
                return SimpleNamespace(can_run_graph=replayed)

            device.launches.clear()
            with launches() as seen:
                engine.capture.note_allocated(where)
                model.hooks.forward(batch, run)
            torch.cuda.synchronize()
            kernels = tuple(launch.kernel.__name__ for launch in device.launches)
            return kernels, len(seen), len(events) - made[0], door.made - made[1]

        costs = [decode(number) for number in range(12)][4:]
    stages = ("stage_kernel",) * len(layers)
    kernels = ("begin_kernel", *stages, "save_kernel", "judge_kernel")
    # A layer of the model launches its product.
    assert set(costs) == {(kernels, len(kernels) + len(layers), 0, 0)}
