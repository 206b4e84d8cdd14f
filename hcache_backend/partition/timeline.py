"""The pipeline of a restore, task by task: what the pictures and the simulator draw."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hcache_backend.partition.costs import LayerCosts
from hcache_backend.partition.layers import LayerMethod, Partition

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
    method: LayerMethod | None
    start: float
    end: float


def simulate(costs: LayerCosts, partition: Partition, ring: int | None = None) -> list[Task]:
    """Run a restore through its streams, each in the order of the layers.

    Args:
        costs: Seconds of one layer.
        partition: The method of every layer.
        ring: Segments that have room on the device: a transfer waits until the segment that many
            before it has been used, hidden states by their projection, KV by its own transfer.
            None: room for all.

    Returns:
        The tasks, those of a layer in the order in which they run. The last end is the makespan.
    """
    runs = _Runs(costs, partition, ring)
    tasks: list[Task] = []
    if runs.begin:
        tasks.append(Task("l3", None, None, 0.0, runs.begin))
    computes = iter(runs.computes)
    transfers = iter(runs.transfers)
    for layer in range(partition.layers):
        method = partition.method(layer)
        if method != "recompute":
            tasks.append(Task("transfer", layer, method, *next(transfers)))
        if method != "kv":
            tasks.append(Task("compute", layer, method, *next(computes)))
    return tasks


def finish(
    costs: LayerCosts,
    partition: Partition,
    ring: int | None = None,
    chunks: int = 1,
    pieces: int = 1,
) -> float:
    """Seconds until all that :func:`simulate` runs has ended.

    Args:
        costs: Seconds of one layer.
        partition: The method of every layer.
        ring: Segments that have room on the device, None: all.
        chunks: Segments of one layer: those of a long restore come, and are projected, in parts.
        pieces: Parts of the first layer, where no layer is recomputed before.
    """
    if partition.recompute:
        pieces = 1
    if chunks > 1:
        costs = costs._replace(
            io_h=costs.io_h / chunks,
            io_kv=costs.io_kv / chunks,
            c_h=costs.c_h / chunks,
            l3_h=costs.l3_h / chunks,
            l3_kv=costs.l3_kv / chunks,
        )
        partition = Partition(partition.recompute, partition.hidden * chunks, partition.kv * chunks)
    return _Runs(costs, partition, ring, -(-pieces // chunks)).end


class _Runs:
    """Starts and ends of what the two streams do.

    Attributes:
        begin: When both streams begin.
        transfers: Of layers that are not recomputed, in their order.
        computes: Of layers that are not loaded as KV, in their order.
        end: The last end.
    """

    def __init__(
        self, costs: LayerCosts, partition: Partition, ring: int | None, pieces: int = 1
    ) -> None:
        self.begin = costs.l3_h * partition.hidden + costs.l3_kv * partition.kv
        self.transfers: list[tuple[float, float]] = []
        self.computes: list[tuple[float, float]] = []
        compute = transfer = self.begin
        for layer in range(1, partition.recompute + 1):
            end = self.begin + costs.recomputation(layer)
            self.computes.append((compute, end))
            compute = end
        room = partition.layers if ring is None else ring
        used: list[float] = []
        for index in range(partition.hidden + partition.kv):
            if index >= room:
                transfer = max(transfer, used[index - room])
            hidden = index < partition.hidden
            arrived = transfer + (costs.io_h if hidden else costs.io_kv)
            self.transfers.append((transfer, arrived))
            transfer = arrived
            if hidden:
                parts = 1 if index else pieces  # of the first segment
                start = max(compute, arrived - costs.io_h * (1 - 1 / parts))
                # One piece after the other, whichever of the two streams is the slower one.
                compute = max(start + costs.c_h, arrived + costs.c_h / parts)
                self.computes.append((start, compute))
            used.append(compute if hidden else arrived)
        self.end = max(compute, transfer)
