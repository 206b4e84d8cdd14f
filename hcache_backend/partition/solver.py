"""Which method restores which layer, so that transfer and computation end together.

Layers stand in this order: recomputed ones first, then hidden states, then KV. Recomputation needs
nothing from the bus, so the hidden states of later layers arrive meanwhile; KV needs no
computation, so it fills the bus while the last projections run (paper section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hcache_backend.partition.costs import L3Path, LayerCosts, layer_costs
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile

Method = Literal["recompute", "hidden", "kv"]


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

    def method(self, layer: int) -> Method:
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


Objective = Callable[[LayerCosts, Partition], float]


def makespan(costs: LayerCosts, partition: Partition) -> float:
    """Seconds of a restore, first transfer and last projection included.

    Exact for two streams that each work through the layers in order and wait for nothing else: the
    projections end when the computation does that begins with the first or the last of them.
    """
    transfer = costs.io_h * partition.hidden + costs.io_kv * partition.kv
    compute = costs.c_tok * partition.recompute + costs.c_h * partition.hidden
    end = max(compute, transfer)
    if partition.hidden:
        end = max(
            end,
            costs.io_h + costs.c_h * partition.hidden,
            costs.io_h * partition.hidden + costs.c_h,
        )
    return costs.l3_h * partition.hidden + costs.l3_kv * partition.kv + end


def steady_makespan(costs: LayerCosts, partition: Partition) -> float:
    """The paper's objective (section 4.1.2): :func:`makespan` without filling the pipeline."""
    transfer = costs.io_h * partition.hidden + costs.io_kv * partition.kv
    compute = costs.c_tok * partition.recompute + costs.c_h * partition.hidden
    return costs.l3_h * partition.hidden + costs.l3_kv * partition.kv + max(compute, transfer)


def search(costs: LayerCosts, layers: int, objective: Objective = makespan) -> Partition:
    """The best of all partitions of ``layers`` layers.

    Of equally fast ones the one that recomputes least, then the one with most hidden states.
    """
    every = (
        Partition(recompute, hidden, layers - recompute - hidden)
        for recompute in range(layers + 1)
        for hidden in range(layers - recompute, -1, -1)
    )
    return min(every, key=lambda partition: objective(costs, partition))


def closed_form(costs: LayerCosts, layers: int) -> Partition | None:
    """The paper's solution of :func:`steady_makespan` for two methods (section 4.1.2).

    Hidden states with KV where the projection is the slower part, with recomputation otherwise;
    rounded up as in the paper. None where it does not apply: hidden states that take as long to
    transfer as KV, or as long to project as to recompute, or L3 outside the pipeline.
    """
    io_h, io_kv, c_h, c_tok, *l3 = costs
    if io_h >= io_kv or c_h >= c_tok or any(l3):
        return None
    if c_h > io_h:
        hidden = math.ceil(layers * io_kv / (io_kv + c_h - io_h))
        return Partition(0, hidden, layers - hidden)
    hidden = math.ceil(layers * c_tok / (c_tok + io_h - c_h))
    return Partition(layers - hidden, hidden, 0)


def solve(
    profile: Profile,
    model: ModelShape,
    tokens: int,
    *,
    tp: int = 1,
    l3: L3Path = "overlapped",
) -> Partition:
    """The partition that restores ``tokens`` tokens fastest: what to store for every layer.

    What is not stored must be recomputed, however long the context turns out to be. Recomputation
    is quadratic, so solve for a long context: :func:`recompute_layers` recomputes more of a
    short one.

    Args:
        profile: The machine.
        model: The model.
        tokens: Tokens of a restore.
        tp: Tensor-parallel ranks.
        l3: Where L3 is in a restore.
    """
    return search(layer_costs(profile, model, tokens, tp=tp, l3=l3), model.layers)


def recompute_layers(
    profile: Profile,
    model: ModelShape,
    partition: Partition,
    tokens: int,
    *,
    prefix: int = 0,
    tp: int = 1,
    l3: L3Path = "overlapped",
) -> int:
    """How many of the first layers one restore recomputes instead of loading them.

    At least those that are not stored; of equally fast numbers the smallest.

    Args:
        profile: The machine.
        model: The model.
        partition: What is stored.
        tokens: Tokens of this restore.
        prefix: Tokens before them that are on the device already.
        tp: Tensor-parallel ranks.
        l3: Where the pages are: ``none`` when host memory has them.
    """
    costs = layer_costs(profile, model, tokens, prefix=prefix, tp=tp, l3=l3)
    return min(
        range(partition.recompute, partition.layers + 1),
        key=lambda first: makespan(costs, partition.recomputing(first)),
    )
