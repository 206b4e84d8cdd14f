"""The kernel of ``project_kv``: makes, or reads, the product; then norm, RoPE and scatter.

A tile of K or V is two float32 tensors ``[rows, heads, pairs]``: the two members of every pair of
dimensions that RoPE turns together, so that turning moves nothing between threads. Dimensions that
are not turned are paired too, any way that covers them.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])  # else it is compiled again in a restore
def project_kv_kernel(
    source,  # hidden states [n, depth]; without weight the finished product [n, PARTS * ...]
    weight,  # [2 * KV_HEADS * HEAD_DIM, depth], or None
    bias,  # [2 * KV_HEADS * HEAD_DIM], or None
    positions,  # int [n]
    slots,  # int [n]
    n,
    depth,
    source_stride,
    weight_stride,
    pool_k,  # [slots, KV_HEADS, HEAD_DIM]
    pool_v,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    k_scale,  # an fp8 pool holds K / k_scale
    v_scale,
    norm_weight,  # of K, or None
    norm_bias,
    norm_weight_head_stride,  # 0: all heads have the same weights
    norm_bias_head_stride,
    epsilon,
    cos_sin,  # [positions, ROTARY_DIM]
    K_LIMIT: tl.constexpr,  # largest value of an fp8 pool; None for other types
    V_LIMIT: tl.constexpr,
    NORM: tl.constexpr,  # kind of the norm of K: "rms", "layer" or None
    OVER_ALL: tl.constexpr,  # the norm is over all heads together, not over each
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # of dimensions of a head, up to a power of two
    ROTARY_DIM: tl.constexpr,  # 0: no RoPE
    INTERLEAVED: tl.constexpr,  # RoPE turns dimensions 2i and 2i + 1; otherwise halves
    ROUNDING: tl.constexpr,  # Rounding
    KEYS_BY_ROW: tl.constexpr,  # K of token i goes to row i of pool_k, not to its slot
    PARTS: tl.constexpr,  # 1: only K
    TILE: tl.constexpr,  # TileConfig
    DEPTH_EVEN: tl.constexpr,  # depth is a multiple of TILE.depth
    COLUMNS_EVEN: tl.constexpr,  # tiles have no padding
):
    """One program: a tile of tokens and heads of K, or of V."""
    ROWS: tl.constexpr = TILE.rows
    TILE_HEADS: tl.constexpr = TILE.heads
    MODEL: tl.constexpr = source.dtype.element_ty
    HEAD_TILES: tl.constexpr = (KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    # Programs that run at the same time share rows and weights, which then come from L2.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(n, ROWS)
    group = program // (TILE.group * PARTS * HEAD_TILES)
    group_rows = tl.minimum(row_tiles - group * TILE.group, TILE.group)
    within = program % (TILE.group * PARTS * HEAD_TILES)
    row_tile = group * TILE.group + within % group_rows
    head_tile = within // group_rows
    is_key = head_tile < HEAD_TILES
    first_head = (head_tile % HEAD_TILES) * TILE_HEADS
    first_column = tl.where(is_key, first_head, KV_HEADS + first_head) * HEAD_DIM

    rows = row_tile * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n
    heads = first_head + tl.arange(0, TILE_HEADS)
    pair = tl.arange(0, PAIRS)
    first, second = _pair_dims(pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    head_mask = heads < KV_HEADS
    mask = row_mask[:, None, None] & head_mask[None, :, None]
    if weight is None:
        head_at = source + (rows.to(tl.int64) * source_stride + first_column)[:, None, None]
        head_at = head_at + (tl.arange(0, TILE_HEADS) * HEAD_DIM)[None, :, None]
        a, b = _load_pairs(head_at, mask, first, second, HEAD_DIM, PAIRS, INTERLEAVED)
    else:
        # A row of the weight is read wherever it lies, so columns come in the order that puts the
        # two members of a pair side by side: one thread's accumulators hold both, on every
        # architecture.
        column = tl.arange(0, TILE_HEADS * 2 * PAIRS)
        tile_head = column // (2 * PAIRS)
        column_pair = column % (2 * PAIRS) // 2
        even, odd = _pair_dims(column_pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        tile_column = tile_head * HEAD_DIM + tl.where(column % 2 == 0, even, odd)
        column_mask = (first_head + tile_head < KV_HEADS) & (column_pair < HEAD_DIM // 2)

        # 64-bit addresses of the tile's corner, 32-bit offsets in it: half the registers.
        inner = tl.arange(0, TILE.depth)
        source += (row_tile * ROWS).to(tl.int64) * source_stride
        weight += first_column.to(tl.int64) * weight_stride
        # Rows past the end repeat the last one, so that loading them needs no mask.
        tile_row = tl.minimum(rows, n - 1) - row_tile * ROWS
        x_at = tile_row[:, None] * source_stride + inner[None, :]
        w_at = tile_column[None, :] * weight_stride + inner[:, None]
        product = tl.zeros((ROWS, TILE_HEADS * 2 * PAIRS), dtype=tl.float32)
        for start in tl.range(0, depth, TILE.depth):
            if DEPTH_EVEN:
                x = tl.load(source + x_at)
            else:
                x = tl.load(source + x_at, mask=inner[None, :] < depth - start, other=0.0)
            if DEPTH_EVEN and COLUMNS_EVEN:
                w = tl.load(weight + w_at)
            else:
                w_mask = column_mask[None, :] & (inner[:, None] < depth - start)
                w = tl.load(weight + w_at, mask=w_mask, other=0.0)
            product = tl.dot(x, w, product, input_precision="ieee")
            source += TILE.depth
            weight += TILE.depth
        if bias is not None:
            added = tl.load(bias + first_column + tile_column, mask=column_mask, other=0.0)
            product += added.to(tl.float32)[None, :]
        product = _rounded(product, MODEL, True)
        a, b = tl.split(tl.reshape(product, (ROWS, TILE_HEADS, PAIRS, 2)))

    slot = tl.load(slots + rows, mask=row_mask, other=0)
    if is_key:
        if NORM is not None:
            SIZE: tl.constexpr = KV_HEADS * HEAD_DIM if OVER_ALL else HEAD_DIM
            real = head_mask[:, None] & (pair < HEAD_DIM // 2)[None, :]
            a, b = _normalise(a, b, real, epsilon, NORM, OVER_ALL, SIZE)
            a, b = _rounded(a, MODEL, ROUNDING.normed), _rounded(b, MODEL, ROUNDING.normed)
            if norm_weight is not None:
                weight_at = norm_weight + heads[:, None] * norm_weight_head_stride
                a = a * _parameter(weight_at + first[None, :], real)
                b = b * _parameter(weight_at + second[None, :], real)
            if norm_bias is not None:
                bias_at = norm_bias + heads[:, None] * norm_bias_head_stride
                a = a + _parameter(bias_at + first[None, :], real)
                b = b + _parameter(bias_at + second[None, :], real)
            a, b = _rounded(a, MODEL, ROUNDING.norm), _rounded(b, MODEL, ROUNDING.norm)
        if ROTARY_DIM > 0:
            position = tl.load(positions + rows, mask=row_mask, other=0)
            cos, sin = _cos_sin(cos_sin, position, row_mask, PAIRS, ROTARY_DIM)
            cos, sin = _rounded(cos, MODEL, ROUNDING.table), _rounded(sin, MODEL, ROUNDING.table)
            a_cos = _rounded(a * cos, MODEL, ROUNDING.cos_products)
            b_cos = _rounded(b * cos, MODEL, ROUNDING.cos_products)
            a_sin = _rounded(a * sin, MODEL, ROUNDING.sin_products)
            b_sin = _rounded(b * sin, MODEL, ROUNDING.sin_products)
            a, b = a_cos - b_sin, b_cos + a_sin
        key_row = rows if KEYS_BY_ROW else slot
        k_at = pool_k + (key_row.to(tl.int64) * k_slot_stride)[:, None, None]
        k_at = k_at + (heads * k_head_stride)[None, :, None]
        k_a = _as_stored(a, k_scale, K_LIMIT, MODEL, pool_k.dtype.element_ty)
        k_b = _as_stored(b, k_scale, K_LIMIT, MODEL, pool_k.dtype.element_ty)
        _store_pairs(k_at, mask, k_a, k_b, first, second, HEAD_DIM, PAIRS, INTERLEAVED)
    else:
        v_at = pool_v + (slot.to(tl.int64) * v_slot_stride)[:, None, None]
        v_at = v_at + (heads * v_head_stride)[None, :, None]
        v_a = _as_stored(a, v_scale, V_LIMIT, MODEL, pool_v.dtype.element_ty)
        v_b = _as_stored(b, v_scale, V_LIMIT, MODEL, pool_v.dtype.element_ty)
        _store_pairs(v_at, mask, v_a, v_b, first, second, HEAD_DIM, PAIRS, INTERLEAVED)


@triton.jit
def _pair_dims(pair, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
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
def _normalise(a, b, real, epsilon, KIND: tl.constexpr, OVER_ALL: tl.constexpr, SIZE: tl.constexpr):
    """Normalise K, as pairs ``a`` and ``b``, over each head, or over all heads, which the tile then
    holds: ``SIZE`` values. What is not ``real`` (``[heads, pairs]``) is padding, and stays zero."""
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
    return a * scale, b * scale


@triton.jit
def _parameter(at, real):
    """A norm's weight or bias for every head and pair of a tile."""
    return tl.load(at, mask=real, other=0.0).to(tl.float32)[None, :, :]


