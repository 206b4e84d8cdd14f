"""A partition: which layers each method restores.

Layers stand in this order: recomputed ones first, then hidden states, then KV. Recomputation needs
nothing from the bus, so the hidden states of later layers arrive meanwhile; KV needs no
computation, so it fills the bus while the last projections run (paper section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hcache_backend.partition.model_shape import ModelShape

LayerMethod = Literal["recompute", "hidden", "kv"]
LAYER_METHODS: tuple[LayerMethod, ...] = get_args(LayerMethod)


@dataclass(frozen=True)
class Partition:
    """How many layers each method restores, in the order of the layers.

    Attributes:
        recompute: The first layers; nothing is stored for them.
        hidden: The next ones: hidden states.
        kv: The last ones: K and V.
    """

    recompute: int
    hidden: int
    kv: int

    @property
    def layers(self) -> int:
        return self.recompute + self.hidden + self.kv

    @property
    def methods(self) -> set[LayerMethod]:
        """The methods that restore a layer or more."""
        return {method for method in LAYER_METHODS if getattr(self, method)}

    def method(self, layer: int) -> LayerMethod:
        """The method of ``layer``."""
        if layer < self.recompute:
            return "recompute"
        return "hidden" if layer < self.recompute + self.hidden else "kv"

    def bytes_per_token(self, model: ModelShape) -> int:
        """Bytes that are stored for a token."""
        return self.hidden * model.hidden_bytes + self.kv * model.kv_bytes

    def recomputing(self, first: int) -> Partition:
        """The same, but with the first ``first`` layers recomputed, whatever is stored for them."""
        hidden = max(0, min(self.hidden, self.recompute + self.hidden - first))
        return Partition(first, hidden, self.layers - first - hidden)
