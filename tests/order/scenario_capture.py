"""Scenarios of capture: forward passes whose hidden states become pages in host memory."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from hcache_backend import streams
from hcache_backend.arena import Arena
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_kernels.codecs import ExactCodec
from tests.order import edges
from tests.order.checker import Checker
from tests.order.scenario_restore import GPU, PAGES, SIZE


class Captured:
    """An arena and the capture of three layers, under forward passes on a stream of their own."""

    LAYERS, PLACES = 3, 12
    WIDTH = 8

    def __init__(self, checker: Checker, codec: type[ExactCodec] = ExactCodec) -> None:
        self.checker = checker
        stored = hidden_layer(SIZE, 4 * self.WIDTH, self.WIDTH)
        self.layout = PageLayout(SIZE, (stored,) * self.LAYERS)
        memory = checker.pinned(
            torch.zeros((2 * PAGES, self.layout.stride), dtype=torch.uint8), "arena"
        )
        self.arena = Arena(
            memory.numpy(),
            self.layout,
            PAGES,
            PAGES,
        )
        self.staging = Staging(self.LAYERS, self.WIDTH, torch.float32, self.PLACES, GPU)
        layers = range(self.LAYERS)
        stored_by = codec.of_rows(self.WIDTH, torch.float32)
        self.capture = StagedCapture(self.arena, memory, self.staging, layers, stored_by)
        self.schedule, self.forward_stream = checker.stream("schedule"), checker.stream("forward")

    def forward(self, slots: Sequence[int], *, replay: bool = False) -> None:
        """One step as SGLang launches it: slots on the schedule stream, the model on its own."""
        checker, forward = self.checker, self.forward_stream
        with checker.on(self.schedule):
            where = streams.to_device(np.array(slots), GPU)
            self.capture.ledger.note_allocated(streams.to_device(np.array(slots), GPU))
        forward.wait_stream(self.schedule)
        with checker.on(forward):
            where.record_stream(forward)
            self.capture.ledger.pass_begins()
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
        physical, size = self.arena.physical(np.array([host_page])), self.layout.stride
        self.checker.touch_pages(physical, size, size, "read")


class EncodingCodec(ExactCodec):
    """Rows as they are, by way of an encoder."""

    is_view = False


def captures(checker: Checker, *, replay: bool, codec: type[ExactCodec] = ExactCodec) -> None:
    """Steps that use every way of staging, backups in between, slots that are used again."""
    captured = Captured(checker, codec)
    checker.begin()
    for turn in range(6):
        page = [turn % 5 * SIZE + i for i in range(SIZE)]
        captured.forward(page[:-1])
        captured.forward(page[-1:], replay=replay)
        for first in (40, 20):  # longer than staging has rows
            captured.forward(range(first, first + 20))
        captured.back_up(page, turn)
        if turn >= 3:
            with checker.on(captured.schedule):
                captured.capture.take_back(np.array([turn - 3]))
    checker.host_joins()


def step_that_cannot_begin(checker: Checker) -> None:
    """A decode graph is replayed although its step could not begin to be captured."""
    captured, hooks = Captured(checker), HiddenCapture([])
    hooks.use(captured.capture, tokens_only=False)
    give_up_step = captured.capture.give_up_step
    checker.begin()
    captured.forward(range(SIZE), replay=True)  # its transfer reads the rows from here on

    def replay() -> None:
        hidden = torch.ones((SIZE, captured.WIDTH), device=GPU)
        for layer in range(captured.LAYERS):
            captured.staging.stage(layer, hidden, SIZE)

    def begin(*args: object) -> None:
        raise RuntimeError("a test's fault")

    def give_up() -> None:
        if not edges.is_left_out():
            give_up_step()

    captured.capture.begin = begin  # type: ignore[method-assign,assignment]
    captured.capture.give_up_step = give_up  # type: ignore[method-assign]
    with checker.on(captured.forward_stream):
        slots = torch.arange(SIZE, device=GPU)
        batch = SimpleNamespace(out_cache_loc=slots, input_ids=slots, positions=slots)
        hooks.forward(batch, replay)
    checker.host_joins()
