"""Rows that hooks take of pages that are recomputed whole."""

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

    def run(self) -> None:
        for start in range(0, TOKENS, self._at_once):
            for layer, projection in enumerate(self.projections):
                if layer != self.skips or not start:
                    rows = self.rows[layer, start : start + self._at_once].clone()
                    projection(rows)
                    rows.zero_()  # an activation is another one soon


def recomputed(model: RecomputedModel, machine: Machine) -> RecomputedRows:
    rows = RecomputedRows(machine.capture, machine.staging, model.hooks)
    recompute = Recompute(LAYERS, torch.arange(TOKENS), model.run, current_stream("cpu"))
    rows.with_rows_taken(recompute).fill()
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
    rows, taken = recomputed(model, machine), model.rows.clone()
    model.rows += 1.0
    model.run()  # a forward pass that is not captured: its rows are not taken
    assert rows.save_rows(PAGES).tolist() == [True, True]
    assert torch.equal(in_pages(machine), taken)


def test_a_page_with_a_row_that_the_codec_does_not_hold_is_named() -> None:
    machine = Machine(is_view=False)
    model = RecomputedModel(machine)
    model.rows[1, SIZE + 1, 0] = torch.nan
    assert recomputed(model, machine).save_rows(PAGES).tolist() == [True, False]


def test_a_layer_that_shows_too_few_rows_has_failed() -> None:
    machine = Machine()
    model = RecomputedModel(machine, at_once=SIZE)
    model.skips = 1
    with pytest.raises(RuntimeError, match=r"\[8, 4, 8\] rows of 8"):
        recomputed(model, machine)
    assert model.hooks._diverted_to is None
