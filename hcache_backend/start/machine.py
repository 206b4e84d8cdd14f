"""The machine's profile, and what follows from it: the partition of the server's layers into hidden
states, KV and nothing (section 4.1), which precedes CUDA graphs, and whether L3 hits pay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.format.page import hidden_layer
from hcache_backend.metrics import logger
from hcache_backend.plan.measure import Bench, device_name, measure, read_rate
from hcache_backend.plan.model_config import shape_from_config
from hcache_backend.plan.model_shape import CLEARLY_LESS, ModelShape
from hcache_backend.plan.profile import START_SECONDS, Profile, Rate, load_profile
from hcache_backend.plan.record import PartitionRecord, find_record, record_name, save_record
from hcache_backend.plan.restore import CHUNK_TOKENS, L3Path, Partition, Restore, describe
from hcache_backend.projection.paged_pool import planes_of
from hcache_backend.restore.exchange import shard_of_rank
from hcache_backend.sglang import hooks
from hcache_backend.sglang.arguments import ranks_of_a_request, resolved
from hcache_backend.sglang.groups import attention_ranks, from_all_ranks, or_stop
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start import page_plan
from hcache_backend.start.capabilities import EAGER, JUDGING, Server, refusal
from hcache_backend.streams import release_memory

# tokens in host memory for each on the device, which is not evicted: prefetches have the others
_LEAST_HOST_SHARE = 1.5
_Decision = tuple[Partition, str]  # and the reason


def layer_methods(runtime: Runtime, kvcache: Any) -> Restore:
    """The storage of each layer: by the options, otherwise by the store's record, otherwise by the
    profile. All ranks must make the first call, which decides, at the same point. The server stops
    if option ``partition`` or ``profile`` is wrong."""
    if runtime.pages.layer_methods is None:
        runtime.pages.layer_methods = _choose_methods(runtime, kvcache)
    return runtime.pages.layer_methods


def _choose_methods(runtime: Runtime, kvcache: Any) -> Restore:
    """Choose the partition (see :func:`layer_methods`) and record it. Without an option or a record
    the profile decides; for machines that share pages, the size of hidden states decides."""
    config, weights, runner = runtime.options.config, runtime.weights, runtime.runner
    assert config is not None and weights.present is not None
    args, stage = resolved(runner.server_args), attention_ranks()
    layers, ranks, size = int(kvcache.layer_num), ranks_of_a_request(args), int(kvcache.size)
    server = Server(runner, config, kvcache, exchanges=ranks > 1)
    row_bytes = page_plan.wanted_codec(config, runner).row_bytes
    kv_share = page_plan.encoded_share(server, int(args.pp_size))
    wanted = or_stop(lambda: fixed_partition(config, layers))
    stage_layers = {"first_layer": kvcache.start_layer, "layers": layers}
    key = weights.namespace_of(weights.present, any_ranks=True, kind="partition", **stage_layers)
    name = record_name(key)
    ours = runtime.store is not None or args.hicache_storage_backend is None  # L3, or may become so
    recorded = find_record(config.dirs, name) if ours and stage.is_first_rank else None
    recorded = stage.all_gather_object(recorded)[0]
    decision = known_partition(wanted, recorded)
    shape = profile = None
    if wanted is None or config.profile is not None:
        shape = model_shape(runner, kvcache, row_bytes, kv_share)
    shard = shard_of_rank(0, ranks, int(kvcache.page_size))
    if shape is not None and (decision is None or decision[0].methods != {"kv"}):
        profile = _profile_of_all_ranks(runtime, kvcache, shape)
        if profile is not None and shard.of > 1:
            profile = profile.model_copy(update={"gathers": True})
    l3: L3Path = "overlapped" if refusal(EAGER, server) is None else "first"
    l3 = "none" if args.hicache_storage_backend is None else l3
    tokens = min(int(runner.model_config.context_len), size)
    all_kv = Partition(0, 0, layers)
    restore = Restore(profile, shape, all_kv, ranks, min(CHUNK_TOKENS, size))
    if decision is None:
        kv_bytes = kv_share * page_plan.kv_bytes_per_token(kvcache)
        width = int(runner.model_config.hidden_size)
        layer = hidden_layer(int(kvcache.page_size), row_bytes, width)
        host_bytes = page_plan.host_bytes(kvcache, args.hicache_size, args.hicache_ratio)

        def leaves_room(partition: Partition) -> bool:
            """True if host memory holds enough tokens besides hidden states of the device's."""
            tokens = page_plan.host_tokens(kvcache, layer, shard, kv_share, partition, host_bytes)
            least = min(_LEAST_HOST_SHARE * size, host_bytes / kv_bytes)
            return partition == all_kv or tokens >= least

        alone = ours and config.shared is None  # machines that share pages decide alike
        if alone and profile is not None and shape is not None:
            decision = _fastest_partition(restore, tokens, l3, leaves_room)
        else:
            hidden = Partition(0, layers, 0)
            smaller = layers * row_bytes < CLEARLY_LESS * kv_bytes
            smaller = smaller and (not alone or leaves_room(hidden))
            reason = "hidden states where they are smaller than K and V"
            decision = (hidden if smaller else all_kv), reason
        logger.debug("hcache: partition: %s; %s", describe(decision[0]), decision[1])
    if recorded is None and ours:
        model = str(runner.model_config.model_path)
        chosen_for: dict[str, Any] = {"shape": shape, "tokens": tokens, "tp": ranks, "l3": l3}
        chosen_for |= {**asdict(decision[0]), "reason": decision[1]}
        record = PartitionRecord(model=model, **chosen_for)
        settled = _record(runtime, name, record)
        if settled != record:
            decision = known_partition(wanted, settled) or decision
    return replace(restore, partition=decision[0])


