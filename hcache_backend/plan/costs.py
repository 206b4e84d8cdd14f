"""Partitions, and the time of one layer by each method (paper sections 3.2, 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hcache_backend.plan.model_shape import ModelShape

L3Path = Literal["overlapped", "first", "none"]
"""Reading of L3. ``overlapped``: during the restore (the paper), so a transfer is as slow as the
slower of L3 and bus. ``first``: before it (HiCache's prefetch). ``none``: not at all."""
LEAST_PART = 1 / 8  # least share of a hit that is read during recomputation; below it all is read

LayerMethod = Literal["recompute", "hidden", "kv"]
LAYER_METHODS: tuple[LayerMethod, ...] = get_args(LayerMethod)


@dataclass(frozen=True)
class Partition:
    """Numbers of layers by method: the first ones, the next ones, the last ones. Recomputation
    needs no bus, so later hidden states arrive meanwhile. KV needs no computation, so it fills the
    bus during the last projections (section 4.1)."""

    recompute: int
    hidden: int
    kv: int

    @property
    def layers(self) -> int:
        return self.recompute + self.hidden + self.kv

    @property
    def methods(self) -> set[LayerMethod]:
        return {method for method in LAYER_METHODS if getattr(self, method)}

    def method(self, layer: int) -> LayerMethod:
        if layer < self.recompute:
            return "recompute"
        return "hidden" if layer < self.recompute + self.hidden else "kv"

    def bytes_per_token(self, model: ModelShape) -> int:
        """Stored bytes of a token."""
        return self.hidden * model.hidden_bytes + self.kv * model.kv_bytes

    def recomputing(self, first: int) -> Partition:
        """This partition with the first ``first`` layers recomputed, although they are stored."""
        hidden = max(0, min(self.hidden, self.recompute + self.hidden - first))
        return Partition(first, hidden, self.layers - first - hidden)


def describe(partition: Partition) -> str:
    """The methods in words, in the order of the layers."""
    parts = [
        (partition.recompute, "recomputed"),
        (partition.hidden, "from hidden states"),
        (partition.kv, "loaded as KV"),
    ]
    return ", ".join(
        f"{count} layer{'s' if count > 1 else ''} {how}" for count, how in parts if count
    )


class LayerCosts(NamedTuple):
    """Seconds of one layer of all tokens of a restore."""

    io_h: float  # transfer of hidden states
    io_kv: float  # transfer of K and V
    c_h: float  # projection of hidden states to K and V
    c_tok: float  # recomputation from the layer's input
    l3_h: float = 0.0  # reading hidden states from L3 before the restore
    l3_kv: float = 0.0
    c_tok_last: float | None = None  # the last one ends with K and V; None: as in the paper
    slowdown: float = 1.0  # of recomputation while other layers are copied

    def slower_recomputation(self, times: float) -> LayerCosts:
        last = None if self.c_tok_last is None else times * self.c_tok_last
        return self._replace(c_tok=times * self.c_tok, c_tok_last=last)

    def recomputation(self, layers: int, *, beside_copies: bool = False) -> float:
        """Seconds to recompute the first ``layers`` layers."""
        slowdown = self.slowdown if beside_copies else 1.0
        if layers == 0 or self.c_tok_last is None:
            return slowdown * layers * self.c_tok
        return slowdown * ((layers - 1) * self.c_tok + self.c_tok_last)

    def reading(self, partition: Partition) -> float:
        """Seconds of L3 before the restore begins."""
        return self.l3_h * partition.hidden + self.l3_kv * partition.kv

    def transfer(self, partition: Partition) -> float:
        return self.io_h * partition.hidden + self.io_kv * partition.kv

    def compute(self, partition: Partition) -> float:
        """Seconds of recomputation and projections."""
        recomputation = self.recomputation(
            partition.recompute, beside_copies=partition.recompute < partition.layers
        )
        return recomputation + self.c_h * partition.hidden

    def least(self, partition: Partition) -> float:
        """Lower bound: seconds of the slower stream. It is the paper's objective (section 4.1.2),
        which leaves out filling the pipeline."""
        return self.reading(partition) + max(self.compute(partition), self.transfer(partition))


def side_by_side(one: float, other: float, share: float = 1.0) -> float:
    """Seconds of two workers together, who need ``one`` and ``other`` (or infinity) alone. The
    other one can do at most ``share`` of the work."""
    if not share or math.inf in (one, other):
        return min(one, other) if share == 1.0 else one
    return max(one * other / (one + other), one * (1 - share)) if one else 0.0


def until_there(reading: float, recomputing: float, share: float = 1.0) -> float:
    """Completion time of a hit whose back is read while its front, at most ``share``, is
    recomputed. ``reading`` and ``recomputing`` are seconds for all of it (infinity: impossible)."""
    worth_it = side_by_side(reading, recomputing) > LEAST_PART * reading
    return side_by_side(reading, recomputing, share) if worth_it else reading
