"""The models and methods that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from bench.harness.methods import METHODS, Method
from bench.harness.models import TinyLlama, build_model
from bench.harness.turns import NO_L3

POSITIONS = 32768
ALWAYS, OURS = "always", "ours"
COMPARED: dict[str, Method] = {
    NO_L3: replace(METHODS["host"], title="no L3"),
    ALWAYS: Method(
        "every L3 hit read", storage="dynamic", hcache={"min_gain": 0, "recompute": "never"}
    ),
    OURS: Method("default options", storage="dynamic", hcache={"min_gain": 1.0}),
    "file": METHODS["file"],
    "nixl": METHODS["nixl"],
}


def layers(tokens: int) -> int:
    """How many a model has, so that computing a history takes about a second."""
    return max(1, 2048 // tokens)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        pages: What ours stores of it.
        build: Its folder, given the one above and the number of layers.
        insists: Options that make ours store that on a CPU, which projects slowly.
    """

    pages: str
    build: Callable[[Path, int], Path]
    insists: Mapping[str, str] = field(default_factory=dict)

    def methods(self) -> dict[str, Method]:
        """Those that can run here."""
        with_nixl = find_spec("nixl") is not None
        return {
            name: replace(how, hcache={**how.hcache, **self.insists})
            for name, how in COMPARED.items()
            if name != "nixl" or with_nixl
        }


def _llama(kv_heads: int) -> Callable[[Path, int], Path]:
    def build(folder: Path, layers: int) -> Path:
        shape = TinyLlama(
            layers, hidden=1024, heads=8, kv_heads=kv_heads, intermediate=2816, positions=POSITIONS
        )
        return shape.build(folder)

    return build


def _latent(folder: Path, layers: int) -> Path:
    return build_model(
        "deepseek",
        folder,
        num_hidden_layers=layers,
        hidden_size=1024,
        intermediate_size=2816,
        max_position_embeddings=POSITIONS,
        first_k_dense_replace=layers,
    )


MODELS = {
    "MHA": Model("hidden states", _llama(8), {"mode": "hidden"}),
    "GQA": Model("K and V", _llama(2)),
    "MLA": Model("plain pages", _latent),
}
