"""How many functions a layer's hook calls in each forward pass."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from hcache_backend.capture.hooks import HiddenCapture
from tests.unit.capture.machine import LAYERS, SIZE, WIDTH, Machine


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
    hooks.use(machine.capture, tokens_only=False, order=None)
    where, hidden = torch.tensor([SIZE, 2 * SIZE]), torch.zeros(2, WIDTH)
    assert machine.capture.begin(where, where, where) is not None
    assert 0 < calls_of(layers[0], hidden) - calls_of(Attention(), hidden) <= 10


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
