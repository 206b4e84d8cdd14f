"""The pipeline of a restore: its simulation, and the search for the fastest partition."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

from hcache_backend.plan.costs import LAYER_METHODS, LayerCosts, LayerMethod, Partition

_FASTER = 1 - 1e-9  # quotients closer to 1 are the rounding of sums

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
