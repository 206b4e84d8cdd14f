"""Start of judging L3 hits when a storage backend is attached, with the machine's cost model."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.costs import Partition
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile
from hcache_backend.plan.restore import Restore
from hcache_backend.sglang.arguments import ranks_of_a_request, resolved
from hcache_backend.sglang.groups import said_by_all_ranks
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.codec_choice import encoded_share
from hcache_backend.start.hits import known_machine, may_judge
from hcache_backend.start.partition_choice import model_shape
from hcache_backend.start.quick_profile import copy_as_measured, find_profile

logger = logging.getLogger("hcache")


def judge_our_hits(runtime: Runtime, config: HCacheConfig) -> None:
    """Judge hits of our store from now on, if option ``min_gain`` says so. All ranks call it at the
    same point, at attach. Raises ConfigError on every rank if the profile is unusable."""
    if may_judge(runtime, config):
        runtime.judge(_machine(runtime, config), "hcache", config.min_gain)


def judge_other_hits(runtime: Runtime, backend: str) -> None:
    """Judge hits of another L3 whose pages are our own."""
    config = runtime.config
    if config is not None and may_judge(runtime, config):
        machine = _machine(runtime, config)
        if machine is not None and machine.profile is not None:  # its L3 was not measured
            profile = machine.profile.model_copy(update={"l3": None})
            machine = replace(machine, profile=profile)
        runtime.judge(machine, backend, config.min_gain)


def _machine(runtime: Runtime, config: HCacheConfig) -> Restore | None:
    known = known_machine(runtime)
    if known is not None:
        return known
    measured: tuple[Profile, ModelShape] | None = None
    wrong: str | None = None
    try:
        measured = _measured(runtime, config)
    except ConfigError as error:
        wrong = str(error)
    said = said_by_all_ranks((measured, wrong))
    for _, problem in said:
        if problem is not None:
            raise ConfigError(problem)
    found = next((measured for measured, _ in said if measured is not None), None)
    if found is None:
        return None
    profile, shape = found
    # The self-check is over: hidden states keep the way of copying that it tried.
    copy_as_measured(profile, runtime.runner.device, segment_bytes=0)
    methods = runtime.layer_methods
    partition = methods.partition if methods is not None else Partition(0, 0, shape.layers)
    ranks = ranks_of_a_request(runtime.runner.server_args)
    return Restore(profile, shape, partition, ranks, eager=runtime.eager)


def _measured(runtime: Runtime, config: HCacheConfig) -> tuple[Profile, ModelShape] | None:
    """Profile and shape on the one rank that looks for all that attach together, otherwise None.
    Raises ConfigError if option ``profile`` names no usable file."""
    from sglang.srt.distributed import parallel_state

    groups = (
        parallel_state.get_pp_group(),
        parallel_state.get_attn_tp_group(),
        parallel_state.get_attn_cp_group(),
    )
    if not all(group.is_first_rank for group in groups):
        return None
    try:
        kvcache: Any = runtime.runner.token_to_kv_pool
        encoded = runtime.codec not in (None, "none")
        stages = int(resolved(runtime.runner.server_args).pp_size)
        kv_share = encoded_share(runtime, kvcache, stages) if encoded else 1.0
        shape = model_shape(runtime.runner, kvcache, kv_share=kv_share)
        profile = find_profile(runtime, config, kvcache, shape) if shape is not None else None
    except ConfigError:
        raise
    except Exception as error:  # pools of several kinds, for which there is no cost model
        logger.info("hcache: L3 hits are judged by measurements in service alone: %s", error)
        return None
    return (profile, shape) if profile is not None and shape is not None else None
