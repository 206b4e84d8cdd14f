"""Rows that hooks take: of pages that are recomputed whole, and at few calls of Python."""

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
import torch

from hcache_backend.capture.hooks import HiddenCapture, RecomputedRows
from hcache_backend.restore.layers import Recompute
from hcache_backend.streams import current_stream
from tests.unit.capture.machine import LAYERS, LAYOUT, SIZE, WIDTH, Machine

TOKENS = 2 * SIZE
PAGES = np.array([5, 2])


class RecomputedModel:
    """Shows each layer's projection its rows, so many at a time.

    Attributes:
        rows: float32 ``[layers, tokens, width]``.
        skips: A layer that sees nothing of the last tokens; None: all see all.
    """

    def __init__(self, machine: Machine, at_once: int = TOKENS) -> None:
        self.projections = [torch.nn.Linear(WIDTH, 1) for _ in range(LAYERS)]
        self.hooks = HiddenCapture([(projection, ()) for projection in self.projections])
        self.hooks.watch_only(self.projections)
        self.hooks._capture = machine.capture
        self.rows = torch.randn(LAYERS, TOKENS, WIDTH)
        self.skips: int | None = None
        self._at_once = at_once

    def run(self, *_: object) -> None:
        for start in range(0, TOKENS, self._at_once):
            for layer, projection in enumerate(self.projections):
                if layer != self.skips or not start:
                    rows = self.rows[layer, start : start + self._at_once].clone()
                    projection(rows)
                    rows.zero_()  # an activation is another one soon


def recomputed(model: RecomputedModel, machine: Machine) -> RecomputedRows:
    rows = RecomputedRows(machine.capture, machine.staging, model.hooks)
    fill: Callable[..., None] = model.run
    taken = rows.taken_from(Recompute(LAYERS, fill, current_stream("cpu")))
    taken.fill(np.arange(TOKENS), torch.arange(TOKENS))
    return rows


def in_pages(machine: Machine) -> torch.Tensor:
    """float32 ``[layers, tokens, width]``."""
    memory = machine.capture.memory
    layers = [memory[PAGES, LAYOUT.segment(layer)].contiguous() for layer in range(LAYERS)]
    return torch.stack([layer.view(torch.float32).view(TOKENS, WIDTH) for layer in layers])


@pytest.mark.parametrize("at_once", [TOKENS, SIZE])
@pytest.mark.parametrize("is_view", [True, False])
def test_pages_get_what_projections_received(is_view: bool, at_once: int) -> None:
    machine = Machine(is_view=is_view)
    model = RecomputedModel(machine, at_once)
    fits = recomputed(model, machine).save(PAGES)
    assert fits.tolist() == [True, True]
    assert torch.equal(in_pages(machine), model.rows)


def test_a_page_with_a_row_that_the_codec_does_not_hold_is_named() -> None:
    machine = Machine(is_view=False)
    model = RecomputedModel(machine)
    model.rows[1, SIZE + 1, 0] = torch.nan
    assert recomputed(model, machine).save(PAGES).tolist() == [True, False]


def test_a_layer_that_shows_too_few_rows_has_failed() -> None:
    machine = Machine()
    model = RecomputedModel(machine, at_once=SIZE)
    model.skips = 1
    with pytest.raises(RuntimeError, match=r"\[8, 4, 8\] rows of 8"):
        recomputed(model, machine)
    assert model.hooks._aside is None


def test_rows_of_others_are_not_taken() -> None:
    machine = Machine()
    model = RecomputedModel(machine)
    rows, taken = recomputed(model, machine), model.rows.clone()
    model.rows += 1.0
    model.run()  # a forward pass that is not captured
    rows.save(PAGES)
    assert torch.equal(in_pages(machine), taken)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Identity(), torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(self.qkv(hidden))  # type: ignore[no-any-return]


def test_a_layer_takes_few_calls_in_python() -> None:
    """Of functions of ours, and of torch's on the way to them."""
    machine, layers = Machine(), [Attention() for _ in range(LAYERS)]
    hooks = HiddenCapture([(layer, (layer.qkv, layer.out)) for layer in layers])
    hooks.watch_only(layer.qkv for layer in layers)
    hooks.use(machine.capture, tokens_only=False)
    where, hidden = torch.tensor([SIZE, 2 * SIZE]), torch.zeros(2, WIDTH)
    assert machine.capture.begin(where, where, where) is not None
    assert 0 < calls_of(layers[0], hidden) - calls_of(Attention(), hidden) <= 10


def calls_of(layer: Attention, hidden: torch.Tensor) -> int:
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
