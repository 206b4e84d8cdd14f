"""How long a comparison of restores is going to take, from the machine's profile."""

from __future__ import annotations

from collections.abc import Iterable

from hcache_backend.cli.compare_plan import SLOW_SHARE
from hcache_backend.cli.compare_restore import RestorePlan, Served
from hcache_backend.partition.costs import layer_costs
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile

_START_SECONDS = 12.0
"""Of a server with a small model."""
_KV = ("file", "hcache-kv")


def seconds(
    plan: RestorePlan, served: Iterable[Served], profile: Profile, shape: ModelShape
) -> float:
    """About how long these servers take, one after the other.

    Args:
        profile: The machine as it is.
        shape: The model as servers compute with it.
    """
    costs = layer_costs(profile, shape, plan.tokens, l3="first")
    prefill = shape.layers * costs.c_tok
    projection = shape.layers * costs.c_h
    hidden = shape.layers * (costs.l3_h + costs.io_h) + projection
    kv = shape.layers * (costs.l3_kv + costs.io_kv)
    slow = 1 / SLOW_SHARE
    took = {
        "disk": (hidden, kv),
        "balanced": (projection, 2 * projection),
        "slow": ((slow + 1) * projection, 2 * slow * projection),
    }
    question = 0.0
    if plan.machine.device == "cpu":
        # SGLang's attention on a CPU is that of the whole history, whatever is asked.
        pairs = plan.tokens * plan.tokens / 2
        question = shape.layers * profile.attention.time(pairs * shape.attention_flops)
    total = 0.0
    for method, settings in served:
        total += _START_SECONDS
        if method == "recompute":
            total += (1 + plan.rounds) * prefill
            continue
        total += prefill
        restores = [took[setting][method in _KV] + question for setting in settings]
        total += restores[0] + plan.rounds * sum(restores)
    return total