@triton.jit
def _rounded(x, MODEL: tl.constexpr, REALLY: tl.constexpr):
    """Float32 numbers, as the model's type holds them if ``REALLY``."""
    return x.to(MODEL).to(tl.float32) if REALLY else x


@triton.jit
def _cos_sin(cos_sin, positions, row_mask, PAIRS: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Cosine and sine of each row's angles, ``[rows, 1, pairs]``; 1 and 0 for pairs not turned."""
    pair = tl.arange(0, PAIRS)[None, :]
    mask = row_mask[:, None] & (pair < ROTARY_DIM // 2)
    at = cos_sin + positions.to(tl.int64)[:, None] * ROTARY_DIM + pair
    cos = tl.load(at, mask=mask, other=1.0).to(tl.float32)[:, None, :]
    sin = tl.load(at + ROTARY_DIM // 2, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    return cos, sin


@triton.jit
def _as_stored(x, scale, LIMIT: tl.constexpr, MODEL: tl.constexpr, dtype: tl.constexpr):
    """Float32 values as the pool keeps them. ``LIMIT``: an fp8 type's largest value, else None."""
    x = _rounded(x, MODEL, True)
    if LIMIT is not None:
        x = _rounded(x / scale, MODEL, True)
        # Comparisons, not minimum and maximum: those would turn NaN into a number.
        x = tl.where(x > LIMIT, LIMIT, x)
        x = tl.where(x < -LIMIT, -LIMIT, x)
    return x.to(dtype)


@triton.jit
def _load_pairs(
    at, mask, first, second, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Read a tile of heads that begin at ``at``, ``[rows, heads, 1]``, where ``mask`` allows."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAIRS)[None, None, :]
        both = tl.load(at + dim, mask=mask & (dim < HEAD_DIM), other=0.0)
        a, b = tl.split(tl.reshape(both, (at.shape[0], at.shape[1], PAIRS, 2)))
    else:
        mask = mask & (tl.arange(0, PAIRS) < HEAD_DIM // 2)[None, None, :]
        a = tl.load(at + first[None, None, :], mask=mask, other=0.0)
        b = tl.load(at + second[None, None, :], mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(
    at,
    mask,
    a,
    b,
    first,
    second,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write a tile, already in the pool's type, to heads that begin at ``at``."""
    if INTERLEAVED:
        # Whole heads at once: every second element alone would touch each sector twice.
        dim = tl.arange(0, 2 * PAIRS)[None, None, :]
        tl.store(at + dim, tl.interleave(a, b), mask=mask & (dim < HEAD_DIM))
    else:
        mask = mask & (tl.arange(0, PAIRS) < HEAD_DIM // 2)[None, None, :]
        tl.store(at + first[None, None, :], a, mask=mask)
        tl.store(at + second[None, None, :], b, mask=mask)
