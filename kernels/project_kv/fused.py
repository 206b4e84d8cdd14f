"""``project_kv`` in one kernel: the product, and on the accumulators bias, norm, RoPE, scatter.

Nothing but hidden states and weights is read and nothing but the pool is written. A norm over all
heads is the exception: no tile holds a whole row of K, so K without norm goes through a buffer and
the epilogue kernel of the library way finishes it.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .configs import FusedConfig
from .launch import Launch, head_pairs, key_arguments, pool_arguments
from .library import epilogue_launch
from .spec import KVPool, KVProjection
from .tile import as_stored, normalise, pair_dims, rotate, store_pairs


def project_kv_fused(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projection: KVProjection,
    pool: KVPool,
    config: FusedConfig,
) -> None:
    """Like :func:`hcache_kernels.project_kv.project_kv`, arguments unchecked, at least one row."""
    for launch in fused_launches(hidden, positions, slots, projection, pool, config):
        launch.run()


def fused_launches(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projection: KVProjection,
    pool: KVPool,
    config: FusedConfig,
) -> list[Launch]:
    """The launches that :func:`project_kv_fused` makes, in order."""
    deferred = projection.norm is not None and projection.norm.over == "all"
    launches = []
    arguments = pool_arguments(pool)
    if deferred:
        heads, dim = projection.kv_heads, projection.head_dim
        keys = hidden.new_empty(len(hidden), heads * dim)
        launches.append(epilogue_launch(keys, positions, slots, projection, pool))
        arguments |= {"pool_k": keys, "k_slot_stride": heads * dim, "k_head_stride": dim}
    depth = hidden.shape[1]
    head_tiles = triton.cdiv(projection.kv_heads, config.heads)
    columns_even = (
        projection.kv_heads % config.heads == 0
        and projection.head_dim == 2 * head_pairs(projection.head_dim)
    )
    product = Launch(
        kernel=_project_kernel,
        grid=(triton.cdiv(len(hidden), config.rows) * 2 * head_tiles,),
        arguments={
            "hidden": hidden,
            "weight": projection.weight,
            "bias": projection.bias,
            "positions": positions,
            "slots": slots,
            "n": len(hidden),
            "depth": depth,
            "hidden_stride": hidden.stride(0),
            "weight_stride": projection.weight.stride(0),
            **arguments,
            **key_arguments(projection, finish=not deferred),
            "DEFER_KEY": deferred,
            "ROWS": config.rows,
            "TILE_HEADS": config.heads,
            "TILE_DEPTH": config.depth,
            "GROUP": config.group,
            "DEPTH_EVEN": depth % config.depth == 0,
            "COLUMNS_EVEN": columns_even,
        },
        warps=config.warps,
        stages=config.stages,
    )
    return [product, *launches]


@triton.jit
def _project_kernel(
    hidden,
    weight,
    bias,
    positions,
    slots,
    n,
    depth,
    hidden_stride,
    weight_stride,
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
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEFER_KEY: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH_EVEN: tl.constexpr,
    COLUMNS_EVEN: tl.constexpr,
):
    """One program: ``ROWS`` tokens x ``TILE_HEADS`` heads of K, or of V."""
    HEAD_TILES: tl.constexpr = (KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    COLUMNS: tl.constexpr = TILE_HEADS * 2 * PAIRS
    # Programs that run at the same time share rows and weights, which then come from L2.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(n, ROWS)
    group = program // (GROUP * 2 * HEAD_TILES)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = program % (GROUP * 2 * HEAD_TILES)
    row_tile = group * GROUP + within % group_rows
    head_tile = within // group_rows
    is_key = head_tile < HEAD_TILES
    first_head = (head_tile % HEAD_TILES) * TILE_HEADS

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n
    # A row of the weight is read wherever it lies, so columns come in the order that puts the two
    # members of a pair side by side: one thread's accumulators hold both, on every architecture.
    column = tl.arange(0, COLUMNS)
    head = first_head + column // (2 * PAIRS)
    pair = column % (2 * PAIRS) // 2
    first, second = pair_dims(pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    dim = tl.where(column % 2 == 0, first, second)
    column_mask = (head < KV_HEADS) & (pair < HEAD_DIM // 2)
    first_column = tl.where(is_key, first_head, KV_HEADS + first_head) * HEAD_DIM
    tile_column = column // (2 * PAIRS) * HEAD_DIM + dim

    # 64-bit addresses of the tile's corner, 32-bit offsets in it: half the registers.
    inner = tl.arange(0, TILE_DEPTH)
    hidden += (row_tile * ROWS).to(tl.int64) * hidden_stride
    weight += first_column.to(tl.int64) * weight_stride
    # Rows past the end repeat the last one, so that loading them needs no mask.
    tile_row = tl.minimum(rows, n - 1) - row_tile * ROWS
    x_at = tile_row[:, None] * hidden_stride + inner[None, :]
    w_at = tile_column[None, :] * weight_stride + inner[:, None]
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, depth, TILE_DEPTH):
        if DEPTH_EVEN:
            x = tl.load(hidden + x_at)
        else:
            x = tl.load(hidden + x_at, mask=inner[None, :] < depth - start, other=0.0)
        if DEPTH_EVEN and COLUMNS_EVEN:
            w = tl.load(weight + w_at)
        else:
            w_mask = column_mask[None, :] & (inner[:, None] < depth - start)
            w = tl.load(weight + w_at, mask=w_mask, other=0.0)
        product = tl.dot(x, w, product, input_precision="ieee")
        hidden += TILE_DEPTH
        weight += TILE_DEPTH
    if bias is not None:
        product += tl.load(bias + first_column + tile_column, mask=column_mask, other=0.0).to(
            tl.float32
        )[None, :]

    a, b = tl.split(tl.reshape(product, (ROWS, TILE_HEADS, PAIRS, 2)))
    heads = first_head + tl.arange(0, TILE_HEADS)
    slot = tl.load(slots + rows, mask=row_mask, other=0)
    if is_key:
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
                False,
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
        key_limit: tl.constexpr = None if DEFER_KEY else LIMIT
        store_pairs(
            pool_k,
            rows if DEFER_KEY else slot,
            heads,
            as_stored(a, k_scale, key_limit, key_type),
            as_stored(b, k_scale, key_limit, key_type),
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
