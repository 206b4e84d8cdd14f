"""Scenarios without an engine: a part of the product at work on modelled streams, in a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from hcache_backend import streams
from hcache_backend.capture.arena import Arena
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.engine.capture_hooks import HiddenCapture
from hcache_backend.page import PageLayout
from hcache_backend.restore.layers import Fill, Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_kernels.codecs import ExactCodec
from tests.order.checker import Checker
from tests.order.product import CheckedDoor

GPU = torch.device("cpu")
"""A variable: on a machine with a GPU it would name that."""
SIZE, WIDTH, PAGES = 4, 64, 24
SLOTS = SIZE * PAGES

Scenario = Callable[[Checker], None]


class Pool:
    """K and V of a few layers on the modelled device, and pages in pinned memory."""

    def __init__(self, checker: Checker, methods: Sequence[str]) -> None:
        row = 4 * WIDTH
        lengths = {"hidden": SIZE * row, "kv": 2 * SIZE * row, "recompute": 0}
        self.checker, self.methods = checker, methods
        self.layout = PageLayout(SIZE, tuple(lengths[method] for method in methods))
        self.memory = checker.pinned(
            torch.zeros((PAGES, self.layout.page_bytes), dtype=torch.uint8), "arena"
        )
        self.layout.positions(self.memory.numpy())[:] = np.arange(SIZE)
        shape = (len(methods), SLOTS, WIDTH)
        self.k = checker.on_device(torch.zeros(shape), "K")
        self.v = checker.on_device(torch.zeros(shape), "V")

    def fill(self, layer: int) -> Fill:
        """Writes K and V of ``layer`` from its segments."""

        def hidden(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            rows = segments.view(torch.float32).view(-1, WIDTH)
            self.k[layer, slots] = rows + positions[:, None]
            self.v[layer, slots] = rows * 2

        def kv(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            k, v = segments.view(torch.float32).view(-1, 2, SIZE, WIDTH).unbind(1)
            self.k[layer, slots] = k.reshape(-1, WIDTH)
            self.v[layer, slots] = v.reshape(-1, WIDTH)

        return hidden if self.methods[layer] == "hidden" else kv

    def pipeline(self, chunk_tokens: int) -> RestorePipeline:
        """A pipeline into this pool."""
        layers = [
            RestoredLayer(method, None if method == "recompute" else self.fill(i))  # type: ignore[arg-type]
            for i, method in enumerate(self.methods)
        ]
        return RestorePipeline(self.memory, self.layout, layers, chunk_tokens, GPU)

    def some(self, pages: int, seed: int) -> tuple[np.ndarray, torch.Tensor]:
        """Pages in any order, and as many slots, made on the current stream."""
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(PAGES)[:pages].astype(np.int64)
        slots = rng.permutation(SLOTS)[: pages * SIZE]
        return chosen, streams.to_device(slots, GPU)

    def attend(self, layer: int, slots: torch.Tensor) -> None:
        """What a layer of a forward pass does: read K and V, and write those of its tokens."""
        with torch.no_grad():
            self.k[layer, slots].sum()
            self.v[layer, slots].sum()
            self.k[layer, slots] = 1.0
            self.v[layer, slots] = 1.0


def restores(checker: Checker, methods: Sequence[str], recomputed: int = 0) -> None:
    """Restores one after the other, of more pages than a projection takes, under forward passes."""
    pool = Pool(checker, methods)
    pipeline = pool.pipeline(4 * SIZE)
    schedule, forward, loading = (checker.stream(n) for n in ("schedule", "forward", "h2d"))
    checker.begin()
    for seed in range(4):
        with checker.on(schedule):
            pages, slots = pool.some(9, seed)
            loading.wait_event(schedule.record_event())
            loading.wait_stream(forward)

        def fill(positions: torch.Tensor, slots: torch.Tensor) -> None:
            for layer in range(recomputed):
                pool.k[layer, slots] = positions[:, None].float()
                pool.v[layer, slots] = positions[:, None].float()

        with checker.on(loading):
            slots.record_stream(loading)  # as HiCache does with its indices
            recompute = Recompute(recomputed, fill) if recomputed else None
            restore = pipeline.start(pages, slots, recompute)
            done = []
            for layer in range(len(methods)):
                restore.wait_for_layer(layer)
                done.append(loading.record_event())
        with checker.on(forward):
            forward.wait_event(schedule.record_event())
            slots.record_stream(forward)
            for layer, event in enumerate(done):
                event.wait()
                pool.attend(layer, slots)
        del restore, slots
        pipeline.finished()


class Captured:
    """An arena and the capture of three layers, under forward passes on a stream of their own."""

    LAYERS, PLACES = 3, 12
    WIDTH = 8

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.layout = PageLayout(SIZE, (SIZE * self.WIDTH * 4,) * self.LAYERS)
        memory = checker.pinned(
            torch.zeros((2 * PAGES, self.layout.page_bytes), dtype=torch.uint8), "arena"
        )
        self.arena = Arena(
            memory.numpy(),
            self.layout,
            PAGES,
            PAGES,
            lambda page: self.layout.stamp(page, b"n" * 16, b"w" * 8),
        )
        codec = ExactCodec(self.WIDTH, torch.float32)
        self.staging = Staging(self.LAYERS, codec, self.PLACES, GPU)
        self.capture = StagedCapture(self.arena, memory, self.staging, range(self.LAYERS))
        self.schedule, self.forward_stream = checker.stream("schedule"), checker.stream("forward")

    def forward(self, slots: Sequence[int], *, replay: bool = False) -> None:
        """One step as SGLang launches it: slots on the schedule stream, the model on its own."""
        checker, forward = self.checker, self.forward_stream
        with checker.on(self.schedule):
            where = streams.to_device(np.array(slots), GPU)
            self.capture.ledger.allocated(where)
        forward.wait_stream(self.schedule)
        with checker.on(forward):
            where.record_stream(forward)
            step = self.capture.begin(where, where, where + 100)
            hidden = torch.ones((self.LAYERS, len(slots), self.WIDTH), device=GPU)
            for layer in range(self.LAYERS):
                if replay:
                    self.staging.stage(layer, hidden[layer], len(slots))
                else:
                    self.capture.take(layer, hidden[layer])
            if step is not None:
                self.capture.end(step, replayed=replay)

    def back_up(self, slots: Sequence[int], host_page: int) -> None:
        """The page of these slots is backed up, as the scheduler does it, and read by L3."""
        with self.checker.on(self.schedule):
            self.capture.ledger.settle()
            self.capture.back_up(np.array(slots), np.array([host_page]))
            event = self.capture.transfers()
        event.synchronize()  # HiCache asks no sooner than its finish event has passed
        self.checker.host_reads_pages(self.arena.physical(np.array([host_page])), self.layout)


def captures(checker: Checker, *, replay: bool) -> None:
    """Steps that use every way of staging, backups in between, slots that are used again."""
    captured = Captured(checker)
    checker.begin()
    for turn in range(6):
        page = [turn % 5 * SIZE + i for i in range(SIZE)]
        captured.forward(page[:-1])
        captured.forward(page[-1:], replay=replay)
        captured.forward(range(40, 40 + 20))  # longer than staging has places
        captured.back_up(page, turn)
        if turn >= 3:
            with checker.on(captured.schedule):
                captured.capture.host_freed(np.array([turn - 3]))
    checker.host_joins()


def step_that_cannot_begin(checker: Checker, *, guarded: bool = True) -> None:
    """A decode graph is replayed although its step could not begin to be captured.

    Args:
        guarded: False: nothing is done about it.
    """
    captured, hooks = Captured(checker), HiddenCapture([])
    hooks.use(captured.capture, tokens_only=False, order=None)
    checker.begin()
    captured.forward(range(SIZE), replay=True)  # its transfer reads the places from here on

    def replay() -> None:
        hidden = torch.ones((SIZE, captured.WIDTH), device=GPU)
        for layer in range(captured.LAYERS):
            captured.staging.stage(layer, hidden, SIZE)

    def begin(*args: object) -> None:
        raise RuntimeError("a test's fault")

    captured.capture.begin = begin  # type: ignore[method-assign,assignment]
    if not guarded:
        captured.capture.give_up_step = lambda: None  # type: ignore[method-assign]
    with checker.on(captured.forward_stream):
        slots = torch.arange(SIZE, device=GPU)
        batch = SimpleNamespace(out_cache_loc=slots, input_ids=slots, positions=slots)
        hooks.forward(batch, replay)
    checker.host_joins()


def _restores(*methods: str, recomputed: int = 0) -> Scenario:
    return lambda checker: restores(checker, methods, recomputed)


SCENARIOS: dict[str, Scenario] = {
    "restore, hidden states": _restores(*["hidden"] * 5),
    "restore, mixed": _restores("hidden", "kv", "hidden", "kv"),
    "restore, first layers recomputed": _restores(
        "recompute", "hidden", "hidden", "kv", recomputed=2
    ),
    "capture": lambda checker: captures(checker, replay=False),
    "capture, a step that cannot begin": step_that_cannot_begin,
    "capture, decode graphs": lambda checker: captures(checker, replay=True),
}


def run(scenario: Scenario, checker: Checker) -> None:
    """One scenario, its streams through the checker's door."""
    with streams.through(CheckedDoor(checker)), checker.watching():
        scenario(checker)