def _profile_of_all_ranks(runtime: Runtime, kvcache: Any, shape: ModelShape) -> Profile | None:
    """The profile that the first rank of the first stage finds. The server stops if option
    ``profile`` is wrong."""
    from sglang.srt.distributed.parallel_state import get_pp_group

    config, stages, stage = runtime.options.config, get_pp_group(), attention_ranks()
    assert config is not None
    first = stages.is_first_rank and stage.is_first_rank
    local = or_stop(lambda: find_profile(runtime, config, kvcache, shape) if first else None)
    profile: Profile | None = stages.all_gather_object(stage.all_gather_object(local)[0])[0]
    return profile


def _record(runtime: Runtime, name: str, record: PartitionRecord) -> PartitionRecord:
    """Record a choice; returns the store's record, which another server may have written before.
    Without a store the later attach, which names the folders, records the choice."""
    if runtime.store is None or runtime.options.config is None:
        runtime.options.kept_partition = name, record
        return record
    stage, dirs = attention_ranks(), runtime.options.config.dirs
    settled = settle(dirs, name, record) if stage.is_first_rank else None
    agreed: PartitionRecord = stage.all_gather_object(settled)[0]
    return agreed


def fixed_partition(config: HCacheConfig, layers: int) -> Partition | None:
    """The partition that the options demand, or None. Raises ConfigError for other layers."""
    option = config.partition
    if isinstance(option, str):
        return Partition(0, layers, 0) if config.mode == "hidden" else None
    partition = Partition(option.recompute, option.hidden, option.kv)
    if partition.layers != layers:
        wrong = f"hcache: option 'partition' is {option.model_dump()}"
        raise ConfigError(f"{wrong}: that is {partition.layers} layers, and the model has {layers}")
    return partition


def known_partition(wanted: Partition | None, recorded: PartitionRecord | None) -> _Decision | None:
    """The partition of the options, otherwise of the store's record, and why; None: neither has."""
    if recorded is None:
        return None if wanted is None else (wanted, "by an option")
    partition, reason = recorded.partition, recorded.reason
    if wanted is None:
        logger.debug("hcache: partition: %s, as the store has it: %s", describe(partition), reason)
        return partition, reason
    if wanted != partition:
        has = f"the store has pages of this model with {describe(partition)} ({reason})"
        text = "hcache: partition: the options want %s, and %s: neither finds the other's"
        logger.warning(text, describe(wanted), has)
    return wanted, "by an option"


