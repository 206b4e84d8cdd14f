"""Choice of what this server stores of each layer: hidden states, KV or nothing (section 4.1).

It precedes CUDA graphs, because capture depends on it, and is made once per model and store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.costs import L3Path, Partition, describe
from hcache_backend.plan.model_config import ModelConfigError, shape_from_config
from hcache_backend.plan.model_shape import CLEARLY_LESS, ModelShape
from hcache_backend.plan.record import PartitionRecord, find_record, record_name, save_record
from hcache_backend.plan.restore import CHUNK_TOKENS, Restore
from hcache_backend.restore.exchange import share_of_rank
from hcache_backend.restore.layers import PoolParking
from hcache_backend.sglang.arguments import resolved
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.agreement import or_stop
from hcache_backend.start.codec_choice import encoded_share, wanted_codec
from hcache_backend.start.page_plan import host_bytes, kv_bytes_per_token
from hcache_backend.start.quick_profile import copy_as_measured, find_profile
from hcache_backend.start.refusals import eager_refusal

logger = logging.getLogger("hcache")

LEAST_HOST_SHARE = 1.5
"""Tokens in host memory for each on the device. Host pages of tokens on the device are not evicted,
so prefetches have only the others; K and V of all layers may leave fewer."""


def layer_methods(runtime: Runtime, kvcache: Any) -> Restore:
    """The storage of each layer. All ranks must ask first at the same point. The server stops if
    option ``partition`` or ``profile`` is wrong."""
    if runtime.layer_methods is None:
        runtime.layer_methods = _choose(runtime, kvcache)
    return runtime.layer_methods


class _Decision(NamedTuple):
    partition: Partition
    reason: str


def _choose(runtime: Runtime, kvcache: Any) -> Restore:
    """Choose by the options, otherwise the store's record, otherwise the profile, which only the
    first rank of the first stage finds."""
    from sglang.srt.distributed.parallel_state import get_pp_group

    config, args = runtime.config, resolved(runtime.runner.server_args)
    assert config is not None
    layers, ranks = int(kvcache.layer_num), int(args.tp_size)
    refused = eager_refusal(args, kvcache.device, hidden=True)
    eager = config.restore == "auto" and refused is None
    chunk_tokens = min(CHUNK_TOKENS, int(kvcache.size))
    row_bytes = wanted_codec(runtime, runtime.runner).row_bytes
    kv_share = encoded_share(runtime, kvcache, int(args.pp_size))
    parks = PoolParking.fits(kvcache, row_bytes)
    stages, stage = get_pp_group(), attention_ranks()
    wanted = or_stop(lambda: fixed_partition(config, layers))
    store = _Store(runtime, kvcache, args.hicache_storage_backend)
    recorded = stage.all_gather_object(store.find() if stage.is_first_rank else None)[0]
    decision = _known(wanted, recorded)
    shape = profile = None
    if wanted is None or config.profile is not None:
        shape = model_shape(runtime.runner, kvcache, row_bytes, kv_share)
    if shape is not None and (decision is None or decision.partition.methods != {"kv"}):
        first = stages.is_first_rank and stage.is_first_rank
        found = or_stop(lambda: find_profile(runtime, config, kvcache, shape) if first else None)
        profile = stages.all_gather_object(stage.all_gather_object(found)[0])[0]
    _, shares = share_of_rank(0, ranks, int(kvcache.page_size))
    if profile is not None and shares > 1:
        profile = profile.model_copy(update={"gathers": True})
    if profile is not None:
        segment = int(kvcache.page_size) * row_bytes // shares
        copy_as_measured(profile, kvcache.device, segment)
    from_l3: L3Path = "overlapped" if eager else "first"
    l3: L3Path = "none" if args.hicache_storage_backend is None else from_l3
    tokens = min(int(runtime.runner.model_config.context_len), int(kvcache.size))
    alone = store.is_ours and config.shared is None  # machines that share pages decide alike
    kv_bytes = kv_share * kv_bytes_per_token(kvcache)
    given = host_bytes(kvcache, args.hicache_size, args.hicache_ratio)

    every_kv = Partition(0, 0, layers)

    def leaves_room(partition: Partition) -> bool:
        """True if host memory holds enough tokens besides hidden states of the device's."""
        token = (partition.hidden * row_bytes / shares) + partition.kv * kv_bytes / layers
        host = given / token - (int(kvcache.size) if partition.hidden else 0)
        wanted = LEAST_HOST_SHARE * int(kvcache.size)
        return partition == every_kv or host >= min(wanted, given / kv_bytes)

    restore = Restore(profile, shape, every_kv, ranks, chunk_tokens, parks=parks, eager=eager)
    if decision is None and profile is not None and shape is not None and alone:
        decision = _fastest(restore, tokens, l3, leaves_room)
    elif decision is None:
        smaller = layers * row_bytes < CLEARLY_LESS * kv_bytes
        smaller = smaller and (not alone or leaves_room(Partition(0, layers, 0)))
        decision = _smallest(layers, smaller, "no profile" if alone else "another L3")
    if recorded is None and store.is_ours:
        partition, reason = decision
        record = PartitionRecord(
            model=str(runtime.runner.model_config.model_path),
            reason=reason,
            recompute=partition.recompute,
            hidden=partition.hidden,
            kv=partition.kv,
            shape=shape,
            tokens=tokens,
            tp=ranks,
            l3=l3,
        )
        if runtime.store is None:  # the attach will name the folders
            runtime.kept_partition = store.name, record
        else:
            settled = store.settle(record) if stage.is_first_rank else None
            settled = stage.all_gather_object(settled)[0]
            decision = _known(wanted, settled) if settled != record else decision
            assert decision is not None
    return replace(restore, partition=decision.partition)


