"""Which layers this server stores as hidden states, as KV or not at all (paper section 4.1).

Decided once, before CUDA graphs are recorded, because what is captured hangs on it. What is stored
is fixed from then on; how many of the first layers a restore recomputes is decided each time.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.kv_segments import PoolParking
from hcache_backend.engine.ranks import from_first_rank
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.codec_choice import wanted_codec
from hcache_backend.engine.startup.memory import kv_bytes_per_token
from hcache_backend.partition.costs import L3Path, LayerCosts, layer_costs
from hcache_backend.partition.disk import read_rate
from hcache_backend.partition.layers import Method, Partition
from hcache_backend.partition.measure import Bench, measure
from hcache_backend.partition.model_config import ModelConfigError, shape_from_config
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.plan import describe
from hcache_backend.partition.profile import (
    Profile,
    ProfileError,
    Rate,
    load_profile,
    processor_name,
)
from hcache_backend.partition.solver import objective_with, recompute_layers, search
from hcache_backend.restore.exchange import share_of_rank
from hcache_backend.restore.pipeline import FIRST_PIECE_TOKENS, FIRST_PIECES
from hcache_backend.restore.ring import RUN_AHEAD
from hcache_backend.store.kvikio_ops import best_file_ops

logger = logging.getLogger("hcache")

_QUICK_SECONDS = 0.2
_MAX_PIECE = 16 << 20


@dataclass(frozen=True)
class Partitioning:
    """What is stored of each layer, and what decides about each restore.

    Attributes:
        partition: The partition.
        profile: The machine; None where nobody measured it: then no restore recomputes more than
            it must.
        shape: The model as the cost model sees it; None without a profile.
        chunk_tokens: Tokens that a projection takes at most; the pipeline's ring goes by it.
        parks: Whether segments can wait in the KV pool.
        can_recompute: Whether the first layers can be recomputed here.
        reason: Why they cannot, or None.
        eager: Whether pages are restored while L3 is being read: of those from there the same
            layers are recomputed however many they are.
        ranks: Tensor-parallel ranks. With several, recomputation and transfers are not at work at
            once, because both talk to the other ranks: no more is recomputed than must be.
    """

    partition: Partition
    profile: Profile | None
    shape: ModelShape | None
    chunk_tokens: int
    parks: bool = False
    can_recompute: bool = True
    reason: str | None = None
    ranks: int = 1
    eager: bool = False

    @property
    def methods(self) -> tuple[Method, ...]:
        """The method of every layer; KV instead of a recomputation that is not possible."""
        methods = (self.partition.method(layer) for layer in range(self.partition.layers))
        if self.can_recompute:
            return tuple(methods)
        return tuple("kv" if method == "recompute" else method for method in methods)

    def layers(self, method: Method) -> tuple[int, ...]:
        """The layers of a method."""
        return tuple(i for i, used in enumerate(self.methods) if used == method)

    def without_recompute(self, reason: str) -> Partitioning:
        """The same hidden layers, and nothing recomputed."""
        return replace(self, can_recompute=False, reason=reason)

    def first_layers(self, tokens: int, prefix: int, l3: L3Path) -> int:
        """How many of the first layers one restore recomputes.

        Args:
            tokens: Tokens that are restored.
            prefix: Tokens before them.
            l3: ``none`` for pages that are in host memory, ``first`` for those that must be read.
        """
        if not self.can_recompute:
            return 0
        if self.profile is None or self.shape is None or tokens == 0 or self.ranks > 1:
            return self.partition.recompute
        if self.eager and l3 != "none":
            return self.partition.recompute
        room = _room(self.chunk_tokens, tokens, self.ranks)
        return recompute_layers(
            self.profile,
            self.shape,
            self.partition,
            tokens,
            prefix=prefix,
            l3=l3,
            early_stop=True,
            ring=room.ring,
            chunks=room.chunks,
            pieces=room.pieces,
            parks=self.parks,
        )

    def describe(self) -> str:
        """For the log."""
        counts = Partition(*(len(self.layers(m)) for m in ("recompute", "hidden", "kv")))
        return describe(counts)


def partitioning(runtime: Runtime, kvcache: Any) -> Partitioning:
    """How each layer of this server is stored. All ranks must ask first at the same point.

    Args:
        runtime: State of this process.
        kvcache: The KV pool.

    Raises:
        ConfigError: Option ``partition`` or ``profile`` is wrong; it stops the server.
    """
    if runtime.partitioning is None:
        from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

        row_bytes = wanted_codec(runtime, runtime.runner).row_bytes
        groups = get_pp_group().cpu_group, get_tp_group().cpu_group
        runtime.partitioning = _decide(runtime, kvcache, row_bytes, *groups)
    decided: Partitioning = runtime.partitioning
    return decided


def _decide(
    runtime: Runtime, kvcache: Any, row_bytes: int, stages: Any, ranks: Any
) -> Partitioning:
    """Only the first rank of the first pipeline stage measures.

    Args:
        runtime: State of this process.
        kvcache: The KV pool.
        row_bytes: Bytes of one stored hidden state.
        stages: Process group of the pipeline stages, on the CPU.
        ranks: Process group of the tensor-parallel ranks, on the CPU.

    Raises:
        ConfigError: Option ``partition`` or ``profile`` is wrong; it stops the server.
    """
    config = runtime.config
    assert config is not None
    layers, tp, eager = int(kvcache.layer_num), _ranks(runtime), config.restore == "eager"
    chunk_tokens = min(config.restore_chunk_tokens, int(kvcache.size))
    fixed = _fixed_partition(config, layers)
    needed = fixed is None or config.profile is not None
    shape = _shape(runtime, kvcache, row_bytes) if needed else None
    parks = PoolParking.fits(kvcache, row_bytes)
    profile: Profile | None = None
    if shape is not None:
        measured = partial(from_first_rank, ranks, partial(_profile, runtime, kvcache, shape))
        found = from_first_rank(stages, measured)
        if isinstance(found, ConfigError):
            raise found
        profile = found
    _, shares = share_of_rank(0, tp, int(kvcache.page_size))
    if profile is not None and shares > 1:
        profile = profile.model_copy(update={"gathers": True})
    if fixed is None and (profile is None or shape is None):
        logger.warning(
            "hcache: partition: without a profile hidden states are taken where they are smaller "
            "than KV"
        )
        smaller = layers * row_bytes < kv_bytes_per_token(kvcache)
        fixed = Partition(0, layers, 0) if smaller else Partition(0, 0, layers)
    if fixed is None:
        assert profile is not None and shape is not None
        from_l3: L3Path = "overlapped" if eager else "first"
        l3: L3Path = from_l3 if _has_storage(runtime) else "none"
        tokens = min(int(runtime.runner.model_config.context_len), int(kvcache.size))
        costs = layer_costs(profile, shape, tokens, tp=tp, l3=l3, early_stop=True)
        seconds = objective_with(*_room(chunk_tokens, tokens, tp), parks=parks)
        # Equal sizes count too: their times would differ by noise only.
        larger = shape.hidden_bytes >= shape.kv_bytes

        def objective(costs: LayerCosts, partition: Partition) -> float:
            out = (tp > 1 and partition.recompute) or (larger and partition.hidden)
            return float("inf") if out else seconds(costs, partition)

        fixed = search(costs, layers, objective)
        logger.info(
            "hcache: partition: %s; the best for %d tokens by the profile of %s (%s)",
            describe(fixed),
            tokens,
            profile.device,
            profile.source,
        )
    return Partitioning(fixed, profile, shape, chunk_tokens, parks, ranks=tp, eager=eager)


def keep_profile(runtime: Runtime, folder: Path) -> None:
    """Leave a profile that was measured at start-up in a store folder, for the next start.

    Raises:
        OSError: It cannot be written.
    """
    if runtime.kept_profile is not None:
        name, profile = runtime.kept_profile
        if not (folder / name).exists():
            profile.save(folder / name)


def _fixed_partition(config: HCacheConfig, layers: int) -> Partition | None:
    """What the options say; None: the profile decides."""
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


class _Room(NamedTuple):
    """Segments that the pipeline's ring holds, those of a layer, and pieces of the first layer."""

    ring: int
    chunks: int
    pieces: int


