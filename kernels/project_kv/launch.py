"""What is common to the launches of both kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..launch import Launch
from .checks import FP8_TYPES
from .spec import KVPool, KVProjection

__all__ = ["Launch", "head_pairs", "key_arguments", "pool_arguments"]


def head_pairs(head_dim: int) -> int:
    """Pairs of a head in a tile: half its dimensions, up to a power of two."""
    return int(triton.next_power_of_2(head_dim // 2))


def key_arguments(projection: KVProjection, finish: bool = True) -> dict[str, Any]:
    """Norm and RoPE, as both kernels take them.

    Args:
        projection: The layer.
        finish: False: K is left as the product and bias make it.
    """
    norm = projection.norm if finish else None
    rotary = projection.rotary if finish else None
    dim = projection.head_dim

    def head_stride(parameter: torch.Tensor | None) -> int:
        return dim if parameter is not None and len(parameter) != dim else 0

    return {
        "norm_weight": norm.weight if norm else None,
        "norm_bias": norm.bias if norm else None,
        "norm_weight_head_stride": head_stride(norm.weight) if norm else 0,
        "norm_bias_head_stride": head_stride(norm.bias) if norm else 0,
        "epsilon": norm.epsilon if norm else 0.0,
        "cos_sin": rotary.cos_sin if rotary else None,
        "NORM": norm.kind if norm else None,
        "KV_HEADS": projection.kv_heads,
        "HEAD_DIM": dim,
        "PAIRS": head_pairs(dim),
        "ROTARY_DIM": rotary.rotary_dim if rotary else 0,
        "INTERLEAVED": rotary is not None and rotary.style == "interleaved",
    }


def pool_arguments(pool: KVPool) -> dict[str, Any]:
    """The pool, as both kernels take it."""
    fp8 = pool.k.dtype in FP8_TYPES
    return {
        "pool_k": pool.k,
        "pool_v": pool.v,
        "k_slot_stride": pool.k.stride(0),
        "k_head_stride": pool.k.stride(1),
        "v_slot_stride": pool.v.stride(0),
        "v_head_stride": pool.v.stride(1),
        "k_scale": pool.k_scale,
        "v_scale": pool.v_scale,
        "LIMIT": torch.finfo(pool.k.dtype).max if fp8 else None,
    }
