"""Which method restores which layer, so that transfer and computation end together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from hcache_backend.partition.costs import LAYER_METHODS, LayerCosts, LayerMethod, Partition

Objective = Callable[[LayerCosts, Partition], float]
"""Seconds of a restore; :func:`steady_makespan` or more."""


def makespan(costs: LayerCosts, partition: Partition) -> float:
    """Seconds of a restore, first transfer and last projection included.

    Exact for two streams that each work through the layers in order and wait for nothing else: the
    projections end when the computation does that begins with the first or the last of them.
    """
    steady = steady_makespan(costs, partition)
    if not partition.hidden:
        return steady
    first = costs.io_h + costs.c_h * partition.hidden
    last = costs.io_h * partition.hidden + costs.c_h
    return max(steady, costs.reading(partition) + max(first, last))


def steady_makespan(costs: LayerCosts, partition: Partition) -> float:
    """The paper's objective (section 4.1.2): :func:`makespan` without filling the pipeline."""
    slower = max(costs.compute(partition), costs.transfer(partition))
    return costs.reading(partition) + slower


def search(
    costs: LayerCosts,
    layers: int,
    objective: Objective = makespan,
    methods: Collection[LayerMethod] = LAYER_METHODS,
) -> Partition:
    """The best of all partitions of ``layers`` layers under an objective.

    Of equally fast ones the one that recomputes least, then the one with most hidden states.

    Args:
        methods: Those that may be used. Without hidden states it is the paper's naive hybrid
            (section 6.3.1).
    """
    usable = set(methods)
    every = (
        Partition(recompute, hidden, layers - recompute - hidden)
        for recompute in range(layers + 1)
        for hidden in range(layers - recompute, -1, -1)
    )
    allowed = (partition for partition in every if partition.methods <= usable)
    return _fastest(costs, allowed, objective)


def recompute_layers(
    costs: LayerCosts, partition: Partition, objective: Objective = makespan
) -> int:
    """How many of the first layers one restore recomputes instead of loading them.

    At least those that are not stored; of equally fast numbers the smallest. ``partition`` is what
    is stored, ``costs`` are those of this restore.
    """
    numbers = range(partition.recompute, partition.layers + 1)
    choices = (partition.recomputing(first) for first in numbers)
    return _fastest(costs, choices, objective).recompute


def _fastest(costs: LayerCosts, partitions: Iterable[Partition], objective: Objective) -> Partition:
    """The first of the fastest, without asking the objective where it cannot be faster."""
    best, fastest = None, math.inf
    for partition in partitions:
        if steady_makespan(costs, partition) < fastest:
            seconds = objective(costs, partition)
            if seconds < fastest:
                best, fastest = partition, seconds
    assert best is not None
    return best
