"""Judging L3 hits begins: what is known of the machine before anything was measured in service."""

from __future__ import annotations

import logging
from typing import Any

from hcache_backend.config import HCacheConfig
from hcache_backend.engine import hooks
from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.hits.costs import Machine
from hcache_backend.engine.hits.gate import HitGate
from hcache_backend.engine.ranks import said_by_all_ranks
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.partition_choice import model_shape
from hcache_backend.engine.startup.quick_profile import find_profile
from hcache_backend.partition.costs import Partition
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile

logger = logging.getLogger("hcache")


def judge_our_hits(runtime: Runtime, config: HCacheConfig) -> None:
    """Judge the hits of our store from now on, if option ``min_gain`` says so.

    Called on all ranks at the same point, when the store is attached.
    """
    if _begin(runtime, config):
        machine = _machine(runtime, config)
        runtime.hit_gate = HitGate(machine, "hcache", config.min_gain)


def judge_other_hits(runtime: Runtime, backend: str) -> None:
    """Judge the hits of another L3, whose pages are our own, likewise."""
    config = runtime.config
    assert config is not None
    if _begin(runtime, config):
        machine = _known_machine(runtime, config)
        if machine is not None:
            machine = machine.of_other_l3()
        runtime.hit_gate = HitGate(machine, backend, config.min_gain)


def _begin(runtime: Runtime, config: HCacheConfig) -> bool:
    """Whether hits are judged here at all.

    A decode server of prefill/decode disaggregation fails requests whose hits do not come.
    """
    runtime.hit_gate = None
    if config.min_gain == 0:
        return False
    if resolved(runtime.runner.server_args).disaggregation_mode == "decode":
        return False
    missing = hooks.install(hooks.hit_hooks())
    if missing is not None:
        logger.warning("hcache: every L3 hit is read, however slow L3 is: %s", missing)
    return missing is None


def _known_machine(runtime: Runtime, config: HCacheConfig) -> Machine | None:
    methods = runtime.layer_methods
    if methods is None or methods.profile is None or methods.shape is None:
        return None
    ranks = int(resolved(runtime.runner.server_args).tp_size)
    eager = config.restore != "layerwise"
    return Machine(methods.profile, methods.shape, methods.partition, ranks, eager)


def _machine(runtime: Runtime, config: HCacheConfig) -> Machine | None:
    known = _known_machine(runtime, config)
    if known is not None:  # on all ranks
        return known
    said = said_by_all_ranks(_measured(runtime, config))
    found = next((measured for measured in said if measured is not None), None)
    if found is None:
        return None
    profile, shape = found
    methods = runtime.layer_methods
    partition = methods.partition if methods is not None else Partition(0, 0, shape.layers)
    ranks = int(resolved(runtime.runner.server_args).tp_size)
    return Machine(profile, shape, partition, ranks, config.restore != "layerwise")


def _measured(runtime: Runtime, config: HCacheConfig) -> tuple[Profile, ModelShape] | None:
    """The profile that this rank found, and for what; one rank looks for all."""
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

    if not (get_pp_group().is_first_rank and get_tp_group().is_first_rank):
        return None
    try:
        kvcache: Any = runtime.runner.token_to_kv_pool
        shape = model_shape(runtime.runner, kvcache)
        profile = find_profile(runtime, config, kvcache, shape) if shape is not None else None
    except Exception as error:  # pools of several kinds, for which there is no cost model
        logger.info("hcache: L3 hits: only what is measured in service is known: %s", error)
        return None
    return (profile, shape) if profile is not None and shape is not None else None
