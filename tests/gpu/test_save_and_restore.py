"""Saving and restoring together: recorded graphs, and rounds with streams that come late.

What needs no graph also runs on the CPU, where streams are threads.
"""

import random
import sys
import time

import numpy as np
import pytest
import torch

from hcache_backend.arena import Arena
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.restore.layers import Fill, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_kernels.codecs import ExactCodec
from hcache_kernels.project_kv import KVPool, KVProjection, ProjectionCall, project_kv
from hcache_kernels.project_kv.reference import compute_kv_reference
from tests.integrity import assert_sound_arena

STANDS_IN = "tests.cuda_standin.plugin" in sys.modules
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYERS, WIDTH, HEADS, HEAD_DIM, PAGE = 4, 256, 2, 64, 16
HOST_PAGES, DEVICE_PAGES = 24, 25
PLACES = 64
DTYPE = torch.bfloat16


class Engine:
    """What stands for the model and its pools: every layer's projection input is known."""

    def __init__(self, device: str) -> None:
        self.device = device
        codec = ExactCodec.of_rows(WIDTH, DTYPE)
        self.layout = PageLayout(PAGE, (hidden_layer(PAGE, codec.row_bytes, WIDTH),) * LAYERS)
        pages = HOST_PAGES + DEVICE_PAGES
        self.memory = torch.zeros(
            (pages, self.layout.stride), dtype=torch.uint8, pin_memory=device == "cuda"
        )
        self.arena = Arena(self.memory.numpy(), self.layout, HOST_PAGES, DEVICE_PAGES)
        self.staging = Staging(LAYERS, WIDTH, DTYPE, PLACES, device)
        self.capture = StagedCapture(self.arena, self.memory, self.staging, range(LAYERS), codec)
        self.projections = [
            KVProjection(
                torch.randn(2 * HEADS * HEAD_DIM, WIDTH, device=device, dtype=DTYPE) / 16,
                None,
                HEADS,
                HEAD_DIM,
            )
            for _ in range(LAYERS)
        ]
        shape = (DEVICE_PAGES * PAGE, HEADS, HEAD_DIM)
        self.pools = [
            KVPool(*(torch.zeros(shape, device=device, dtype=DTYPE) for _ in "kv"))
            for _ in range(LAYERS)
        ]
        layers = [RestoredLayer("hidden", self.fill(i)) for i in range(LAYERS)]
        # Two pages a projection: the ring is used over and over.
        self.pipeline = RestorePipeline(self.memory, self.layout, layers, 2 * PAGE, device)

    def fill(self, layer: int) -> Fill:
        def fill(
            _: range, segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> None:
            rows = segments.view(DTYPE).view(-1, WIDTH)
            projection, pool = self.projections[layer], self.pools[layer]
            project_kv(ProjectionCall(rows, positions, slots, projection, pool))

        return fill

    def record(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of a forward pass of ``size`` tokens, and its static input."""
        static = torch.zeros((LAYERS, size, WIDTH), device="cuda", dtype=DTYPE)
        for layer in range(LAYERS):
            self.staging.record(layer, static[layer])  # the engine's warm-up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(LAYERS):
                # Something that the copy must wait for, as the layer's norm is.
                self.capture.take(layer, static[layer] * 1)
        return graph, static

    def stored(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of ``slots`` in the shadow pages, ``[layers, n, width]``."""
        at = slots.cpu().numpy()
        pages = self.arena.memory[self.arena.shadows[at // PAGE]]
        rows = [
            pages[:, self.layout.segment(layer)].reshape(len(at), PAGE, -1)[
                np.arange(len(at)), at % PAGE
            ]
            for layer in range(LAYERS)
        ]
        return torch.from_numpy(np.stack(rows)).view(DTYPE)

    def settle(self) -> None:
        self.capture.transfers().synchronize()
        self.capture.ledger.settle()
        assert self.capture.ledger.broken is None

    def finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.settle()

    def sleep(self, rng: random.Random) -> None:
        """Hold up the current stream, or the transfers, for up to about 0.2 ms."""
        pause = rng.choice([0.0, 0.0, 1e-4, 2e-4])

        def wait() -> None:
            if self.device == "cuda":
                torch.cuda._sleep(int(2e9 * pause))
            else:
                time.sleep(pause)

        if rng.random() < 0.3:
            self.capture._transfer.run(wait)
        elif self.device == "cuda":
            wait()


def random_slots(rng: random.Random, n: int) -> torch.Tensor:
    return torch.tensor(rng.sample(range(PAGE, DEVICE_PAGES * PAGE), n), device="cuda")


@pytest.mark.gpu
@needs_gpu
def test_replays_capture_the_right_rows_for_changing_batch_sizes_and_padding() -> None:
    engine, rng = Engine("cuda"), random.Random(0)
    graphs = {size: engine.record(size) for size in (1, 2, 4, 8, 16, 32)}
    expected: dict[int, torch.Tensor] = {}
    for _ in range(10 if STANDS_IN else 300):
        n = rng.choice([1, 1, 2, 3, 5, 8, 9, 16, 20, 32])
        graph, static = graphs[next(size for size in graphs if size >= n)]
        slots = random_slots(rng, n)
        # Padding rows hold what earlier batches left, or garbage.
        static.normal_()
        rows = static[:, :n].clone()
        engine.capture.ledger.pass_begins()
        step = engine.capture.begin(slots, slots, slots + 7)
        assert step is not None
        graph.replay()
        assert engine.capture.end(step, replayed=True)
        static.fill_(float("nan"))  # the next batch overwrites static buffers at once
        for i, slot in enumerate(slots.tolist()):
            expected[slot] = rows[:, i]
    engine.settle()
    every = torch.tensor(sorted(expected))
    want = torch.stack([expected[slot] for slot in every.tolist()], 1).cpu()
    assert torch.equal(engine.stored(every).view(torch.int16), want.view(torch.int16))
    assert engine.capture.ledger.missing_tokens == 0


@pytest.mark.gpu
@needs_gpu
def test_a_graph_that_was_recorded_without_copies_proves_nothing() -> None:
    engine = Engine("cuda")
    graph, _ = engine.record(8)
    other = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(other):
        x += 1
    slots = random_slots(random.Random(1), 8)
    for recorded, missing in ((graph, 0), (other, 8)):
        engine.capture.ledger.pass_begins()
        step = engine.capture.begin(slots, slots, slots)
        assert step is not None
        recorded.replay()
        assert engine.capture.end(step, replayed=True)
        engine.settle()
        assert engine.capture.ledger.missing_tokens == missing


@pytest.mark.parametrize(
    ("device", "rounds"),
    [
        ("cpu", 100),
        pytest.param("cuda", 3 if STANDS_IN else 1000, marks=[pytest.mark.gpu, needs_gpu]),
    ],
)
def test_rounds_with_poisoned_buffers_and_late_streams(device: str, rounds: int) -> None:
    engine, rng = Engine(device), random.Random(2)
    memory = 0
    for number in range(rounds):
        if number == rounds // 10 and device == "cuda":
            memory = torch.cuda.memory_allocated()
        pages = rng.randrange(1, 7)
        device_pages = rng.sample(range(1, DEVICE_PAGES), 2 * pages)
        slots, target = (slots_of(half) for half in (device_pages[:pages], device_pages[pages:]))
        slots, target = slots.to(device), target.to(device)
        host_pages = np.array(rng.sample(range(HOST_PAGES), pages), np.int64)
        engine.staging.staged.rows.random_(0, 256)  # nothing is in flight: the last round waited
        engine.pipeline._ring._memory.random_(0, 256)
        hidden = torch.randn(LAYERS, pages * PAGE, WIDTH, device=device).to(DTYPE)

        save(engine, rng, slots, hidden)
        at = slots.cpu().numpy()
        engine.capture.ledger.settle()
        assert engine.arena.problem(at) is None
        engine.capture.back_up(at, host_pages)
        engine.sleep(rng)
        engine.finish()  # HiCache saw the backup finish
        assert engine.arena.usable(host_pages)

        engine.capture.ledger.note_allocated(target)
        engine.capture.ledger.note_loaded(target, host_pages)
        for pool in engine.pools:
            pool.k.fill_(float("nan"))
            pool.v.fill_(float("nan"))
        engine.sleep(rng)
        restore = engine.pipeline.start(engine.arena.physical(host_pages), target)
        for layer in range(LAYERS):
            restore.wait_for_layer(layer)
            check_layer(engine, layer, hidden[layer], target)
        engine.finish()
        # HiCache frees the host copy: the rows are in the shadows again, to the bit.
        engine.capture.take_back(host_pages)
        engine.finish()
        assert torch.equal(engine.stored(target), hidden.cpu())
        assert_sound_arena(engine.arena)
        assert len(engine.pipeline.take_finished()) == 1
    if device == "cuda":
        assert torch.cuda.memory_allocated() <= memory


def slots_of(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def save(engine: Engine, rng: random.Random, slots: torch.Tensor, hidden: torch.Tensor) -> None:
    """Forward passes over whole pages, in chunks that may end inside a page."""
    positions = torch.arange(len(slots), device=slots.device)
    start = 0
    while start < len(slots):
        end = min(len(slots), start + rng.choice([1, 3, 16, 40, 80]))
        engine.capture.ledger.pass_begins()
        step = engine.capture.begin(slots[start:end], positions[start:end], positions[start:end])
        assert step is not None
        engine.sleep(rng)
        for layer in range(LAYERS):
            # As in an engine, the tensor is gone right after the layer.
            engine.capture.take(layer, hidden[layer, start:end].clone())
        assert engine.capture.end(step, replayed=False)
        engine.sleep(rng)
        start = end


def check_layer(engine: Engine, layer: int, hidden: torch.Tensor, slots: torch.Tensor) -> None:
    """K and V of ``slots`` are right within rounding; nothing else was written."""
    projection, pool = engine.projections[layer], engine.pools[layer]
    positions = torch.arange(len(slots), device=slots.device)
    want = compute_kv_reference(hidden, positions, projection)
    others = torch.ones(len(pool.k), dtype=torch.bool, device=slots.device)
    others[slots] = False
    for got, true in zip((pool.k, pool.v), want, strict=True):
        torch.testing.assert_close(got[slots].float(), true.float(), rtol=2e-2, atol=2e-2)
        assert got[others].isnan().all()
