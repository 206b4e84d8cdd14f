"""The pipeline of a restore, task by task: what the pictures and the simulator draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from hcache_backend.partition.costs import LayerCosts, LayerMethod, Partition

Stream = Literal["l3", "transfer", "compute"]


class Task(NamedTuple):
    """One piece of work on one stream.

    Attributes:
        stream: ``l3``: reading before the restore; ``transfer``: to the device; ``compute``.
        layer: The layer; None for L3, whose pages hold all layers.
        method: How the layer is restored; None for L3.
        start: Seconds from the beginning of the restore, as ``end``.
    """

    stream: Stream
    layer: int | None
    method: LayerMethod | None
    start: float
    end: float


def simulate(costs: LayerCosts, partition: Partition) -> list[Task]:
    """Run a restore through its streams, each in the order of the layers, with room for all.

    Returns:
        The tasks, those of a layer in the order in which they run. The last end is the makespan.
    """
    tasks: list[Task] = []
    _run(costs, partition, None, 1, lambda *task: tasks.append(Task(*task)))
    return tasks


def finish(
    costs: LayerCosts,
    partition: Partition,
    ring: int | None = None,
    chunks: int = 1,
    pieces: int = 1,
    parks: bool = False,
) -> float:
    """Seconds until all that :func:`simulate` runs has ended, in as little memory.

    Args:
        ring: Segments that have room on the device: a transfer waits until the segment that many
            before it has been used, hidden states by their projection, KV by its own transfer.
            None: room for all.
        chunks: Segments of one layer: those of a long restore come, and are projected, in parts.
        pieces: Parts of the first layer, where no layer is recomputed before.
        parks: Whether segments wait elsewhere for the end of a recomputation, which leaves room
            for all.
    """
    if partition.recompute:
        pieces, ring = 1, None if parks else ring
    if chunks > 1:
        costs = costs._replace(
            io_h=costs.io_h / chunks,
            io_kv=costs.io_kv / chunks,
            c_h=costs.c_h / chunks,
            l3_h=costs.l3_h / chunks,
            l3_kv=costs.l3_kv / chunks,
        )
        partition = Partition(partition.recompute, partition.hidden * chunks, partition.kv * chunks)
    return _run(costs, partition, ring, -(-pieces // chunks), lambda *_: None)


def _run(
    costs: LayerCosts,
    partition: Partition,
    ring: int | None,
    pieces: int,
    note: Callable[[Stream, int | None, LayerMethod | None, float, float], object],
) -> float:
    """Seconds of the restore; ``note`` is called with the fields of every :class:`Task`.

    ``pieces`` are the parts in which the first segment comes and is projected.
    """
    begin = transfer = compute = costs.reading(partition)
    if begin:
        note("l3", None, None, 0.0, begin)
    copies = partition.recompute < partition.layers
    for layer in range(partition.recompute):
        end = begin + costs.recomputation(layer + 1, beside_copies=copies)
        note("compute", layer, "recompute", compute, end)
        compute = end
    room = partition.layers if ring is None else ring
    used: list[float] = []
    for index in range(partition.hidden + partition.kv):
        if index >= room:
            transfer = max(transfer, used[index - room])
        layer = partition.recompute + index
        if index < partition.hidden:
            arrived = transfer + costs.io_h
            note("transfer", layer, "hidden", transfer, arrived)
            parts = 1 if index else pieces
            start = max(compute, arrived - costs.io_h * (1 - 1 / parts))
            # One piece after the other, whichever of the two streams is the slower one.
            compute = max(start + costs.c_h, arrived + costs.c_h / parts)
            note("compute", layer, "hidden", start, compute)
            used.append(compute)
        else:
            arrived = transfer + costs.io_kv
            note("transfer", layer, "kv", transfer, arrived)
            used.append(arrived)
        transfer = arrived
    return max(compute, transfer)
