"""Every configuration of the fused kernel that can be picked. Tests compile each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launch import head_pairs
from .spec import KVProjection


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


def fused_configs(projection: KVProjection, capability: tuple[int, int]) -> tuple[FusedConfig, ...]:
    """The configurations for a layer on a device, the safest first.

    All of them keep their accumulators in registers, whatever the norm and RoPE; tests compile
    them for every architecture.

    Args:
        projection: The layer.
        capability: The device's compute capability.
    """
    head = 2 * head_pairs(projection.head_dim)
    # Tensor cores see 128 columns, or one larger head.
    heads = max(1, min(128 // head, projection.kv_heads))
    if projection.weight.dtype == torch.float32:
        return (FusedConfig(rows=32, heads=1, depth=32, warps=4, stages=2),)
    if head > 128:
        return (FusedConfig(rows=64, heads=1, depth=64, warps=8, stages=2),)
    return (
        FusedConfig(rows=64, heads=heads, depth=64, warps=4, stages=3),
        FusedConfig(rows=128, heads=heads, depth=64, warps=8, stages=3),
    )
