"""Partitions, and how long one layer takes by each method (paper sections 3.2, 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile

L3Path = Literal["overlapped", "first", "none"]
"""Where L3 is in a restore. ``overlapped``: pages are copied and projected while others are still
being read (the paper's system), so a transfer is as slow as the slower of L3 and bus. ``first``:
all is read before the restore begins (HiCache's prefetch). ``none``: pages are in host memory."""


LEAST_PART = 1 / 8
"""So much of a hit is read while the rest is recomputed, or none is read."""

LayerMethod = Literal["recompute", "hidden", "kv"]
LAYER_METHODS: tuple[LayerMethod, ...] = get_args(LayerMethod)


@dataclass(frozen=True)
class Partition:
    """How many layers each method restores, in the order of the layers.

    Recomputation needs nothing from the bus, so the hidden states of later layers arrive meanwhile;
    KV needs no computation, so it fills the bus while the last projections run (section 4.1).

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


def describe(partition: Partition) -> str:
    """The methods of a partition in words, in the order of the layers."""
    parts = [
        (partition.recompute, "recomputed"),
        (partition.hidden, "from hidden states"),
        (partition.kv, "loaded as KV"),
    ]
    return ", ".join(
        f"{count} layer{'s' if count > 1 else ''} {how}" for count, how in parts if count
    )


class LayerCosts(NamedTuple):
    """Seconds of one layer of all tokens of a restore.

    Attributes:
        io_h: Transfer of hidden states.
        io_kv: Transfer of K and V.
        c_h: Projection of hidden states to K and V.
        c_tok: Recomputation from the layer's input.
        l3_h: Reading hidden states from L3 before the restore begins.
        l3_kv: Reading K and V from L3 before the restore begins.
        c_tok_last: Recomputation of the last recomputed layer, where it ends with the layer's K and
            V; None: as long as the others, as in the paper.
        slowdown: How much longer recomputation takes while other layers are copied.
    """

    io_h: float
    io_kv: float
    c_h: float
    c_tok: float
    l3_h: float = 0.0
    l3_kv: float = 0.0
    c_tok_last: float | None = None
    slowdown: float = 1.0

    def slower_recomputation(self, times: float) -> LayerCosts:
        """The same if recomputation takes ``times`` times as long."""
        last = None if self.c_tok_last is None else times * self.c_tok_last
        return self._replace(c_tok=times * self.c_tok, c_tok_last=last)

    def recomputation(self, layers: int, *, beside_copies: bool = False) -> float:
        """Seconds to recompute the first ``layers`` layers."""
        slowdown = self.slowdown if beside_copies else 1.0
        if layers == 0 or self.c_tok_last is None:
            return slowdown * layers * self.c_tok
        return slowdown * ((layers - 1) * self.c_tok + self.c_tok_last)

    def reading(self, partition: Partition) -> float:
        """Seconds of L3 before the restore of ``partition`` begins."""
        return self.l3_h * partition.hidden + self.l3_kv * partition.kv

    def transfer(self, partition: Partition) -> float:
        """Seconds that the transfers of ``partition`` take together."""
        return self.io_h * partition.hidden + self.io_kv * partition.kv

    def compute(self, partition: Partition) -> float:
        """Seconds that recomputation and projections take together."""
        recomputation = self.recomputation(
            partition.recompute, beside_copies=partition.recompute < partition.layers
        )
        return recomputation + self.c_h * partition.hidden

    def least(self, partition: Partition) -> float:
        """Seconds that no restore of ``partition`` falls short of: those of the slower stream.

        It is the paper's objective (section 4.1.2), which leaves out filling the pipeline.
        """
        return self.reading(partition) + max(self.compute(partition), self.transfer(partition))


def layer_costs(
    profile: Profile,
    model: ModelShape,
    tokens: int,
    *,
    prefix: int = 0,
    tp: int = 1,
    l3: L3Path = "overlapped",
    early_stop: bool = False,
) -> LayerCosts:
    """The costs of one layer.

    Args:
        tokens: Tokens that are restored.
        prefix: Tokens before them that are on the device already; recomputation attends to them.
        tp: Tensor-parallel ranks, each with a device and a bus of the profile's; L3 is shared.
        l3: Where L3 is. It counts only where the profile has one.
        early_stop: Whether recomputation ends with K and V of its last layer, whose attention and
            MLP nobody needs, as the engine does it. Without it that layer is computed whole, as the
            paper counts.
    """
    # A rank holds its share of the KV heads, at least one; a latent is on every rank.
    kv_share = 1.0 if model.latent else -(-model.kv_heads // tp) / model.kv_heads
    projection = model.projection_flops * kv_share
    io_h = profile.hidden_copy.time(
        tokens * (model.hidden_bytes / tp if profile.gathers else model.hidden_bytes)
    )
    io_kv = profile.kv_load.time(tokens * model.kv_bytes * kv_share)
    c_h = profile.projection.time(tokens * projection)
    pairs = tokens * prefix + tokens * tokens / 2
    c_tok = profile.dense.time(tokens * model.dense_flops / tp)
    c_tok += profile.attention.time(pairs * model.attention_flops / tp)
    last = None
    if early_stop:
        last = min(c_tok, profile.projection.time(tokens * (model.query_flops / tp + projection)))
    slowdown = profile.recompute_slowdown
    costs = LayerCosts(io_h, io_kv, c_h, c_tok, c_tok_last=last, slowdown=slowdown)
    if profile.l3 is None or l3 == "none":
        return costs
    l3_h = profile.l3.time(tokens * model.hidden_bytes)
    l3_kv = profile.l3.time(tokens * model.kv_bytes)
    if l3 == "overlapped":
        return costs._replace(io_h=max(io_h, l3_h), io_kv=max(io_kv, l3_kv))
    return costs._replace(l3_h=l3_h, l3_kv=l3_kv)


def side_by_side(one: float, other: float, share: float = 1.0) -> float:
    """Seconds that two take together for what each takes so long for, which may be infinite.

    The other one can do this ``share`` of it at most.
    """
    if not share or math.inf in (one, other):
        return min(one, other) if share == 1.0 else one
    return max(one * other / (one + other), one * (1 - share)) if one else 0.0


def until_there(reading: float, recomputing: float, share: float = 1.0) -> float:
    """Seconds until a hit is there of which the back is read and meanwhile the front recomputed.

    Not where L3 would bring less than :data:`LEAST_PART` of it: then it is read only.

    Args:
        reading: Seconds to read all of it.
        recomputing: Seconds to recompute all of it; infinite: nobody knows, or it is not done.
        share: How much of it can be recomputed at most.
    """
    worth_it = side_by_side(reading, recomputing) > LEAST_PART * reading
    return side_by_side(reading, recomputing, share) if worth_it else reading