def _fastest_partition(
    restore: Restore, tokens: int, l3: L3Path, leaves_room: Callable[[Partition], bool]
) -> _Decision:
    """The partition with the fastest restores by the profile, of those that leave room; and why."""
    assert restore.profile is not None
    partition = restore.fastest(tokens, l3)
    reason = f"the best for {tokens} tokens by the profile of {restore.profile.device}"
    if not leaves_room(partition):
        faster, partition = partition, restore.fastest(tokens, l3, allowed=leaves_room)
        reason += (
            f" that leaves room for {_LEAST_HOST_SHARE} times the device's tokens in host memory; "
            f"a larger --hicache-ratio allows {describe(faster)}"
        )
    return partition, reason


def settle(dirs: Sequence[Path], name: str, record: PartitionRecord) -> PartitionRecord:
    """Write ``record`` to the store; returns the record there, maybe of a faster server."""
    try:
        save_record(dirs[0], name, record)
    except OSError as error:
        logger.warning("hcache: partition: it could not be recorded: %s", error)
    return find_record(dirs, name) or record


def find_profile(
    runtime: Runtime, config: HCacheConfig, kvcache: Any, shape: ModelShape
) -> Profile | None:
    """The profile of option ``profile``, a kept one, or a new quick one, which ``runtime`` keeps
    for the folders; None if measuring fails. Raises ConfigError if the option names none."""
    if config.profile is not None:
        try:
            return load_profile(config.profile)
        except ConfigError as error:
            raise ConfigError(f"hcache: option 'profile': {error}") from None
    device, options = torch.device(kvcache.device), runtime.options
    # Bytes of pages are not measured: partitions and hits have one profile, whatever the codec.
    measured = shape.model_dump_json(exclude={"hidden_row_bytes", "kv_row_bytes", "index_bytes"})
    digest = hashlib.sha256(f"{device_name(device)} {measured}".encode()).hexdigest()
    file = f"profile-{digest[:12]}.json"
    if options.kept_profile is not None and options.kept_profile[0] == file:
        return options.kept_profile[1]
    for path in filter(Path.is_file, (folder / file for folder in config.dirs)):
        try:
            kept = load_profile(path)
            logger.debug("hcache: partition: using the profile in %s", path)
            return kept
        except ConfigError as error:
            logger.warning("hcache: %s", error)
    try:
        profile = _measure(config, shape, device, runtime.runner.dtype)
    except Exception as error:  # no room on the device, or a shape that cannot be run
        logger.warning("hcache: partition: the machine was not measured: %s", error)
        return None
    finally:
        release_memory(device)  # gigabytes, for the products of large models
    options.kept_profile = (file, profile)
    return profile