def _room(chunk_tokens: int, tokens: int, ranks: int) -> _Room:
    ring = RUN_AHEAD * chunk_tokens // min(tokens, chunk_tokens)
    pieces = min(FIRST_PIECES, tokens // FIRST_PIECE_TOKENS) if ranks == 1 else 1
    return _Room(ring, -(-tokens // chunk_tokens), max(1, pieces))


def _ranks(runtime: Runtime) -> int:
    return int(resolved(runtime.runner.server_args).tp_size)


def _has_storage(runtime: Runtime) -> bool:
    return resolved(runtime.runner.server_args).hicache_storage_backend is not None


def _shape(runtime: Runtime, kvcache: Any, row_bytes: int) -> ModelShape | None:
    """The model as the cost model sees it, or None where its configuration does not tell."""
    runner = runtime.runner
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


def _profile(runtime: Runtime, kvcache: Any, shape: ModelShape) -> Profile | ConfigError | None:
    """The profile of option ``profile``, the one that was kept, or a new quick one.

    Returns:
        None where the machine could not be measured; an error where the option names no usable
        file: all ranks are to raise it.
    """
    config = runtime.config
    assert config is not None
    if config.profile is not None:
        try:
            return load_profile(config.profile)
        except ProfileError as error:
            return ConfigError(f"hcache: option 'profile': {error}")
    device = torch.device(kvcache.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    digest = hashlib.sha256(f"{name} {shape.model_dump_json()}".encode()).hexdigest()
    file = f"profile-{digest[:12]}.json"
    for folder in config.dirs:
        if (folder / file).is_file():
            try:
                kept = load_profile(folder / file)
            except ProfileError as error:
                logger.warning("hcache: %s", error)
            else:
                logger.info("hcache: partition: using the profile in %s", folder / file)
                return kept
    try:
        profile = _measure(config, shape, device, runtime.runner.dtype, name)
    except Exception as error:  # no room on the device, or a shape that cannot be run
        logger.warning("hcache: partition: the machine was not measured: %s", error)
        return None
    runtime.kept_profile = (file, profile)
    return profile


def _measure(
    config: HCacheConfig, shape: ModelShape, device: torch.device, dtype: torch.dtype, name: str
) -> Profile:
    logger.info(
        "hcache: partition: measuring a quick profile of this machine (option 'profile' takes "
        "one of `hcache profile`)"
    )
    try:
        page = 64 * shape.layers * shape.hidden_bytes
        rate = read_rate(
            config.dirs,
            min(page, _MAX_PIECE),
            config.io_threads,
            _QUICK_SECONDS,
            config.min_free_bytes,
            best_file_ops(config.reader),
        )
        l3: Rate | None = Rate(per_second=rate.per_second)
    except OSError as error:
        logger.warning("hcache: partition: L3 was not measured: %s", error)
        l3 = None
    bench = Bench(shape, device, dtype, _QUICK_SECONDS)
    dirs = [str(path) for path in config.dirs]
    profile = measure(bench, name, l3, dirs, lambda: None)
    return profile.model_copy(update={"source": "measured at a server's start"})
