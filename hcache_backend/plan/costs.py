"""Partitions, the time of one layer by each method, and the pipeline of a restore: its simulation,
and the search for the fastest partition (paper sections 3.2, 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from hcache_backend.plan.model_shape import ModelShape

L3Path = Literal["overlapped", "first", "none"]
"""Reading of L3. ``overlapped``: during the restore (the paper), so a transfer is as slow as the
slower of L3 and bus. ``first``: before it (HiCache's prefetch). ``none``: not at all."""
LEAST_PART = 1 / 8  # least share of a hit that is read during recomputation; below it all is read

LayerMethod = Literal["recompute", "hidden", "kv"]
LAYER_METHODS: tuple[LayerMethod, ...] = get_args(LayerMethod)

_FASTER = 1 - 1e-9  # quotients closer to 1 are the rounding of sums


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


Objective = Callable[[LayerCosts, Partition], float]  # seconds, at least LayerCosts.least


class Task(NamedTuple):
    """Work on one stream, in seconds from the restore's beginning. L3 has no ``layer`` and
    ``method``, because its pages hold all layers."""

    stream: Literal["l3", "transfer", "compute"]
    layer: int | None
    method: LayerMethod | None
    start: float
    end: float


def simulate(
    costs: LayerCosts,
    partition: Partition,
    ring: int | None = None,
    chunks: int = 1,
    pieces: int = 1,
    parks: bool = False,
    note: Callable[..., Any] = lambda *task: None,
) -> float:
    """Seconds of a restore; each stream works through the layers in order.

    Args:
        ring: Segments with room on the device; None: all. A transfer waits until the segment
            ``ring`` before it was used: by its projection, or for KV by its own transfer.
        chunks: Segments of one layer; long restores arrive and are projected in parts.
        pieces: Parts of the first layer, if no layer is recomputed before it.
        parks: Segments wait elsewhere for the end of a recomputation, so all have room.
        note: Called with the fields of every :class:`Task`, those of a layer in order.
    """
    if partition.recompute:
        pieces, ring = 1, None if parks else ring
    begin = transfer = compute = costs.reading(partition)
    if begin:
        note("l3", None, None, 0.0, begin)
    copies = partition.recompute < partition.layers
    for layer in range(partition.recompute):
        end = begin + costs.recomputation(layer + 1, beside_copies=copies)
        note("compute", layer, "recompute", compute, end)
        compute = end
    io_h, io_kv, c_h = costs.io_h / chunks, costs.io_kv / chunks, costs.c_h / chunks
    hidden, segments = partition.hidden * chunks, (partition.hidden + partition.kv) * chunks
    room = segments if ring is None else ring
    parts = -(-pieces // chunks)
    used: list[float] = []
    for index in range(segments):
        layer = partition.recompute + index // chunks
        start = transfer if index < room else max(transfer, used[index - room])
        if index < hidden:
            transfer = start + io_h
            note("transfer", layer, "hidden", start, transfer)
            start = max(compute, transfer - io_h * (1 - 1 / parts))
            # Pieces go one after the other, at the pace of the slower stream.
            compute = max(start + c_h, transfer + c_h / parts)
            note("compute", layer, "hidden", start, compute)
            parts = 1
            used.append(compute)
        else:
            transfer = start + io_kv
            note("transfer", layer, "kv", start, transfer)
            used.append(transfer)
    return max(compute, transfer)


def search(
    costs: LayerCosts,
    layers: int,
    objective: Objective = simulate,
    methods: Collection[LayerMethod] = LAYER_METHODS,
    allowed: Callable[[Partition], bool] = lambda partition: True,
) -> Partition:
    """The best ``allowed`` partition of ``layers`` layers by ``methods``. Ties go to the least
    recomputation, then to the most hidden states."""
    usable = set(methods)
    every = (
        Partition(recompute, hidden, layers - recompute - hidden)
        for recompute in range(layers + 1)
        for hidden in range(layers - recompute, -1, -1)
    )
    chosen = (each for each in every if each.methods <= usable and allowed(each))
    return _fastest(costs, chosen, objective)


def recompute_layers(
    costs: LayerCosts, partition: Partition, objective: Objective = simulate
) -> int:
    """Number of first layers that a restore of the stored ``partition`` recomputes: at least those
    not stored. Ties go to the smallest number."""
    numbers = range(partition.recompute, partition.layers + 1)
    choices = (partition.recomputing(first) for first in numbers)
    return _fastest(costs, choices, objective).recompute


def _fastest(costs: LayerCosts, partitions: Iterable[Partition], objective: Objective) -> Partition:
    """The first of the fastest; the objective is not asked if the lower bound is too slow."""
    best, limit = None, math.inf
    for partition in partitions:
        if costs.least(partition) < limit:
            seconds = objective(costs, partition)
            if best is None or seconds < limit:
                best, limit = partition, seconds * _FASTER
    assert best is not None
    return best


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
