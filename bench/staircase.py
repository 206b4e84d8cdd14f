"""How deep each page of a hit is recomputed while its other layers are read from L3.

The depth of a page is how many of its first layers are recomputed. A layer of a token needs the
layers below it and attends to the same layer of all tokens before it, so the depth never rises
along a sequence. Here it has one step: front pages are recomputed whole, and of all pages behind
them the same first layers. L3 is read from the last page on, so neither side waits for the other:

- L3 brings the pages behind the front in batches, each with all the layers that it lacks.
- A batch that was read crosses the bus layer by layer, hidden states before K and V.
- The processor projects a layer of a batch as soon as that has arrived, and recomputes otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hcache_backend.partition.costs import Partition
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile, Rate

Seconds = npt.NDArray[np.float64]


class Depth(NamedTuple):
    """How deep the pages of a hit are recomputed.

    Attributes:
        pages: Front pages, all layers of which are recomputed.
        layers: First layers of every page behind them that are recomputed.
    """

    pages: int
    layers: int


@dataclass(frozen=True)
class DepthCosts:
    """Seconds that a hit takes of each resource, for every depth that it may have.

    Arrays are float64 ``[pages + 1, depths]`` unless they say otherwise: a row for each number of
    front pages, a column for each number of layers that are recomputed behind them.

    Attributes:
        least: The layers of the first column: those of which nothing is stored.
        l3: Reading the pages behind the front.
        bus: Their transfer to the device.
        recompute: Recomputing the front, and first layers behind it.
        project: Projecting the hidden states of the pages behind the front.
        hidden_bus: Transfer of one layer of their hidden states; 0 where they have none.
        hidden: How many layers come from hidden states, ``[1, depths]``.
    """

    least: int
    l3: Seconds
    bus: Seconds
    recompute: Seconds
    project: Seconds
    hidden_bus: Seconds
    hidden: Seconds

    def busy(self) -> Seconds:
        """Seconds of the resource that works longest: no restore of this depth is shorter."""
        resources = (self.l3, self.bus, self.recompute + self.project)
        return np.maximum.reduce(resources)

    def seconds(self, batches: int) -> Seconds:
        """Seconds of the restore if the pages behind the front are read in ``batches`` batches."""
        read, copied, project = self.l3 / batches, self.bus / batches, self.project / batches
        hidden_bus, layer = self.hidden_bus / batches, project / np.maximum(self.hidden, 1)
        last = read + (batches - 1) * np.maximum(read, copied)  # the last batch is on the bus
        ends = [last + copied, self.recompute + self.project]
        # Whenever a layer arrives, its projection and all later ones are still to be done. What
        # that amounts to is linear in the batch and in the layer, so their ends are the latest.
        for begin, left in ((read, self.project), (last, project)):
            ends.append(begin + hidden_bus + left)
            ends.append(begin + self.hidden * hidden_bus + left - project + layer)
        return np.maximum.reduce(ends)

    def best(self, batches: int) -> tuple[Depth, float]:
        """The fastest depth and its seconds; of equally fast ones that with the fewest pages, then
        the fewest layers."""
        seconds = self.seconds(batches)
        pages, column = np.unravel_index(int(np.argmin(seconds)), seconds.shape)
        return Depth(int(pages), self.least + int(column)), float(seconds[pages, column])


class LayerWork(NamedTuple):
    """What one layer of one token takes on one tensor-parallel rank.

    Attributes:
        hidden_bytes: Bytes of hidden states over the rank's bus.
        kv_bytes: Bytes of K and V, likewise.
        projection: FLOPs from hidden states to K and V.
        dense: FLOPs of recomputation without attention.
        attention: FLOPs of attention for each token that this one attends to.
        last: FLOPs of a recomputation that ends with K and V of the layer.
    """

    hidden_bytes: float
    kv_bytes: float
    projection: float
    dense: float
    attention: float
    last: float


def layer_work(model: ModelShape, tp: int, *, gathers: bool) -> LayerWork:
    """The work of one of ``tp`` ranks; ``gathers`` as in :class:`Profile`."""
    # A rank holds its share of the KV heads, at least one; a latent is on every rank.
    kv_share = 1.0 if model.latent else -(-model.kv_heads // tp) / model.kv_heads
    projection = model.projection_flops * kv_share
    return LayerWork(
        hidden_bytes=model.hidden_bytes / tp if gathers else model.hidden_bytes,
        kv_bytes=model.kv_bytes * kv_share,
        projection=projection,
        dense=model.dense_flops / tp,
        attention=model.attention_flops / tp,
        last=model.query_flops / tp + projection,
    )


def depth_costs(
    profile: Profile,
    model: ModelShape,
    partition: Partition,
    pages: int,
    page_size: int,
    *,
    prefix: int = 0,
    tp: int = 1,
) -> DepthCosts:
    """The costs of a hit of ``pages`` pages, of which L3 (or host memory) has ``partition``.

    Args:
        page_size: Tokens of a page.
        prefix: Tokens before the hit that are on the device already.
        tp: Tensor-parallel ranks, each with a device and a bus of the profile's; L3 is shared.
    """
    work = layer_work(model, tp, gathers=profile.gathers)
    front = np.arange(pages + 1, dtype=np.float64)[:, None] * page_size
    behind = front[::-1]
    least = partition.recompute
    depth = np.arange(least, max(partition.layers, least + 1), dtype=np.float64)[None]
    kv = np.minimum(partition.kv, partition.layers - depth)
    hidden = partition.layers - depth - kv

    def layer(tokens: Seconds, before: Seconds | int) -> tuple[Seconds, Seconds]:
        """One recomputed layer, and one that ends with its K and V."""
        pairs = tokens * before + tokens * tokens / 2
        whole = _seconds(profile.dense, tokens * work.dense)
        whole = whole + _seconds(profile.attention, pairs * work.attention)
        return whole, np.minimum(whole, _seconds(profile.projection, tokens * work.last))

    front_layer, front_last = layer(front, prefix)
    layer_behind, last_behind = layer(behind, prefix + front)
    recompute = (partition.layers - 1) * front_layer + front_last
    recompute = recompute + np.where(depth > 0, (depth - 1) * layer_behind + last_behind, 0.0)
    hidden_bus = (hidden > 0) * _seconds(profile.hidden_copy, behind * work.hidden_bytes)
    bus = hidden * hidden_bus + kv * _seconds(profile.kv_load, behind * work.kv_bytes)
    l3 = np.zeros_like(bus)
    if profile.l3 is not None:
        l3 = hidden * _seconds(profile.l3, behind * model.hidden_bytes)
        l3 = l3 + kv * _seconds(profile.l3, behind * model.kv_bytes)
    project = hidden * _seconds(profile.projection, behind * work.projection)
    return DepthCosts(least, l3, bus, recompute, project, hidden_bus, hidden)


def _seconds(rate: Rate, amounts: Seconds) -> Seconds:
    """What operations of ``amounts`` bytes or FLOPs take; nothing takes no time."""
    return np.where(amounts > 0, rate.seconds + amounts / rate.per_second, 0.0)
