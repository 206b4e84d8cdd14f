"""What is slowed down, by how much, and with which servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bench.harness.methods import LAYERWISE, METHODS, Method
from bench.harness.models import TinyLlama


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        slowed: What gets slower.
        layers: How many the model has.
        tokens: Tokens of the prompt but its last one: a whole number of pages.
        rates: MB/s; 0: no limit.
        rounds: Restores by every server at each rate.
        timed: Field of :class:`Restore`.
        methods: Servers, by name.
        one_by_one: The method that restores all layers after L3 was read, from hidden states or,
            with fewer ``kv_heads`` than heads, from K and V.
        automatic: Whether a server is started for each rate that chooses the partition itself.
        bus: MB/s of copies to the device, where L3 is what gets slower; 0: no limit.
    """

    slowed: Literal["bus", "L3"]
    layers: int
    tokens: int
    rates: tuple[float, ...]
    rounds: int
    timed: str
    methods: Mapping[str, Method]
    one_by_one: str
    automatic: bool
    kv_heads: int = 8
    bus: float = 0.0

    @property
    def shape(self) -> TinyLlama:
        return TinyLlama(
            layers=self.layers, hidden=1024, heads=8, kv_heads=self.kv_heads, intermediate=2816
        )

    @property
    def stored_bytes(self) -> float:
        """Bytes that are stored of the prompt: hidden states with MHA, else K and V."""
        kv = self.tokens * self.shape.kv_bytes_per_token
        return kv / 2 if self.kv_heads == self.shape.heads else kv


def _ours(title: str, **hcache: Any) -> Method:
    """Ours, that reads L3 and then restores, unless the options say otherwise."""
    return Method(title, storage="dynamic", hcache={**LAYERWISE, **hcache})


AUTOMATIC = _ours("automatic", mode="auto")
EAGER = {"restore": "auto", "recompute": "never"}
"""Every page is read; what recomputing the front meanwhile brings is for bench.beside."""
SWEEPS = {
    "partition": Sweep(
        slowed="bus",
        layers=8,
        tokens=1024,
        rates=(20, 50, 100, 200, 400, 800, 0),
        rounds=6,
        timed="load_ms",
        methods={
            "hidden": _ours("hidden states", partition={"hidden": 8}),
            "kv": _ours("KV", mode="kv"),  # as a server that chooses KV for every layer serves
            "recompute": _ours("recompute", partition={"recompute": 8}),
        },
        one_by_one="hidden",
        automatic=True,
    ),
    "eager": Sweep(
        slowed="L3",
        layers=4,
        tokens=4096,
        rates=(10, 25, 100, 200, 400, 0),
        rounds=5,
        timed="ms",
        methods={
            "eager": _ours("eager", mode="hidden", **EAGER),
            "layerwise": _ours("layer-wise", mode="hidden"),
            "kv": _ours("KV pages", mode="kv"),
        },
        one_by_one="layerwise",
        automatic=False,
    ),
    "eager_kv": Sweep(
        slowed="L3",
        layers=4,
        tokens=4096,
        rates=(10, 25, 100, 0),
        rounds=5,
        timed="ms",
        methods={
            "eager": _ours("eager", mode="kv", **EAGER),
            "layerwise": _ours("layer-wise", mode="kv"),
            "file": METHODS["file"],
        },
        one_by_one="layerwise",
        automatic=False,
        kv_heads=2,
        bus=50,
    ),
}