def _known(wanted: Partition | None, recorded: PartitionRecord | None) -> _Decision | None:
    """The partition of the options, otherwise of the store's record; None: undecided."""
    if wanted is not None:
        if recorded is not None and wanted != recorded.partition:
            logger.warning(
                "hcache: partition: the options want %s, and the store has pages of this model "
                "with %s (%s): neither finds the other's",
                describe(wanted),
                describe(recorded.partition),
                recorded.reason,
            )
        return _Decision(wanted, "by an option")
    if recorded is None:
        return None
    logger.debug(
        "hcache: partition: %s, as the store has it: %s",
        describe(recorded.partition),
        recorded.reason,
    )
    return _Decision(recorded.partition, recorded.reason)


def _fastest(
    restore: Restore, tokens: int, l3: L3Path, leaves_room: Callable[[Partition], bool]
) -> _Decision:
    """The partition with the fastest restores by the profile, of those that leave room."""
    assert restore.profile is not None
    partition = restore.fastest(tokens, l3)
    reason = f"the best for {tokens} tokens by the profile of {restore.profile.device}"
    if not leaves_room(partition):
        faster, partition = partition, restore.fastest(tokens, l3, allowed=leaves_room)
        reason += (
            f" that leaves room for {LEAST_HOST_SHARE} times the device's tokens in host memory; a "
            f"larger --hicache-ratio allows {describe(faster)}"
        )
    source = restore.profile.source
    logger.debug("hcache: partition: %s; %s (%s)", describe(partition), reason, source)
    return _Decision(partition, reason)


def _smallest(layers: int, hidden: bool, because: str) -> _Decision:
    """Hidden states of all layers if they are smaller (``hidden``), otherwise K and V."""
    partition = Partition(0, layers, 0) if hidden else Partition(0, 0, layers)
    reason = "hidden states where they are smaller than K and V"
    logger.debug("hcache: partition: %s: %s (%s)", describe(partition), reason, because)
    return _Decision(partition, reason)


class _Store:
    """Our store, if it is or may become this server's L3, and its record of the partition.
    ``is_ours``: L3 is not another backend."""

    def __init__(self, runtime: Runtime, kvcache: Any, backend: str | None) -> None:
        assert runtime.config is not None and runtime.weights is not None
        stage = {"first_layer": kvcache.start_layer, "layers": int(kvcache.layer_num)}
        key = runtime.namespace_of(runtime.weights, any_ranks=True, kind="partition", **stage)
        self.is_ours = runtime.store is not None or backend is None
        self.name = record_name(key)
        self._folders = runtime.config.dirs

    def find(self) -> PartitionRecord | None:
        return find_record(self._folders, self.name) if self.is_ours else None

    def settle(self, record: PartitionRecord) -> PartitionRecord:
        """Write ``record``; returns the store's, because another server may have been faster."""
        try:
            save_record(self._folders[0], self.name, record, replace=False)
        except OSError as error:
            logger.warning("hcache: partition: it could not be recorded: %s", error)
        return self.find() or record


def fixed_partition(config: HCacheConfig, layers: int) -> Partition | None:
    """The partition that the options demand; None: the profile decides. Raises ConfigError if it is
    for another number of layers."""
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


def model_shape(
    runner: Any, kvcache: Any, row_bytes: int | None = None, kv_share: float = 1.0
) -> ModelShape | None:
    """The model for the cost model, or None if its configuration does not tell. ``row_bytes``: of a
    stored hidden state; None: plain. ``kv_share``: encoded bytes of K and V relative to plain."""
    try:
        shape = shape_from_config(runner.model_config.hf_config.to_dict(), "the model's config")
    except ModelConfigError as error:
        logger.warning("hcache: partition: %s", error)
        return None
    shape = shape.model_copy(
        update={
            "layers": int(kvcache.layer_num),
            "element_bytes": runner.dtype.itemsize,
            "kv_element_bytes": kvcache.dtype.itemsize,
            "hidden_row_bytes": row_bytes,
        }
    )
    if kv_share == 1.0:
        return shape
    return shape.model_copy(update={"kv_row_bytes": round(kv_share * shape.kv_bytes)})
