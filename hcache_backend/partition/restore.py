"""What a restore takes: the planner, the start-up, the hit gate and every load ask it here."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from hcache_backend.page import FIRST_PIECE_TOKENS, FIRST_PIECES, READ_BATCHES, RUN_AHEAD
from hcache_backend.partition.costs import (
    LAYER_METHODS,
    L3Path,
    LayerCosts,
    LayerMethod,
    Partition,
    describe,
    layer_costs,
)
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.pipeline import (
    Objective,
    recompute_layers,
    search,
    simulate,
)
from hcache_backend.partition.profile import Profile


@dataclass(frozen=True)
class Restore:
    """How a server stores and restores each layer of a model, and how long that takes.

    What is stored is fixed while a server runs. Any thread.

    Attributes:
        profile: The machine; None if it was not measured: then no restore recomputes more than it
            must.
        shape: The model, with the bytes that a codec leaves; None without a profile.
        partition: Numbers of layers by method.
        ranks: Tensor-parallel ranks. With several, no more is recomputed than must be:
            recomputation and transfers both talk to the other ranks, so they are not at work at
            once.
        chunk_tokens: Tokens of a projection at most, which the size of the pipeline's ring follows.
        parks: Segments can wait in the KV pool.
        recomputable: How many first layers can be recomputed here.
        eager: Pages are restored while L3 is being read.
        paper: Time is counted as by the paper: the device has room for all segments, the first
            layer comes in one piece, and the last recomputed layer is computed whole.
    """

    profile: Profile | None
    shape: ModelShape | None
    partition: Partition
    ranks: int = 1
    chunk_tokens: int = sys.maxsize
    parks: bool = False
    recomputable: int = sys.maxsize
    eager: bool = False
    paper: bool = False

    @property
    def methods(self) -> tuple[LayerMethod, ...]:
        """The method of every layer; KV instead of a recomputation that is not possible."""
        methods = [self.partition.method(layer) for layer in range(self.partition.layers)]
        for layer in range(self.recomputable, self.partition.recompute):
            methods[layer] = "kv"
        return tuple(methods)

    def layers(self, method: LayerMethod) -> tuple[int, ...]:
        """The layers of a method."""
        return tuple(i for i, used in enumerate(self.methods) if used == method)

    def recomputing_first(self, most: int) -> Restore:
        """The same hidden layers, and at most the first ``most`` layers recomputed."""
        return replace(self, recomputable=most)

    def describe(self) -> str:
        """The methods in words, for the log."""
        return describe(Partition(*(len(self.layers(method)) for method in LAYER_METHODS)))

    # ---- estimates; without a profile only `layer` and `first_layers` have an answer ----

    def costs(self, tokens: int, prefix: float = 0, l3: L3Path = "none") -> LayerCosts:
        """The costs of one layer; arguments as of :func:`layer_costs`."""
        assert self.profile is not None and self.shape is not None
        early_stop, sizes = not self.paper, {"prefix": int(prefix), "tp": self.ranks}
        return layer_costs(self.profile, self.shape, tokens, l3=l3, early_stop=early_stop, **sizes)

    def layer(self, tokens: int, prefix: float) -> float:
        """Seconds to recompute one layer of ``tokens`` tokens behind ``prefix``.

        Without a profile it is in no unit, and says only how the time grows.
        """
        return float(tokens) if self.profile is None else self.costs(tokens, prefix).c_tok

    def prefill(self, tokens: int, prefix: float) -> float:
        """Seconds to compute all layers of ``tokens`` tokens behind ``prefix``."""
        assert self.shape is not None
        return self.layer(tokens, prefix) * self.shape.layers

    def read(self, tokens: int, prefix: float) -> float:
        """Seconds to read ``tokens`` tokens from our store."""
        assert self.profile is not None and self.shape is not None
        assert self.profile.l3 is not None
        return self.profile.l3.time(tokens * self.partition.bytes_per_token(self.shape))

    def load(self, tokens: int, prefix: float) -> float:
        """Seconds that a batch waits for a load of ``tokens`` tokens from host memory.

        An eager restore has only the last pages left to do by then.
        """
        return simulate(self.costs(tokens), self.partition) / (READ_BATCHES if self.eager else 1)

    def first_layers(self, tokens: int, prefix: int, slowdown: float = 1.0) -> int:
        """How many of the first layers a restore from host memory recomputes.

        Args:
            tokens: Tokens that are restored.
            prefix: Tokens before them.
            slowdown: How many times as long as by the profile recomputation takes at this moment;
                infinite: only what must be recomputed is.
        """
        least = min(self.partition.recompute, self.recomputable)
        if not self.recomputable or self.profile is None or self.shape is None or not tokens:
            return least
        if self.ranks > 1 or slowdown == math.inf:
            return least
        costs = self.costs(tokens, prefix).slower_recomputation(slowdown)
        first = recompute_layers(costs, self.partition, self.pipeline(tokens))
        return min(first, self.recomputable)

    def fastest(
        self,
        tokens: int,
        l3: L3Path,
        methods: Collection[LayerMethod] | None = None,
        allowed: Callable[[Partition], bool] = lambda partition: True,
    ) -> Partition:
        """The partition whose restores of ``tokens`` tokens are the fastest, of those ``allowed``.

        Args:
            methods: Those that may be used; None: those that servers store. They store every layer:
                without first layers they would save disk, but hits in host memory and faster disks
                want these, and a restore may recompute layers that are stored.
        """
        assert self.shape is not None
        stored: set[LayerMethod] = {"hidden", "kv"} if self.shape.hidden_is_smaller else {"kv"}
        costs, layers = self.costs(tokens, 0, l3), self.shape.layers
        return search(costs, layers, self.pipeline(tokens), methods or stored, allowed)

    def pipeline(self, tokens: int) -> Objective:
        """The simulation of ``tokens`` tokens with the memory that the device has for them."""
        if self.paper:
            return simulate
        pieces = min(FIRST_PIECES, tokens // FIRST_PIECE_TOKENS) if self.ranks == 1 else 1
        return partial(
            simulate,
            ring=RUN_AHEAD * self.chunk_tokens // min(tokens, self.chunk_tokens),
            chunks=-(-tokens // self.chunk_tokens),
            pieces=max(1, pieces),
            parks=self.parks,
        )
