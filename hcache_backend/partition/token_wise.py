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

from hcache_backend.partition.costs import L3Path, LayerCosts, layer_costs
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile

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

    @property
    def tokens(self) -> int:
        return self.recompute + self.hidden + self.kv


def token_wise_costs(
    profile: Profile,
    model: ModelShape,
    split: TokenSplit,
    *,
    tile: int = TILE,
    tp: int = 1,
    l3: L3Path = "overlapped",
) -> LayerCosts:
    """The costs of one layer in which every method restores its part of the tokens.

    Args:
        profile: The machine.
        model: The model.
        split: Tokens of each method.
        tile: Rows of a GEMM that are computed together; 1: any number is as good.
        tp: Tensor-parallel ranks.
        l3: Where L3 is in a restore.
    """

    def costs(tokens: int, prefix: int = 0) -> LayerCosts:
        if not tokens:
            return LayerCosts(0.0, 0.0, 0.0, 0.0)
        return layer_costs(profile, model, tokens, prefix=prefix, tp=tp, l3=l3)

    def whole(tokens: int) -> int:
        return -(-tokens // tile) * tile

    hidden, kv = costs(split.hidden), costs(split.kv)
    prefix = 0 if split.recompute_first else split.hidden + split.kv
    return LayerCosts(
        io_h=hidden.io_h,
        io_kv=kv.io_kv,
        c_h=costs(whole(split.hidden)).c_h,
        c_tok=costs(whole(split.recompute), prefix).c_tok,
        l3_h=hidden.l3_h,
        l3_kv=kv.l3_kv,
    )


def token_wise_makespan(
    profile: Profile,
    model: ModelShape,
    split: TokenSplit,
    *,
    tile: int = TILE,
    tp: int = 1,
    l3: L3Path = "overlapped",
) -> float:
    """Seconds of a restore whose every layer is split so. Arguments: :func:`token_wise_costs`.

    A layer's hidden states are transferred before its KV. They are projected before the last tokens
    are recomputed, or after the first ones are.
    """
    costs = token_wise_costs(profile, model, split, tile=tile, tp=tp, l3=l3)
    transfer = compute = model.layers * (costs.l3_h + costs.l3_kv)
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


def search_tokens(
    profile: Profile,
    model: ModelShape,
    tokens: int,
    *,
    recompute_first: bool = False,
    tile: int = TILE,
    tp: int = 1,
    l3: L3Path = "overlapped",
) -> TokenSplit:
    """The best split of ``tokens`` tokens between hidden states and one other method.

    With ``tile=1`` it is the paper's naive split, made as if time were proportional to tokens.
    """
    splits = (
        split
        for hidden in range(tokens, -1, -1)
        for split in (
            TokenSplit(0, hidden, tokens - hidden),
            TokenSplit(tokens - hidden, hidden, 0, recompute_first),
        )
    )
    return min(
        splits,
        key=lambda split: token_wise_makespan(profile, model, split, tile=tile, tp=tp, l3=l3),
    )
