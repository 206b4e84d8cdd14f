"""The pipeline of a restore, task by task: what the pictures and the simulator draw."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hcache_backend.partition.costs import LayerCosts
from hcache_backend.partition.solver import Method, Partition

Stream = Literal["l3", "transfer", "compute"]


class Task(NamedTuple):
    """One piece of work on one stream.

    Attributes:
        stream: ``l3``: reading before the restore; ``transfer``: to the device; ``compute``.
        layer: The layer; None for L3, whose pages hold all layers.
        method: How the layer is restored; None for L3.
        start: Seconds from the beginning of the restore.
        end: Seconds from the beginning of the restore.
    """

    stream: Stream
    layer: int | None
    method: Method | None
    start: float
    end: float


def simulate(costs: LayerCosts, partition: Partition, ring: int | None = None) -> list[Task]:
    """Run a restore through its streams, each in the order of the layers.

    Args:
        costs: Seconds of one layer.
        partition: The method of every layer.
        ring: Layers of hidden states that have room on the device: a transfer waits until the
            projection of the layer that many before it has ended. None: room for all.

    Returns:
        The tasks, those of a layer in the order in which they run. The last end is the makespan.
    """
    tasks: list[Task] = []
    begin = costs.l3_h * partition.hidden + costs.l3_kv * partition.kv
    if begin:
        tasks.append(Task("l3", None, None, 0.0, begin))
    transfer = compute = begin
    projected: list[float] = []
    for layer in range(partition.layers):
        method = partition.method(layer)
        if method == "recompute":
            tasks.append(Task("compute", layer, method, compute, compute + costs.c_tok))
            compute += costs.c_tok
            continue
        if method == "hidden" and ring is not None and len(projected) >= ring:
            transfer = max(transfer, projected[-ring])
        duration = costs.io_h if method == "hidden" else costs.io_kv
        tasks.append(Task("transfer", layer, method, transfer, transfer + duration))
        transfer += duration
        if method == "hidden":
            start = max(compute, transfer)
            tasks.append(Task("compute", layer, method, start, start + costs.c_h))
            compute = start + costs.c_h
            projected.append(compute)
    return tasks
