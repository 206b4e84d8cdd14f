"""The cost model of a restore, for the planner, the start-up, the hit gate and every load."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from hcache_backend.plan.costs import (
    LAYER_METHODS,
    L3Path,
    LayerCosts,
    LayerMethod,
    Partition,
    describe,
)
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.pipeline import (
    Objective,
    recompute_layers,
    search,
    simulate,
)
from hcache_backend.plan.profile import Profile

READ_BATCHES = 16
"""The pages of a prefetch are read in about so many batches. What the last one brings is not
restored eagerly."""
RUN_AHEAD = 3
"""Segments of the longest restore that the ring holds: one is projected, one has arrived, and one
is arriving. A shorter restore runs further ahead in the same memory."""
FIRST_PIECES = 4
"""Pieces that the first layer of a restore comes in at most."""
FIRST_PIECE_TOKENS = 1024
"""Least tokens of a piece: a projection of fewer is not worth its launch."""


CHUNK_TOKENS = 8192  # of a server's projections: bounds the device memory of a restore


@dataclass(frozen=True)
class Restore:
    """Storage and restore of each layer of a model, and their times. Any thread.

    Attributes:
        profile: The machine; None: not measured, so restores recompute only what they must.
        shape: The model in encoded bytes; None without a profile.
        partition: Numbers of layers by method; fixed while a server runs.
        ranks: Tensor-parallel ranks. Several recompute only what they must, because recomputation
            and transfers both have collectives.
        chunk_tokens: Most tokens of a projection, and length of the pipeline's ring.
        parks: Segments can wait in the KV pool.
        recomputable: Number of first layers that can be recomputed here.
        eager: Pages are restored while L3 is being read.
        paper: Count as the paper: all segments have room, the first layer comes in one piece, and
            the last recomputed layer is computed whole.
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
        """Method of each layer; KV if its recomputation is not possible."""
        methods = [self.partition.method(layer) for layer in range(self.partition.layers)]
        for layer in range(self.recomputable, self.partition.recompute):
            methods[layer] = "kv"
        return tuple(methods)

    def layers(self, method: LayerMethod) -> tuple[int, ...]:
        return tuple(i for i, used in enumerate(self.methods) if used == method)

    def recomputing_first(self, most: int) -> Restore:
        """The same hidden layers, and at most the first ``most`` layers recomputed."""
        return replace(self, recomputable=most)

    def describe(self) -> str:
        return describe(Partition(*(len(self.layers(method)) for method in LAYER_METHODS)))

    # ---- estimates; without a profile only `layer` and `first_layers` have an answer ----

    def costs(self, tokens: int, prefix: float = 0, l3: L3Path = "none") -> LayerCosts:
        """Costs of one layer of ``tokens`` tokens; ``prefix`` tokens before them are on the device.
        Each rank has a device and a bus of the profile's; the ranks share L3, if there is one."""
        assert self.profile is not None and self.shape is not None
        profile, model, ranks = self.profile, self.shape, self.ranks
        # A rank holds its share of the KV heads, at least one; it projects whole latents.
        kv_share = 1.0 if model.latent else -(-model.kv_heads // ranks) / model.kv_heads
        hidden_share = 1 / ranks if profile.gathers else 1.0
        loaded = hidden_share if model.latent else kv_share
        projection = model.projection_flops * kv_share
        pairs = tokens * int(prefix) + tokens * tokens / 2
        c_tok = profile.dense.time(tokens * model.dense_flops / ranks)
        c_tok += profile.attention.time(pairs * model.attention_flops / ranks)
        # The engine leaves out attention and MLP of the last recomputed layer; the paper does not.
        last = profile.projection.time(tokens * (model.query_flops / ranks + projection))
        costs = LayerCosts(
            io_h=profile.hidden_copy.time(tokens * model.hidden_bytes * hidden_share),
            io_kv=profile.kv_load.time(tokens * model.kv_bytes * loaded),
            c_h=profile.projection.time(tokens * projection),
            c_tok=c_tok,
            c_tok_last=None if self.paper else min(c_tok, last),
            slowdown=profile.recompute_slowdown,
        )
        if profile.l3 is None or l3 == "none":
            return costs
        l3_h = profile.l3.time(tokens * model.hidden_bytes)
        l3_kv = profile.l3.time(tokens * model.kv_bytes)
        if l3 == "overlapped":
            return costs._replace(io_h=max(costs.io_h, l3_h), io_kv=max(costs.io_kv, l3_kv))
        return costs._replace(l3_h=l3_h, l3_kv=l3_kv)

    def seconds(self, tokens: int, l3: L3Path = "none") -> float:
        """Seconds of a restore of ``tokens`` tokens, counted as in the paper."""
        return simulate(self.costs(tokens, 0, l3), self.partition)

    def layer(self, tokens: int, prefix: float) -> float:
        """Seconds to recompute one layer of ``tokens`` tokens after ``prefix``. Without a profile
        the number has no unit and shows only the growth."""
        return float(tokens) if self.profile is None else self.costs(tokens, prefix).c_tok

    def prefill(self, tokens: int, prefix: float) -> float:
        """Seconds to compute all layers of ``tokens`` tokens after ``prefix``."""
        assert self.shape is not None
        return self.layer(tokens, prefix) * self.shape.layers

    def read(self, tokens: int, prefix: float) -> float:
        """Seconds to read ``tokens`` tokens from our store."""
        assert self.profile is not None and self.shape is not None
        assert self.profile.l3 is not None
        return self.profile.l3.time(tokens * self.partition.bytes_per_token(self.shape))

    def load(self, tokens: int, prefix: float) -> float:
        """Seconds that a batch waits for a load from host memory; eager: for its last pages."""
        return self.seconds(tokens) / (READ_BATCHES if self.eager else 1)

    def first_layers(self, tokens: int, prefix: int, slowdown: float = 1.0) -> int:
        """Number of first layers that a restore from host memory recomputes. ``slowdown``:
        recomputation relative to the profile; at infinity only layers that are not stored."""
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
        """The ``allowed`` partition whose restores of ``tokens`` tokens are the fastest.

        ``methods`` None: those that servers store. Servers store every layer, because hits in host
        memory want the first ones, and a restore may still recompute them.
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