def _measure(
    config: HCacheConfig, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Profile:
    """Measure a quick profile of this machine for ``shape``; the first rank measures L3, too."""
    logger.debug("hcache: partition: measuring a quick profile of this machine")
    l3: Rate | None = None
    try:  # data-parallel groups measure at once, and would share the disk: one does, others learn
        if not dist.is_initialized() or dist.get_rank() == 0:
            l3, _ = read_rate(config, shape, START_SECONDS)
    except OSError as error:
        logger.warning("hcache: partition: L3 was not measured: %s", error)
    bench = Bench(shape, device, dtype, START_SECONDS)
    return measure(bench, l3, config.dirs, source="measured at a server's start")


def model_shape(
    runner: Any, kvcache: Any, row_bytes: int | None = None, kv_share: float = 1.0
) -> ModelShape | None:
    """The model for the cost model, or None if its configuration does not tell. ``row_bytes``: of a
    stored hidden state; None: plain. ``kv_share``: encoded bytes of K and V relative to plain."""
    try:
        shape = shape_from_config(runner.model_config.hf_config.to_dict(), "the model's config")
    except ConfigError as error:
        logger.warning("hcache: partition: %s", error)
        return None
    server = {"layers": int(kvcache.layer_num), "hidden_row_bytes": row_bytes}
    server["element_bytes"] = runner.dtype.itemsize
    server["kv_heads"] = shape.heads if shape.latent else runner.model_config.get_num_kv_heads(1)
    server["kv_element_bytes"] = kvcache.dtype.itemsize
    shape = shape.model_copy(update=server)
    rows = {"kv_row_bytes": round(kv_share * shape.kv_bytes)} if kv_share != 1.0 else {}
    if shape.packed:  # a row has more than values of one type
        rows["kv_row_bytes"] = planes_of(kvcache, 0)[0][0].nbytes
    return shape.model_copy(update=rows)


def judge_hits(runtime: Runtime, config: HCacheConfig, backend: str | None = None) -> None:
    """Judge and measure L3 hits from now on: of our store, or of another ``backend`` with own
    pages. All ranks call it at the same point, at attach. Raises ConfigError on every rank if the
    profile is unusable."""
    if may_judge(runtime, config):
        machine = _machine(runtime, config)
        if backend is not None and machine is not None and machine.profile is not None:
            unmeasured = machine.profile.model_copy(update={"l3": None})  # this L3 was not
            machine = replace(machine, profile=unmeasured)
        runtime.judge(machine, backend or "hcache", config.min_gain)


def may_judge(runtime: Runtime, config: HCacheConfig) -> bool:
    """True if this server can judge and measure L3 hits; the reason is logged if a seam is missing.
    Removes the present gate of hits: until another is set every hit is read."""
    runtime.hit_gate = None
    if refusal(JUDGING, Server(runtime.runner, config)) is not None:
        return False
    if (missing := hooks.install(hooks.HITS)) is not None:
        what = "every L3 hit is read, even if L3 is slower than computing"
        logger.warning("hcache: %s: %s", what, missing)
    return missing is None


def _machine(runtime: Runtime, config: HCacheConfig) -> Restore | None:
    """The cost model for L3 hits: that of the partition's choice, otherwise one that the first of
    the ranks that attach together measures. None: this machine or model has none."""
    from sglang.srt.distributed import parallel_state as state

    ranks = ranks_of_a_request(resolved(runtime.runner.server_args))
    methods = runtime.pages.layer_methods
    if methods is not None and methods.profile is not None and methods.shape is not None:
        return replace(methods, ranks=ranks)
    if not config.min_gain:
        return None  # nothing is judged; measurements in service suffice for slices
    measured: tuple[Profile, ModelShape] | None = None
    wrong: str | None = None
    groups = state.get_pp_group(), state.get_attn_tp_group(), state.get_attn_cp_group()
    try:
        if all(group.is_first_rank for group in groups):
            measured = _profile_and_shape(runtime, config)
    except ConfigError as error:
        wrong = str(error)
    except Exception as error:  # pools of several kinds, for which there is no cost model
        logger.info("hcache: L3 hits are judged by measurements in service alone: %s", error)
    gathered = from_all_ranks((measured, wrong))
    for problem in filter(None, (problem for _, problem in gathered)):
        raise ConfigError(problem)
    first_measured = next(filter(None, (measured for measured, _ in gathered)), None)
    if first_measured is None:
        return None
    profile, shape = first_measured
    partition = methods.partition if methods is not None else Partition(0, 0, shape.layers)
    return Restore(profile, shape, partition, ranks)


def _profile_and_shape(runtime: Runtime, config: HCacheConfig) -> tuple[Profile, ModelShape] | None:
    """The profile and the model's shape; None if there is no cost model for it. Raises ConfigError
    if option ``profile`` names no usable file."""
    kvcache, kv_share, started = runtime.runner.token_to_kv_pool, 1.0, runtime.options.config
    if started is not None and runtime.pages.codec not in (None, "none"):
        stages = int(resolved(runtime.runner.server_args).pp_size)
        kv_share = page_plan.encoded_share(Server(runtime.runner, started, kvcache), stages)
    shape = model_shape(runtime.runner, kvcache, kv_share=kv_share)
    profile = find_profile(runtime, config, kvcache, shape) if shape is not None else None
    return (profile, shape) if profile is not None and shape is not None else None
