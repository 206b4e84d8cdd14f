"""Whether L3 hits are judged, and what is known of the machine already."""

from __future__ import annotations

import logging
from dataclasses import replace

from hcache_backend.config import HCacheConfig
from hcache_backend.plan.restore import Restore
from hcache_backend.sglang import hooks
from hcache_backend.sglang.arguments import (
    decodes_for_others,
    ranks_of_a_request,
    resolved,
)
from hcache_backend.sglang.runtime import Runtime

logger = logging.getLogger("hcache")


def may_judge(runtime: Runtime, config: HCacheConfig) -> bool:
    """Whether hits are judged at all; until a gate is set every hit is read.

    A decode server of prefill/decode disaggregation fails requests whose hits do not come, and
    without host pages of their own prefetches end in other ways.
    """
    runtime.hit_gate = None
    if config.min_gain == 0:
        return False
    arguments = resolved(runtime.runner.server_args)
    if decodes_for_others(runtime.runner.server_args):
        return False
    if arguments.hicache_host_memory_mode == "buffer_only":
        return False
    missing = hooks.install(hooks.HITS)
    if missing is not None:
        logger.warning(
            "hcache: every L3 hit is read, even if L3 is slower than computing: %s", missing
        )
    return missing is None


def known_machine(runtime: Runtime) -> Restore | None:
    """What the choice of the partition found out about the machine; None: it did not look."""
    methods = runtime.layer_methods
    if methods is None or methods.profile is None or methods.shape is None:
        return None
    ranks = ranks_of_a_request(runtime.runner.server_args)
    return replace(methods, ranks=ranks, eager=runtime.eager)
