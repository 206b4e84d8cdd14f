"""Costs, partitions, models and machines of any kind, and a simulation of a restore."""

from __future__ import annotations

import heapq
import itertools
from pathlib import Path

from hypothesis import strategies as st

from hcache_backend.plan.costs import L3Path, LayerCosts, Partition
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, Rate
from hcache_backend.plan.restore import Restore

CONFIGS = Path(__file__).parent / "configs"

seconds = st.floats(0.01, 10)
rings = st.none() | st.integers(1, 8)


@st.composite
def any_costs(draw: st.DrawFn) -> LayerCosts:
    l3 = st.just(0.0) | seconds
    costs = LayerCosts._make(draw(one) for one in (*[seconds] * 4, l3, l3, st.none(), st.just(1.0)))
    last = draw(st.none() | st.floats(0.01, costs.c_tok))
    return costs._replace(c_tok_last=last, slowdown=draw(st.just(1.0) | st.floats(1, 2)))


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    return Partition(*(draw(st.integers(0, 8)) for _ in range(3)))


def makespan(costs: LayerCosts, partition: Partition) -> float:
    """Seconds of a restore with room for all segments, without simulating it.

    Exact for two streams that each work through the layers in order and wait for nothing else: the
    projections end when the computation does that begins with the first or the last of them.
    """
    if not partition.hidden:
        return costs.least(partition)
    first = costs.io_h + costs.c_h * partition.hidden
    last = costs.io_h * partition.hidden + costs.c_h
    return max(costs.least(partition), costs.reading(partition) + max(first, last))


def all_partitions(layers: int) -> list[Partition]:
    return [
        Partition(recompute, hidden, kv)
        for recompute, hidden, kv in itertools.product(range(layers + 1), repeat=3)
        if recompute + hidden + kv == layers
    ]


def event_simulation(costs: LayerCosts, partition: Partition) -> float:
    """Two workers and an event queue; knows nothing of the formulas."""
    work: dict[str, list[tuple[str, int, float]]] = {"transfer": [], "compute": []}
    for layer in range(partition.layers):
        method = partition.method(layer)
        if method == "recompute":
            last = layer == partition.recompute - 1 and costs.c_tok_last is not None
            seconds = costs.c_tok_last if last else costs.c_tok
            copied = partition.hidden or partition.kv
            work["compute"].append((method, layer, seconds * (costs.slowdown if copied else 1)))
        elif method == "hidden":
            work["transfer"].append((method, layer, costs.io_h))
            work["compute"].append(("project", layer, costs.c_h))
        else:
            work["transfer"].append((method, layer, costs.io_kv))
    start = costs.l3_h * partition.hidden + costs.l3_kv * partition.kv
    arrived: set[int] = set()
    events: list[tuple[float, str]] = [(start, "transfer"), (start, "compute")]
    running: dict[str, int | None] = {"transfer": None, "compute": None}
    idle: set[str] = set()
    now = start
    while events:
        now, worker = heapq.heappop(events)
        if worker == "transfer" and running[worker] is not None:
            arrived.add(running[worker])
            if "compute" in idle:
                idle.discard("compute")
                heapq.heappush(events, (now, "compute"))
        running[worker] = None
        if not work[worker]:
            continue
        kind, layer, duration = work[worker][0]
        if kind == "project" and layer not in arrived:
            idle.add(worker)
            continue
        work[worker].pop(0)
        running[worker] = layer
        heapq.heappush(events, (now + duration, worker))
    return now


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    heads = draw(st.sampled_from([8, 16, 32]))
    hidden = 128 * heads
    return ModelShape(
        family="any",
        layers=draw(st.integers(1, 24)),
        hidden=hidden,
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, 8, heads])),
        head_dim=128,
        value_dim=128,
        mlp_width=draw(st.integers(3, 6)) * hidden,
    )


def public_model(name: str) -> ModelShape:
    """The model of a file in ``configs``."""
    return read_model(CONFIGS / f"{name}.json")


def machine(io: float, compute: float) -> Profile:
    """A machine that moves ``io`` GB/s and computes ``compute`` TFLOP/s."""
    bus, flops = Rate(per_second=io * 1e9), Rate(per_second=compute * 1e12)
    return machine_of(None, bus, bus, flops, flops, flops)


def machine_of(l3: Rate | None, *rates: Rate) -> Profile:
    """A machine of these ``rates``: hidden_copy, kv_load, projection, dense, attention."""
    names = ("hidden_copy", "kv_load", "projection", "dense", "attention")
    measured = dict(zip(names, rates, strict=True))
    return Profile(device="any", source="test", dtype="bfloat16", l3=l3, **measured)


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
    """Costs of one layer, as the paper counts unless recomputation stops early."""
    restore = Restore(profile, model, Partition(0, 0, model.layers), tp, paper=not early_stop)
    return restore.costs(tokens, prefix, l3)
