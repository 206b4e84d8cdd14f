"""What both kernels do to a tile of K or V once the product is there: norm, RoPE, scatter.

A tile is two float32 tensors ``[rows, heads, pairs]``: the two members of every pair of dimensions
that RoPE turns together, so that turning moves nothing between threads. Dimensions that are not
turned are paired too, any way that covers them.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_dims(pair, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dimensions of a pair; pairs below ``ROTARY_DIM / 2`` are turned."""
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    elif ROTARY_DIM % HEAD_DIM == 0:  # none or all of it
        first = pair
        second = pair + HEAD_DIM // 2
    else:
        turned = pair < ROTARY_DIM // 2
        first = tl.where(turned, pair, pair + ROTARY_DIM // 2)
        second = tl.where(turned, pair + ROTARY_DIM // 2, pair + HEAD_DIM // 2)
    return first, second


@triton.jit
def normalise(
    a,
    b,
    heads,
    weight,
    bias,
    weight_head_stride,
    bias_head_stride,
    epsilon,
    KIND: tl.constexpr,
    OVER_ALL: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Normalise over each head, or over all heads, which the tile then holds. Padding is zero."""
    pair = tl.arange(0, PAIRS)
    first, second = pair_dims(pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    real = (heads < KV_HEADS)[:, None] & (pair < HEAD_DIM // 2)[None, :]
    SIZE: tl.constexpr = KV_HEADS * HEAD_DIM if OVER_ALL else HEAD_DIM
    if KIND == "layer":
        mean = tl.sum(a + b, axis=2, keep_dims=True)
        if OVER_ALL:
            mean = tl.sum(mean, axis=1, keep_dims=True)
        mean = mean / SIZE
        a = tl.where(real[None, :, :], a - mean, 0.0)
        b = tl.where(real[None, :, :], b - mean, 0.0)
    square = tl.sum(a * a + b * b, axis=2, keep_dims=True)
    if OVER_ALL:
        square = tl.sum(square, axis=1, keep_dims=True)
    scale = tl.rsqrt(square / SIZE + epsilon)
    a = a * scale
    b = b * scale
    if weight is not None:
        at = weight + heads[:, None] * weight_head_stride
        a = a * tl.load(at + first[None, :], mask=real, other=0.0).to(tl.float32)[None, :, :]
        b = b * tl.load(at + second[None, :], mask=real, other=0.0).to(tl.float32)[None, :, :]
    if bias is not None:
        at = bias + heads[:, None] * bias_head_stride
        a = a + tl.load(at + first[None, :], mask=real, other=0.0).to(tl.float32)[None, :, :]
        b = b + tl.load(at + second[None, :], mask=real, other=0.0).to(tl.float32)[None, :, :]
    return a, b


@triton.jit
def rotate(a, b, positions, row_mask, cos_sin, PAIRS: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Turn the pairs by their row's angle; pairs from ``ROTARY_DIM / 2`` on keep theirs."""
    pair = tl.arange(0, PAIRS)[None, :]
    mask = row_mask[:, None] & (pair < ROTARY_DIM // 2)
    at = cos_sin + positions.to(tl.int64)[:, None] * ROTARY_DIM + pair
    cos = tl.load(at, mask=mask, other=1.0).to(tl.float32)[:, None, :]
    sin = tl.load(at + ROTARY_DIM // 2, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def as_stored(x, scale, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Float32 values as the pool keeps them. ``LIMIT``: an fp8 type's largest value, else None."""
    if LIMIT is not None:
        x = x / scale
        # Comparisons, not minimum and maximum: those would turn NaN into a number.
        x = tl.where(x > LIMIT, LIMIT, x)
        x = tl.where(x < -LIMIT, -LIMIT, x)
    return x.to(dtype)


@triton.jit
def store_pairs(
    out,
    slots,
    heads,
    a,
    b,
    row_mask,
    slot_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write a tile, already in the pool's type, to its slots."""
    at = out + (slots.to(tl.int64) * slot_stride)[:, None, None]
    at = at + (heads * head_stride)[None, :, None]
    mask = row_mask[:, None, None] & (heads < KV_HEADS)[None, :, None]
    if INTERLEAVED:
        # Whole heads at once: every second element alone would touch each sector twice.
        dim = tl.arange(0, 2 * PAIRS)
        both = tl.interleave(a, b)
        tl.store(at + dim[None, None, :], both, mask=mask & (dim < HEAD_DIM)[None, None, :])
    else:
        pair = tl.arange(0, PAIRS)
        first, second = pair_dims(pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        mask = mask & (pair < HEAD_DIM // 2)[None, None, :]
        tl.store(at + first[None, None, :], a, mask=mask)
        tl.store(at + second[None, None, :], b, mask=mask)
