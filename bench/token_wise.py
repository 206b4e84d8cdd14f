"""Splitting by tokens instead of layers: the partition that the paper rejects (4.1.1, 6.3.2).

In every layer, some tokens come back by one method and the others by another. That divides the work
more finely than layers can, but a GEMM computes whole tiles of rows: with a part of a tile it takes
as long as with all of it, and every layer has two parts. The paper says so without numbers (its
figure 13b has them). A tile of :data:`TILE` rows is an assumption: the largest power of two that
divides 768, which section 6.3.2 calls the optimised size nearest to 794, and the 256 beside it.

Everything else is modelled in favour of this partition: transfers run ahead of the computation
through all layers, and the second part of a layer costs no launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from hcache_backend.partition.costs import LayerCosts, Partition
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile
from hcache_backend.partition.restore import Restore

TILE = 128


@dataclass(frozen=True)
class TokenSplit:
    """How many tokens each method restores, in every layer.

    Attributes:
        recompute: Tokens that are recomputed.
        hidden: Tokens from hidden states.
        kv: Tokens loaded as KV.
        recompute_first: Whether the recomputed tokens are the first ones, which attend to each
            other only and wait for nobody, or the last ones, as in the paper's figure 8: those
            attend to all tokens, and in every layer wait until the others are there.
    """

    recompute: int
    hidden: int
    kv: int
    recompute_first: bool = False


def token_wise_costs(profile: Profile, model: ModelShape, split: TokenSplit) -> LayerCosts:
    """The costs of one layer in which every method restores its part of the tokens."""

    restore = Restore(profile, model, Partition(0, 0, model.layers), paper=True)

    def costs(tokens: int, prefix: int = 0) -> LayerCosts:
        if not tokens:
            return LayerCosts(0.0, 0.0, 0.0, 0.0)
        return restore.costs(tokens, prefix, "overlapped")

    def whole(tokens: int) -> int:
        return -(-tokens // TILE) * TILE

    prefix = 0 if split.recompute_first else split.hidden + split.kv
    return LayerCosts(
        io_h=costs(split.hidden).io_h,
        io_kv=costs(split.kv).io_kv,
        c_h=costs(whole(split.hidden)).c_h,
        c_tok=costs(whole(split.recompute), prefix).c_tok,
    )


def token_wise_makespan(profile: Profile, model: ModelShape, split: TokenSplit) -> float:
    """Seconds of a restore whose every layer is split so.

    A layer's hidden states are transferred before its KV. They are projected before the last tokens
    are recomputed, or after the first ones are.
    """
    costs = token_wise_costs(profile, model, split)
    transfer = compute = 0.0
    for _ in range(model.layers):
        arrived = transfer + costs.io_h
        transfer = arrived + costs.io_kv
        if split.recompute_first:
            compute += costs.c_tok
        if split.hidden:
            compute = max(compute, arrived) + costs.c_h
        if split.recompute and not split.recompute_first:
            compute = max(compute, transfer) + costs.c_tok
    return max(compute, transfer)
