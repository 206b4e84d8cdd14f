"""``project_kv`` as the library's product (cuBLAS through torch) and one kernel for the rest.

The product is as fast as products get on the device; the price is that K and V go through memory
once more. The bias is added by the product's own epilogue, before its result is rounded.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from .configs import LayerKind
from .launch import Launch, head_pairs, key_arguments, pool_arguments
from .spec import KVPool, KVProjection
from .tile import as_stored, normalise, pair_dims, rotate, store_pairs

TILE = 4096
"""Numbers that a program of the epilogue holds: 32 a thread in 4 warps."""

LARGEST_ROW = 16384
"""Numbers of a row of K that a norm over all heads may hold in one program, padding included."""


def project_kv_library(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projection: KVProjection,
    pool: KVPool,
) -> None:
    """Like :func:`hcache_kernels.project_kv.project_kv`, arguments unchecked, at least one row."""
    kv = F.linear(hidden, projection.weight, projection.bias)
    epilogue_launch(kv, positions, slots, projection, pool).run()


def fits_epilogue(kind: LayerKind) -> bool:
    """Whether one program can hold what the norm of K needs at once."""
    row = int(triton.next_power_of_2(kind.kv_heads)) * 2 * head_pairs(kind.head_dim)
    return kind.norm != "all" or row <= LARGEST_ROW


def epilogue_launch(
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projection: KVProjection,
    pool: KVPool,
) -> Launch:
    """Norm, RoPE and scatter of a finished product.

    Args:
        kv: ``[n, 2 * kv_heads * head_dim]``, bias added; or only its K half, and V is left alone.
    """
    heads, dim = projection.kv_heads, projection.head_dim
    over_all = projection.norm is not None and projection.norm.over == "all"
    head = 2 * head_pairs(dim)
    padded_heads = int(triton.next_power_of_2(heads))
    tile_heads = padded_heads if over_all else min(padded_heads, TILE // head)
    rows = max(1, TILE // (tile_heads * head))
    return Launch(
        kernel=_epilogue_kernel,
        grid=(
            triton.cdiv(len(kv), rows),
            triton.cdiv(heads, tile_heads),
            kv.shape[1] // (heads * dim),
        ),
        arguments={
            "kv": kv,
            "positions": positions,
            "slots": slots,
            "n": len(kv),
            "kv_stride": kv.stride(0),
            **pool_arguments(pool),
            **key_arguments(projection),
            "OVER_ALL": over_all,
            "ROWS": rows,
            "TILE_HEADS": tile_heads,
        },
        warps=max(4, rows * tile_heads * head // 1024),
        stages=1,
    )


@triton.jit
def _epilogue_kernel(
    kv,
    positions,
    slots,
    n,
    kv_stride,
    pool_k,
    pool_v,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    k_scale,
    v_scale,
    norm_weight,
    norm_bias,
    norm_weight_head_stride,
    norm_bias_head_stride,
    epsilon,
    cos_sin,
    LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    OVER_ALL: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """One program: ``ROWS`` tokens x ``TILE_HEADS`` heads of K (third axis 0), or of V (1)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    part = tl.program_id(2)
    slot = tl.load(slots + rows, mask=row_mask, other=0)
    at = kv + (rows.to(tl.int64) * kv_stride)[:, None, None]
    at = at + ((part * KV_HEADS + heads) * HEAD_DIM)[None, :, None]
    mask = row_mask[:, None, None] & (heads < KV_HEADS)[None, :, None]
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAIRS)
        both = tl.load(
            at + dim[None, None, :], mask=mask & (dim < HEAD_DIM)[None, None, :], other=0.0
        )
        a, b = tl.split(tl.reshape(both, (ROWS, TILE_HEADS, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)
        first, second = pair_dims(pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        mask = mask & (pair < HEAD_DIM // 2)[None, None, :]
        a = tl.load(at + first[None, None, :], mask=mask, other=0.0)
        b = tl.load(at + second[None, None, :], mask=mask, other=0.0)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if part == 0:
        if NORM is not None:
            a, b = normalise(
                a,
                b,
                heads,
                norm_weight,
                norm_bias,
                norm_weight_head_stride,
                norm_bias_head_stride,
                epsilon,
                NORM,
                OVER_ALL,
                KV_HEADS,
                HEAD_DIM,
                PAIRS,
                ROTARY_DIM,
                INTERLEAVED,
            )
        if ROTARY_DIM > 0:
            position = tl.load(positions + rows, mask=row_mask, other=0)
            a, b = rotate(a, b, position, row_mask, cos_sin, PAIRS, ROTARY_DIM)
        key_type: tl.constexpr = pool_k.dtype.element_ty
        store_pairs(
            pool_k,
            slot,
            heads,
            as_stored(a, k_scale, LIMIT, key_type),
            as_stored(b, k_scale, LIMIT, key_type),
            row_mask,
            k_slot_stride,
            k_head_stride,
            KV_HEADS,
            HEAD_DIM,
            PAIRS,
            ROTARY_DIM,
            INTERLEAVED,
        )
    else:
        value_type: tl.constexpr = pool_v.dtype.element_ty
        store_pairs(
            pool_v,
            slot,
            heads,
            as_stored(a, v_scale, LIMIT, value_type),
            as_stored(b, v_scale, LIMIT, value_type),
            row_mask,
            v_slot_stride,
            v_head_stride,
            KV_HEADS,
            HEAD_DIM,
            PAIRS,
            ROTARY_DIM,
            INTERLEAVED,
        )
