"""Every configuration of the fused kernel that can be picked. Tests compile each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .launch import head_pairs
from .spec import KVProjection


@dataclass(frozen=True)
class LayerKind:
    """What decides how fast a layer's projection is; layers of a kind share what was measured.

    Attributes:
        hidden: Width of the hidden states.
        kv_heads: Heads of K and of V.
        head_dim: Dimensions of a head.
        dtype: Of hidden states and weight.
        norm: What the norm of K goes over: ``none``, ``head`` or ``all``.
        rotary: Style of RoPE: ``none``, ``neox`` or ``interleaved``.
    """

    hidden: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    norm: str
    rotary: str


def kind_of(projection: KVProjection) -> LayerKind:
    """The kind of a layer."""
    return LayerKind(
        hidden=projection.weight.shape[1],
        kv_heads=projection.kv_heads,
        head_dim=projection.head_dim,
        dtype=projection.weight.dtype,
        norm=projection.norm.over if projection.norm else "none",
        rotary=projection.rotary.style if projection.rotary else "none",
    )


@dataclass(frozen=True)
class FusedConfig:
    """Tile and schedule of the fused kernel.

    Attributes:
        rows: Tokens of a tile.
        heads: Heads of a tile, all of K or all of V.
        depth: Hidden dimensions that are multiplied at a time.
        warps: Warps of a program.
        stages: Tiles in flight between memory and the tensor cores.
        group: Row tiles that share the weights they read.
    """

    rows: int
    heads: int
    depth: int
    warps: int
    stages: int
    group: int = 8


@lru_cache
def fused_configs(kind: LayerKind, capability: tuple[int, int]) -> tuple[FusedConfig, ...]:
    """The configurations for a kind of layer on a device of compute capability 8.0 or more.

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
        return (FusedConfig(rows=32 if head <= 128 else 16, heads=1, depth=16, warps=4, stages=2),)
    if head > 128:
        return (FusedConfig(rows=64, heads=1, depth=64, warps=8, stages=2),)
    heads = min(128 // head, 1 << (kind.kv_heads.bit_length() - 1))
    configs = [FusedConfig(rows=64, heads=heads, depth=64, warps=4, stages=3)]
    # What the accumulators leave of the registers must hold the norm's and RoPE's operands.
    norm_and_rope = kind.norm == "head" and kind.rotary != "none"
    if not (norm_and_rope and capability >= (10, 0)):
        configs.append(FusedConfig(rows=128, heads=heads, depth=64, warps=8, stages=3))
        if capability in ((8, 0), (9, 0), (10, 0)):  # those with much shared memory
            configs.append(FusedConfig(rows=128, heads=heads, depth=64, warps=8, stages=4))
    roomy = not norm_and_rope and kind.head_dim == head  # nor masks of columns
    if capability in ((8, 0), (9, 0)) and roomy and kind.kv_heads >= 2 * heads:
        configs.append(FusedConfig(rows=128, heads=2 * heads, depth=64, warps=8, stages=3))
    return tuple(configs)
