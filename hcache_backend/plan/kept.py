"""The profile and the partition of a server, which its store folders keep for the next one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.contention import PAGE
from hcache_backend.plan.costs import L3Path, Partition, describe
from hcache_backend.plan.measure import Bench, device_name, measure, read_rate, use_measured_copies
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, ProfileError, Rate, load_profile
from hcache_backend.plan.record import PartitionRecord, find_record, save_record
from hcache_backend.plan.restore import Restore
from hcache_kernels.launch import copies_by_engine, copy_programs

logger = logging.getLogger("hcache")

_QUICK_SECONDS = 0.2

LEAST_HOST_SHARE = 1.5
"""Tokens in host memory for each on the device. Host pages of tokens on the device are not evicted,
so prefetches have only the others; K and V of all layers may leave fewer."""


class Decision(NamedTuple):
    partition: Partition
    reason: str


def known_partition(wanted: Partition | None, recorded: PartitionRecord | None) -> Decision | None:
    """The partition of the options, otherwise of the store's record; None: undecided."""
    if wanted is None and recorded is None:
        return None
    if wanted is None:
        assert recorded is not None
        partition, reason = recorded.partition, recorded.reason
        logger.debug("hcache: partition: %s, as the store has it: %s", describe(partition), reason)
        return Decision(partition, reason)
    if recorded is not None and wanted != recorded.partition:
        logger.warning(
            "hcache: partition: the options want %s, and the store has pages of this model "
            "with %s (%s): neither finds the other's",
            describe(wanted),
            describe(recorded.partition),
            recorded.reason,
        )
    return Decision(wanted, "by an option")


def fastest_partition(
    restore: Restore, tokens: int, l3: L3Path, leaves_room: Callable[[Partition], bool]
) -> Decision:
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
    return Decision(partition, reason)


def settle(config: HCacheConfig, name: str, record: PartitionRecord) -> PartitionRecord:
    """Write ``record``; returns the store's, because another server may have been faster."""
    try:
        save_record(config.dirs[0], name, record, replace=False)
    except OSError as error:
        logger.warning("hcache: partition: it could not be recorded: %s", error)
    return find_record(config.dirs, name) or record


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


def find_profile(
    runtime: Any, config: HCacheConfig, kvcache: Any, shape: ModelShape
) -> Profile | None:
    """The profile of option ``profile``, a kept one, or a new quick one, which ``runtime`` keeps
    for the folders; None if measuring fails. Raises ConfigError if the option names no usable
    file."""
    if config.profile is not None:
        try:
            return load_profile(config.profile)
        except ProfileError as error:
            raise ConfigError(f"hcache: option 'profile': {error}") from None
    device = torch.device(kvcache.device)
    # Bytes of pages are not measured: partitions and hits have one profile, whatever the codec.
    measured = shape.model_dump_json(exclude={"hidden_row_bytes", "kv_row_bytes"})
    digest = hashlib.sha256(f"{device_name(device)} {measured}".encode()).hexdigest()
    file = f"profile-{digest[:12]}.json"
    if runtime.kept_profile is not None and runtime.kept_profile[0] == file:
        return runtime.kept_profile[1]
    for path in (folder / file for folder in config.dirs):
        if path.is_file():
            try:
                kept = load_profile(path)
            except ProfileError as error:
                logger.warning("hcache: %s", error)
            else:
                logger.debug("hcache: partition: using the profile in %s", path)
                return kept
    try:
        profile = _measure(config, shape, device, runtime.runner.dtype)
    except Exception as error:  # no room on the device, or a shape that cannot be run
        logger.warning("hcache: partition: the machine was not measured: %s", error)
        return None
    runtime.kept_profile = (file, profile)
    return profile


def _measure(
    config: HCacheConfig, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Profile:
    logger.debug("hcache: partition: measuring a quick profile of this machine")
    l3: Rate | None = None
    try:
        l3 = Rate(per_second=read_rate(config, shape, _QUICK_SECONDS).per_second)
    except OSError as error:
        logger.warning("hcache: partition: L3 was not measured: %s", error)
    bench = Bench(shape, device, dtype, _QUICK_SECONDS)
    return measure(bench, l3, config.dirs, source="measured at a server's start")


def keep_profile(runtime: Any, folder: Path) -> None:
    """Save a profile measured at start-up in a store folder, for the next start. Raises OSError."""
    if runtime.kept_profile is not None:
        name, profile = runtime.kept_profile
        if not (folder / name).exists():
            profile.save(folder / name)


def copy_as_measured(profile: Profile, device: torch.device | str, segment_bytes: int) -> None:
    """Copy over the bus, on this rank, in the best way of ``profile`` beside matrix products.

    ``segment_bytes``: hidden states of one layer in one page of this rank; 0 leaves their way of
    copying as it is. The copy engine takes its time for each segment, so segments of less than half
    the measured size do not use it.
    """
    if not profile.copies or profile.model is None:
        return
    measured = PAGE * profile.model.hidden * profile.model.element_bytes
    engine = 2 * segment_bytes >= measured
    use_measured_copies(profile.copies, torch.device(device), engine=engine)
    logger.debug(
        "hcache: copies: kernels have %d programs%s",
        copy_programs(torch.device(device)),
        "; hidden states come by the copy engine" if copies_by_engine() else "",
    )
