"""Partitions, and how long one layer takes by each method (paper sections 3.2, 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hcache_backend.plan.model_shape import ModelShape

L3Path = Literal["overlapped", "first", "none"]
"""When L3 is read. ``overlapped``: pages are copied and projected while others are still being read
(the paper's system), so a transfer is as slow as the slower of L3 and bus. ``first``: all pages are
read before the restore begins (HiCache's prefetch). ``none``: pages are in host memory."""
LEAST_PART = 1 / 8
"""Least share of a hit that is read while the rest is recomputed. Below it the hit is read only."""

LayerMethod = Literal["recompute", "hidden", "kv"]
LAYER_METHODS: tuple[LayerMethod, ...] = get_args(LayerMethod)


@dataclass(frozen=True)
class Partition:
    """How many layers each method restores: the first ones, the next ones, the last ones.

    Recomputation needs nothing from the bus, so the hidden states of later layers arrive meanwhile.
    KV needs no computation, so it fills the bus while the last projections run (section 4.1).
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
        """This partition with the first ``first`` layers recomputed, although they are stored."""
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
        c_tok_last: Recomputation of the last recomputed layer. It ends with the layer's K and V.
            None: as long as the others, as in the paper.
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


def side_by_side(one: float, other: float, share: float = 1.0) -> float:
    """Seconds that two workers need together. Alone they need ``one`` and ``other``, or infinity.

    The other one can do at most ``share`` of the work.
    """
    if not share or math.inf in (one, other):
        return min(one, other) if share == 1.0 else one
    return max(one * other / (one + other), one * (1 - share)) if one else 0.0


def until_there(reading: float, recomputing: float, share: float = 1.0) -> float:
    """Seconds until a hit is there whose back is read while its front is recomputed.

    A hit of which L3 would bring less than :data:`LEAST_PART` is read only.

    Args:
        reading: Seconds to read all of it.
        recomputing: Seconds to recompute all of it; infinite if that is unknown or not done.
        share: Largest share of it that can be recomputed.
    """
    worth_it = side_by_side(reading, recomputing) > LEAST_PART * reading
    return side_by_side(reading, recomputing, share) if worth_it else reading
