"""Every configuration of ``project_kv`` that can be picked fits its device, and nothing spills."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from hcache_kernels.launch import Launch
from hcache_kernels.project_kv import KeyNorm, KVPool, KVProjection, Rotary
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import (
    TileConfig,
    epilogue_launch,
    fused_configs,
    fused_launches,
    head_pairs,
)
from tests.kernels.compilation import (
    SHARED_MEMORY,
    Job,
    Usage,
    cases,
    device_name,
    empty,
    require_fits,
)

N = 4096
HIDDEN = 4096 + 16  # the last tile of the product is masked
KV_HEADS = 32

# Norm of K, style of RoPE, how much of a head it turns, type of the pool (None: the model's).
# In the order of the registers that they take, so that a configuration meets its worst one first.
EPILOGUES = {
    "norm and rope": ("head", "interleaved", 1.0, None),
    "rope": ("none", "interleaved", 1.0, None),
    "partial rope to fp8": ("none", "neox", 0.25, torch.float8_e5m2),
    "norm to fp8": ("head", "none", 0.0, torch.float8_e5m2),
    "norm over all": ("all", "neox", 1.0, None),
}
MANY_ACCUMULATORS = 128
"""A thread's, in the tiles that leave few registers: these meet every epilogue."""

# All of them are compiled before the first test, in two processes.
pytestmark = pytest.mark.timeout(1800)


def make_projection(epilogue: str, head_dim: int, dtype: torch.dtype) -> KVProjection:
    over, style, turned, _ = EPILOGUES[epilogue]
    width = KV_HEADS * head_dim
    norm, rotary = None, None
    if over != "none":
        parameter = empty(width, dtype=dtype)
        norm = KeyNorm("layer", over, parameter, parameter, 1e-6)  # type: ignore[arg-type]
    if style != "none":
        rotary_dim = int(head_dim * turned)
        cos_sin = empty(N, rotary_dim, dtype=torch.float32)
        rotary = Rotary(cos_sin, style, rotary_dim)  # type: ignore[arg-type]
    weight, bias = empty(2 * width, HIDDEN, dtype=dtype), empty(2 * width, dtype=dtype)
    return KVProjection(weight, bias, KV_HEADS, head_dim, norm, rotary)


def make_arguments(
    projection: KVProjection, pool_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, KVProjection, KVPool]:
    """Positions, slots, projection and pool."""
    indices = empty(N, dtype=torch.int64)
    k = empty(N, projection.kv_heads, projection.head_dim, dtype=pool_type)
    return indices, indices, projection, KVPool(k, k)


def fused_launch(epilogue: str, head_dim: int, dtype: torch.dtype, config: TileConfig) -> Launch:
    pool_type = EPILOGUES[epilogue][-1] or dtype
    arguments = make_arguments(make_projection(epilogue, head_dim, dtype), pool_type)
    return fused_launches(empty(N, HIDDEN, dtype=dtype), *arguments, config)[0]


def library_epilogue(epilogue: str, head_dim: int, pool_type: torch.dtype) -> Launch:
    dtype = torch.bfloat16
    arguments = make_arguments(make_projection(epilogue, head_dim, dtype), pool_type)
    return epilogue_launch(empty(N, 2 * KV_HEADS * head_dim, dtype=dtype), *arguments)


def fused_jobs() -> Iterator[tuple[str, Job]]:
    for capability in SHARED_MEMORY:
        for dtype, head_dims in ((torch.bfloat16, (64, 96, 128, 256)), (torch.float32, (128, 256))):
            for head_dim in head_dims:
                seen = set()
                for epilogue in EPILOGUES:
                    kind = kind_of(make_projection(epilogue, head_dim, dtype))
                    for config in fused_configs(kind, capability):
                        tile = config.rows * config.heads * 2 * head_pairs(head_dim)
                        many = tile // (32 * config.warps) >= MANY_ACCUMULATORS
                        if config in seen and not many:
                            continue
                        seen.add(config)
                        tile = f"{config.rows} x {config.heads} heads, {config.stages} stages"
                        yield (
                            f"{device_name(capability)} fused {name(dtype)} head {head_dim} "
                            f"{tile}, {config.warps} warps, {epilogue}",
                            Job(
                                capability, partial(fused_launch, epilogue, head_dim, dtype, config)
                            ),
                        )


def library_jobs() -> Iterator[tuple[str, Job]]:
    for capability in SHARED_MEMORY:
        for epilogue, head_dim, pool_type in (
            ("norm and rope", 96, torch.bfloat16),
            ("norm over all", 128, torch.float8_e5m2),
            ("norm over all", 256, torch.bfloat16),
        ):
            what = f"{device_name(capability)} library, heads of {head_dim}"
            yield (
                f"{what} to {name(pool_type)}, {epilogue}",
                Job(capability, partial(library_epilogue, epilogue, head_dim, pool_type)),
            )


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


JOBS = dict([*fused_jobs(), *library_jobs()])


@pytest.mark.parametrize("job", cases(JOBS))
def test_nothing_spills_and_shared_memory_suffices(job: str, usage: Usage) -> None:
    require_fits(JOBS[job], usage)
