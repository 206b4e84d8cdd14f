"""Costs, partitions and machines of any kind, and public models."""

import itertools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, Rate
from hcache_backend.plan.restore import LayerCosts, Partition, Restore

CONFIGS = Path(__file__).parent / "configs"


def public_models() -> dict[str, dict[str, Any]]:
    """``config`` of models that SGLang serves, and the numbers that it gives for them."""
    text = (Path(__file__).parent / "public_models.json").read_text()
    return dict(json.loads(text))


seconds = st.floats(0.01, 10)


@st.composite
def any_costs(draw: st.DrawFn) -> LayerCosts:
    l3 = st.just(0.0) | seconds
    costs = LayerCosts._make(draw(one) for one in (*[seconds] * 4, l3, l3, st.none()))
    last = draw(st.none() | st.floats(0.01, costs.c_tok))
    return costs._replace(c_tok_last=last)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    return Partition(*(draw(st.integers(0, 8)) for _ in range(3)))


def makespan(costs: LayerCosts, partition: Partition) -> float:
    """Seconds of a restore with room for all segments, without simulating it: the projections end
    when the computation does that begins with the first or the last of them."""
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


def public_model(name: str) -> ModelShape:
    return read_model(CONFIGS / f"{name}.json").shape


def machine_of(l3: Rate | None, *rates: Rate) -> Profile:
    """A machine of these ``rates``: hidden_copy, kv_load, projection, dense, attention."""
    names = ("hidden_copy", "kv_load", "projection", "dense", "attention")
    measured = dict(zip(names, rates, strict=True))
    return Profile(device="any", source="test", dtype="bfloat16", l3=l3, **measured)


def layer_costs(
    profile: Profile, model: ModelShape, tokens: int, *, early_stop: bool = False
) -> LayerCosts:
    """Costs of one layer, as the paper counts unless recomputation stops early."""
    restore = Restore(profile, model, Partition(0, 0, model.layers), paper=not early_stop)
    return restore.costs(tokens, l3="overlapped")
