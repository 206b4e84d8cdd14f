"""How each layer of this server is stored, and how many first layers each restore recomputes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial

from hcache_backend.partition.costs import L3Path, LayerMethod, Partition, layer_costs
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.plan import describe
from hcache_backend.partition.profile import Profile
from hcache_backend.partition.solver import Objective, recompute_layers
from hcache_backend.partition.timeline import finish
from hcache_backend.restore.parts import FIRST_PIECE_TOKENS, FIRST_PIECES
from hcache_backend.restore.ring import RUN_AHEAD


def pipeline_seconds(chunk_tokens: int, tokens: int, ranks: int, parks: bool) -> Objective:
    """How long the pipeline takes for ``tokens`` tokens; the rest as in :class:`LayerMethods`."""
    ring = RUN_AHEAD * chunk_tokens // min(tokens, chunk_tokens)
    pieces = min(FIRST_PIECES, tokens // FIRST_PIECE_TOKENS) if ranks == 1 else 1
    chunks = -(-tokens // chunk_tokens)
    return partial(finish, ring=ring, chunks=chunks, pieces=max(1, pieces), parks=parks)


@dataclass(frozen=True)
class LayerMethods:
    """What is stored of each layer (fixed while a server runs), and what decides a restore.

    Attributes:
        partition: Numbers of layers by method.
        profile: The machine; None where nobody measured it: then no restore recomputes more than
            it must.
        shape: The model as the cost model sees it; None without a profile.
        chunk_tokens: Tokens that a projection takes at most; the pipeline's ring goes by it.
        parks: Whether segments can wait in the KV pool.
        recomputable: How many first layers can be recomputed here.
        ranks: Tensor-parallel ranks. With several, recomputation and transfers are not at work at
            once, because both talk to the other ranks: no more is recomputed than must be.
        eager: Whether pages are restored while L3 is being read: of those from there the same
            layers are recomputed however many they are.
    """

    partition: Partition
    profile: Profile | None
    shape: ModelShape | None
    chunk_tokens: int
    parks: bool = False
    recomputable: int = sys.maxsize
    ranks: int = 1
    eager: bool = False

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

    def recomputing_first(self, most: int) -> LayerMethods:
        """The same hidden layers, and at most the first ``most`` layers recomputed."""
        return replace(self, recomputable=most)

    def first_layers(self, tokens: int, prefix: int, l3: L3Path, slowdown: float = 1.0) -> int:
        """How many of the first layers one restore recomputes.

        Args:
            tokens: Tokens that are restored.
            prefix: Tokens before them.
            l3: ``none`` for pages that are in host memory, ``first`` for those that must be read.
            slowdown: How many times as long as by the profile recomputation takes at this moment;
                infinite: only what must be recomputed is.
        """
        least = min(self.partition.recompute, self.recomputable)
        if not self.recomputable or self.profile is None or self.shape is None or not tokens:
            return least
        if self.ranks > 1 or slowdown == math.inf or (self.eager and l3 != "none"):
            return least
        costs = layer_costs(self.profile, self.shape, tokens, prefix=prefix, l3=l3, early_stop=True)
        costs = costs.slower_recomputation(slowdown)
        seconds = pipeline_seconds(self.chunk_tokens, tokens, self.ranks, self.parks)
        return min(recompute_layers(costs, self.partition, seconds), self.recomputable)

    def recomputing(self, tokens: int, prefix: float) -> float:
        """Seconds to recompute one layer of ``tokens`` tokens behind ``prefix``.

        Without a profile it is in no unit, and says only how the time grows.
        """
        if self.profile is None or self.shape is None:
            return float(tokens)
        costs = layer_costs(self.profile, self.shape, tokens, prefix=int(prefix), tp=self.ranks)
        return costs.c_tok

    def describe(self) -> str:
        """The methods in words, for the log."""
        return describe(Partition(*(len(self.layers(m)) for m in ("recompute", "hidden", "kv"))))
