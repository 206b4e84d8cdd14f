"""The profile of a server: the given one, a kept one, or a quick measurement. The server also
copies in the way that the profile found best beside matrix products."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.contention import PAGE
from hcache_backend.plan.disk import read_rate
from hcache_backend.plan.measure import Bench, device_name, measure, use_measured_copies
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, ProfileError, Rate, load_profile
from hcache_backend.sglang.runtime import Runtime
from hcache_kernels.launch import copies_by_engine, copy_programs

logger = logging.getLogger("hcache")

_QUICK_SECONDS = 0.2


def find_profile(
    runtime: Runtime, config: HCacheConfig, kvcache: Any, shape: ModelShape
) -> Profile | None:
    """The profile of option ``profile``, a kept one, or a new quick one; None if measuring fails.
    Raises ConfigError if the option names no usable file."""
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


def copy_as_measured(profile: Profile, device: torch.device | str, segment_bytes: int) -> None:
    """Copy over the bus, on this rank, in the best way of ``profile``.

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


def keep_profile(runtime: Runtime, folder: Path) -> None:
    """Save a profile measured at start-up in a store folder, for the next start. Raises OSError."""
    if runtime.kept_profile is not None:
        name, profile = runtime.kept_profile
        if not (folder / name).exists():
            profile.save(folder / name)


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
