"""The ways of ``project_kv`` on Triton, with their tiles and schedules. Tests compile every one.

- fused: one launch multiplies, and finishes K and V on the accumulators.
- library: cuBLAS, through torch, multiplies and adds the bias before it rounds; the same kernel
  then reads the product. No product is faster, but K and V go through memory once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch.nn import functional as F

from ..launch import Launch
from .kernel import project_kv_kernel
from .spec import FP8_TYPES, KVProjection, LayerKind, ProjectionCall

EPILOGUE_TILE = 4096  # numbers that a program without a product holds: 32 a thread in 4 warps
LARGEST_ROW = 16384  # numbers of a row of K, padded, in a program with a norm over all heads


@dataclass(frozen=True)
class TileConfig:
    """Tile and schedule of the kernel."""

    rows: int  # tokens of a tile
    heads: int  # of a tile, all of K or all of V
    depth: int  # hidden dimensions that are multiplied at a time; 0: the product is finished
    warps: int  # of a program
    stages: int  # tiles in flight between memory and the tensor cores
    group: int = 8  # row tiles that share the weights they read


def head_pairs(head_dim: int) -> int:
    """Pairs of a head in a tile: half its dimensions, up to a power of two."""
    return int(triton.next_power_of_2(head_dim // 2))


def epilogue_config(projection: KVProjection) -> TileConfig:
    """The configuration for a finished product; a norm over all heads wants whole rows."""
    head = 2 * head_pairs(projection.head_dim)
    heads = int(triton.next_power_of_2(projection.kv_heads))
    if projection.norm is None or projection.norm.over == "head":
        heads = min(heads, EPILOGUE_TILE // head)
    rows = max(1, EPILOGUE_TILE // (heads * head))
    warps = max(4, rows * heads * head // 1024)
    return TileConfig(rows=rows, heads=heads, depth=0, warps=warps, stages=1)


@lru_cache
def fused_configs(kind: LayerKind, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """The fused way's configurations for a kind of layer, on compute capability 8.0 or more.

    None of them spills, whatever norm, RoPE, biases and types of such a layer: tests compile them
    for 8.0, 8.9, 9.0 and 10.0. Empty for heads too small for a product of tiles, and when rows of
    the weight are not aligned to 16 numbers: loading them would take so many instructions that the
    library is always faster.
    """
    if kind.hidden % 16 or kind.head_dim < 16:
        return ()
    head = 2 * head_pairs(kind.head_dim)
    if kind.dtype == torch.float32:
        # Without tensor cores: TF32 would not be the model's precision.
        return (TileConfig(rows=32 if head <= 128 else 16, heads=1, depth=16, warps=4, stages=2),)
    if head > 128:
        return (TileConfig(rows=64, heads=1, depth=64, warps=8, stages=2),)
    heads = min(128 // head, 1 << (kind.kv_heads.bit_length() - 1))
    # What the accumulators leave of the registers must hold the norm's and RoPE's operands.
    norm_and_rope = kind.norm == "head" and kind.rotary != "none"
    masked = kind.head_dim != head  # columns
    warps = 8 if norm_and_rope and masked and capability >= (10, 0) else 4
    configs = [TileConfig(rows=64, heads=heads, depth=64, warps=warps, stages=3)]
    if not (norm_and_rope and capability >= (10, 0)):
        configs.append(TileConfig(rows=128, heads=heads, depth=64, warps=8, stages=3))
        if capability in ((8, 0), (9, 0), (10, 0)):  # those with much shared memory
            configs.append(TileConfig(rows=128, heads=heads, depth=64, warps=8, stages=4))
    roomy = not norm_and_rope and not masked
    # There two heads of 128 with pairs side by side are turned with 40 bytes more than registers.
    spills = capability == (8, 0) and kind.head_dim == 128 and kind.rotary == "interleaved"
    roomy = roomy and not spills
    if capability in ((8, 0), (9, 0)) and roomy and kind.kv_heads >= 2 * heads:
        configs.append(TileConfig(rows=128, heads=2 * heads, depth=64, warps=8, stages=3))
    return tuple(configs)


@dataclass(frozen=True)
class Way:
    """A way to run ``project_kv`` on a GPU: fused, with a configuration, or by the library."""

    config: TileConfig | None

    def run(self, call: ProjectionCall) -> None:
        """Like :func:`hcache_kernels.project_kv.project_kv`, unchecked, ``n >= 1``."""
        if self.config is not None:
            launches = fused_launches(call, self.config)
        else:
            kv = F.linear(call.hidden, call.projection.weight, call.projection.bias)
            launches = [epilogue_launch(kv, call)]
        for launch in launches:
            launch.run()


LIBRARY = Way(None)


@lru_cache
def possible_ways(
    kind: LayerKind, pool_type: torch.dtype, capability: tuple[int, int]
) -> tuple[Way, ...]:
    """The ways that a device can run a layer, the default first; none: only torch can."""
    # Triton converts to e4m3 only where the hardware does.
    oldest = (8, 9) if pool_type == torch.float8_e4m3fn else (8, 0)
    row = int(triton.next_power_of_2(kind.kv_heads)) * 2 * head_pairs(kind.head_dim)
    if capability < oldest or (kind.norm == "all" and row > LARGEST_ROW):
        return ()
    return (LIBRARY, *map(Way, fused_configs(kind, capability)))


def fused_launches(call: ProjectionCall, config: TileConfig) -> list[Launch]:
    """The fused way's launches, in order.

    One, unless K is normalised over all heads: no tile holds a whole row of K then, so K without
    norm goes through a buffer ``[n, kv_heads, head_dim]``, and a second launch finishes it.
    """
    projection = call.projection
    if projection.norm is None or projection.norm.over == "head":
        return [_launch(call, config)]
    keys = call.hidden.new_empty(len(call.hidden), projection.kv_heads, projection.head_dim)
    bare = replace(projection, norm=None, rotary=None)
    product = replace(call, projection=bare, pool=replace(call.pool, k=keys))
    return [_launch(product, config, keys_by_row=True), epilogue_launch(keys.flatten(1), call)]


def epilogue_launch(kv: torch.Tensor, call: ProjectionCall) -> Launch:
    """Norm, RoPE and scatter of a finished product with its bias, ``[n, 2 * kv_heads * head_dim]``;
    or of its K half alone: then nothing writes V."""
    return _launch(replace(call, hidden=kv), epilogue_config(call.projection))


def _launch(call: ProjectionCall, config: TileConfig, keys_by_row: bool = False) -> Launch:
    """The kernel's launch. If ``config`` has no depth, hidden states are the finished product.
    With ``keys_by_row`` K of token i goes to row i of ``pool.k`` instead of its slot."""
    source, projection, pool = call.hidden, call.projection, call.pool
    n, depth = source.shape
    heads, dim, pairs = projection.kv_heads, projection.head_dim, head_pairs(projection.head_dim)
    norm, rotary = projection.norm, projection.rotary
    parts = 2 if config.depth else depth // (heads * dim)

    def head_stride(parameter: torch.Tensor | None) -> int:
        return dim if parameter is not None and len(parameter) != dim else 0

    def limit(part: torch.Tensor) -> float | None:
        return torch.finfo(part.dtype).max if part.dtype in FP8_TYPES else None

    return Launch(
        kernel=project_kv_kernel,
        grid=(triton.cdiv(n, config.rows) * parts * triton.cdiv(heads, config.heads),),
        arguments={
            "source": source,
            "weight": projection.weight if config.depth else None,
            "bias": projection.bias,
            "positions": call.positions,
            "slots": call.slots,
            "n": n,
            "depth": depth,
            "source_stride": source.stride(0),
            "weight_stride": projection.weight.stride(0),
            "pool_k": pool.k,
            "pool_v": pool.v,
            "k_slot_stride": pool.k.stride(0),
            "k_head_stride": pool.k.stride(1),
            "v_slot_stride": pool.v.stride(0),
            "v_head_stride": pool.v.stride(1),
            "k_scale": pool.k_scale,
            "v_scale": pool.v_scale,
            "norm_weight": norm.weight if norm else None,
            "norm_bias": norm.bias if norm else None,
            "norm_weight_head_stride": head_stride(norm.weight) if norm else 0,
            "norm_bias_head_stride": head_stride(norm.bias) if norm else 0,
            "epsilon": norm.epsilon if norm else 0.0,
            "cos_sin": rotary.cos_sin if rotary else None,
            "K_LIMIT": limit(pool.k),
            "V_LIMIT": limit(pool.v),
            "NORM": norm.kind if norm else None,
            "OVER_ALL": norm is not None and norm.over == "all",
            "KV_HEADS": heads,
            "HEAD_DIM": dim,
            "PAIRS": pairs,
            "ROTARY_DIM": rotary.rotary_dim if rotary else 0,
            "INTERLEAVED": rotary is not None and rotary.style == "interleaved",
            "ROUNDING": projection.rounding,
            "KEYS_BY_ROW": keys_by_row,
            "PARTS": parts,
            "TILE": config,
            "DEPTH_EVEN": config.depth > 0 and depth % config.depth == 0,
            "COLUMNS_EVEN": heads % config.heads == 0 and dim == 2 * pairs,
        },
        warps=config.warps,
        stages=config.stages,
    )
