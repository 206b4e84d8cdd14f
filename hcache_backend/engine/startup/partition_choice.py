"""Which layers this server stores as hidden states, as KV or not at all (paper section 4.1).

Decided once, before CUDA graphs are recorded, because what is captured hangs on it.
"""

from __future__ import annotations

import logging
from typing import Any

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.kv_segments import PoolParking
from hcache_backend.engine.layer_methods import LayerMethods, pipeline_seconds
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.agreement import or_stop
from hcache_backend.engine.startup.codec_choice import wanted_codec
from hcache_backend.engine.startup.page_plan import kv_bytes_per_token
from hcache_backend.engine.startup.quick_profile import find_profile
from hcache_backend.partition.costs import LAYER_METHODS, L3Path, Partition, layer_costs
from hcache_backend.partition.model_config import ModelConfigError, shape_from_config
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.plan import describe
from hcache_backend.partition.solver import search
from hcache_backend.restore.exchange import share_of_rank

logger = logging.getLogger("hcache")


def layer_methods(runtime: Runtime, kvcache: Any) -> LayerMethods:
    """How each layer of this server is stored. All ranks must ask first at the same point.

    The server stops when option ``partition`` or ``profile`` is wrong.
    """
    if runtime.layer_methods is None:
        runtime.layer_methods = _choose(runtime, kvcache)
    return runtime.layer_methods


def _choose(runtime: Runtime, kvcache: Any) -> LayerMethods:
    """By the options, else by the profile, which only the first rank of the first stage finds."""
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

    config, args = runtime.config, resolved(runtime.runner.server_args)
    assert config is not None
    layers, ranks, eager = int(kvcache.layer_num), int(args.tp_size), config.restore == "eager"
    chunk_tokens = min(config.restore_chunk_tokens, int(kvcache.size))
    row_bytes = wanted_codec(runtime, runtime.runner).row_bytes
    parks = PoolParking.fits(kvcache, row_bytes)
    partition = or_stop(lambda: fixed_partition(config, layers))
    shape = profile = None
    if partition is None or config.profile is not None:
        shape = _shape(runtime.runner, kvcache, row_bytes)
    if shape is not None:
        stages, stage = get_pp_group(), get_tp_group()
        first = stages.is_first_rank and stage.is_first_rank
        found = or_stop(lambda: find_profile(runtime, kvcache, shape) if first else None)
        profile = stages.all_gather_object(stage.all_gather_object(found)[0])[0]
    _, shares = share_of_rank(0, ranks, int(kvcache.page_size))
    if profile is not None and shares > 1:
        profile = profile.model_copy(update={"gathers": True})
    if partition is None and profile is not None and shape is not None:
        from_l3: L3Path = "overlapped" if eager else "first"
        l3: L3Path = "none" if args.hicache_storage_backend is None else from_l3
        tokens = min(int(runtime.runner.model_config.context_len), int(kvcache.size))
        usable = set(LAYER_METHODS)
        if ranks > 1:
            usable.remove("recompute")
        if shape.hidden_bytes >= shape.kv_bytes:  # equal sizes differ in noise only
            usable.remove("hidden")
        partition = search(
            layer_costs(profile, shape, tokens, tp=ranks, l3=l3, early_stop=True),
            layers,
            pipeline_seconds(chunk_tokens, tokens, ranks, parks),
            usable,
        )
        logger.info(
            "hcache: partition: %s; the best for %d tokens by the profile of %s (%s)",
            describe(partition),
            tokens,
            profile.device,
            profile.source,
        )
    elif partition is None:
        logger.warning(
            "hcache: partition: without a profile hidden states are taken where they are smaller "
            "than KV"
        )
        smaller = layers * row_bytes < kv_bytes_per_token(kvcache)
        partition = Partition(0, layers, 0) if smaller else Partition(0, 0, layers)
    return LayerMethods(
        partition, profile, shape, chunk_tokens, parks=parks, ranks=ranks, eager=eager
    )


def fixed_partition(config: HCacheConfig, layers: int) -> Partition | None:
    """The partition that the options demand; None: the profile decides.

    Raises:
        ConfigError: Option ``partition`` is for another number of layers.
    """
    option = config.partition
    if isinstance(option, str):
        return Partition(0, layers, 0) if config.mode == "hidden" else None
    partition = Partition(option.recompute, option.hidden, option.kv)
    if partition.layers != layers:
        raise ConfigError(
            f"hcache: option 'partition' is {option.model_dump()}: that is {partition.layers} "
            f"layers, and the model has {layers}"
        )
    return partition


def _shape(runner: Any, kvcache: Any, row_bytes: int) -> ModelShape | None:
    """The model as the cost model sees it, or None where its configuration does not tell."""
    try:
        shape = shape_from_config(runner.model_config.hf_config.to_dict(), "the model's config")
    except ModelConfigError as error:
        logger.warning("hcache: partition: %s", error)
        return None
    return shape.model_copy(
        update={
            "layers": int(kvcache.layer_num),
            "element_bytes": runner.dtype.itemsize,
            "kv_element_bytes": kvcache.dtype.itemsize,
            "hidden_row_bytes": row_bytes,
        }
    )
