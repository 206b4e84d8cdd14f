"""What K and V of one layer are made of: the contract of every ``project_kv`` implementation.

k, v   = hidden @ weight.T + bias          split at kv_heads * head_dim
k      = norm(k)                           per head, or over all heads
k      = rotary(k, positions)
pool.k[slots], pool.v[slots] = k, v        divided by the pool's scales when it is fp8

The arithmetic is float32. The product with its bias, the finished K and the quotients by an fp8
pool's scales are rounded to the model's type; :class:`Rounding` says what else is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MODEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
INDEX_TYPES = (torch.int32, torch.int64)
HEAD_DIM_LIMIT = 256


@dataclass(frozen=True)
class KeyNorm:
    """Normalisation of K before RoPE.

    Attributes:
        kind: ``rms`` or ``layer`` (mean subtracted).
        over: ``head``: each head by itself (Qwen3). ``all``: over all KV heads at once (OLMo2).
        weight: ``[head_dim]`` for ``head``, ``[kv_heads * head_dim]`` for ``all`` and for norms
            that have other weights in every head; None for ones.
        bias: Like ``weight``; None for zeros.
        epsilon: Added to the mean square before its root.
    """

    kind: Literal["rms", "layer"]
    over: Literal["head", "all"]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float


@dataclass(frozen=True)
class Rotary:
    """RoPE of K.

    Attributes:
        cos_sin: ``[positions, rotary_dim]``: cosines, then sines, ``rotary_dim / 2`` each.
        style: ``neox`` pairs dimension i with i + rotary_dim / 2, ``interleaved`` 2i with 2i + 1.
        rotary_dim: Even; the first dimensions of each head that are rotated.
    """

    cos_sin: torch.Tensor
    style: Literal["neox", "interleaved"]
    rotary_dim: int


@dataclass(frozen=True)
class Rounding:
    """What is rounded to the model's type between the product and the finished K.

    Models differ in it with the kernels that an engine chooses for a device and a head size.

    Attributes:
        normed: The normalised K, before the norm's weight (transformers' RMSNorm).
        norm: The result of the norm. Kernels that do norm and RoPE at once keep it in float32.
        table: Cosines and sines.
        cos_products: The rotation's products with cosines, before they are added.
        sin_products: Those with sines. Torch rounds both products; a multiply-add in the model's
            type rounds one.
    """

    normed: bool = False
    norm: bool = True
    table: bool = False
    cos_products: bool = False
    sin_products: bool = False


@dataclass(frozen=True)
class KVProjection:
    """How one layer makes K and V from its hidden states (paper section 3.1).

    Attributes:
        weight: ``[2 * kv_heads * head_dim, hidden]``: rows of K, then rows of V; last stride 1.
        bias: ``[2 * kv_heads * head_dim]`` or None.
        kv_heads: Heads of K and of V on this rank.
        head_dim: Dimensions of a head, the same for K and V.
        norm: Normalisation of K, or None.
        rotary: RoPE of K, or None.
        rounding: What norm and RoPE round.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    kv_heads: int
    head_dim: int
    norm: KeyNorm | None = None
    rotary: Rotary | None = None
    rounding: Rounding = Rounding()


@dataclass(frozen=True)
class KVPool:
    """Where K and V of one layer go: the engine's paged pool.

    Attributes:
        k: ``[slots, kv_heads, head_dim]``; float32, float16, bfloat16 or an fp8 type.
        v: Same shape and type.
        k_scale: An fp8 pool holds ``k / k_scale``; 1.0 otherwise.
        v_scale: Same for V.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class ProjectionCall:
    """What one ``project_kv`` reads and writes.

    Slots may come in any order; slots that are not named stay untouched. A slot named twice gets
    either row. Values beyond the range of an fp8 pool are stored as its largest.

    Attributes:
        hidden: Input of the QKV projection, ``[n, hidden]``, float32, float16 or bfloat16.
        positions: Positions of the tokens, int32 or int64 ``[n]``.
        slots: Where each token goes, int32 or int64 ``[n]``.
        projection: The layer.
        pool: The layer's pool.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    projection: KVProjection
    pool: KVPool


@dataclass(frozen=True)
class LayerKind:
    """What decides how fast a layer's projection is; layers of a kind share what was measured.

    Attributes:
        hidden: Width of the hidden states.
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
    return LayerKind(
        hidden=projection.weight.shape[1],
        kv_heads=projection.kv_heads,
        head_dim=projection.head_dim,
        dtype=projection.weight.dtype,
        norm=projection.norm.over if projection.norm else "none",
        rotary=projection.rotary.style if projection.rotary else "none",
    )


def check_projection(projection: KVProjection) -> None:
    """Refuse a projection that contradicts itself: a ValueError names field and right value."""
    heads, dim, weight = projection.kv_heads, projection.head_dim, projection.weight
    if heads < 1:
        raise _wrong("kv_heads", heads, "at least 1")
    if not (dim % 8 == 0 and 8 <= dim <= HEAD_DIM_LIMIT):
        raise _wrong("head_dim", dim, f"a multiple of 8, at most {HEAD_DIM_LIMIT}")
    if not (weight.ndim == 2 and weight.shape[0] == 2 * heads * dim):
        raise _wrong(
            "weight",
            tuple(weight.shape),
            f"[{2 * heads * dim}, hidden]: 2 * kv_heads * head_dim rows",
        )
    if weight.dtype not in MODEL_TYPES:
        raise _wrong("weight", weight.dtype, _names(MODEL_TYPES))
    if weight.stride(1) != 1:
        raise _wrong("weight", f"strides {weight.stride()}", "last stride 1")
    if projection.bias is not None:
        _check_vector("bias", projection.bias, (2 * heads * dim,), MODEL_TYPES, weight.device)
    if projection.norm is not None:
        _check_norm(projection.norm, projection)
    if projection.rotary is not None:
        _check_rotary(projection.rotary, projection)


def check_call(call: ProjectionCall) -> None:
    """Refuse arguments that do not fit together. Reads no values, so it never synchronises.

    Raises:
        ValueError: Names the argument, its value and what would be right.
    """
    check_projection(call.projection)
    hidden, pool, weight = call.hidden, call.pool, call.projection.weight
    if not (hidden.ndim == 2 and hidden.shape[1] == weight.shape[1]):
        raise _wrong(
            "hidden", tuple(hidden.shape), f"[n, {weight.shape[1]}], as wide as the weight"
        )
    if hidden.dtype != weight.dtype:
        raise _wrong("hidden", hidden.dtype, f"{weight.dtype}, as the weight")
    if hidden.stride(1) != 1:
        raise _wrong("hidden", f"strides {hidden.stride()}", "last stride 1")
    for name, rows in (("positions", call.positions), ("slots", call.slots)):
        _check_vector(name, rows, (len(hidden),), INDEX_TYPES, weight.device)
    _check_pool(pool, call.projection)
    for name, tensor in (("hidden", hidden), ("pool.k", pool.k), ("pool.v", pool.v)):
        if tensor.device != weight.device:
            raise _wrong(name, tensor.device, f"on {weight.device}")


def check_rows(
    positions: torch.Tensor, slots: torch.Tensor, projection: KVProjection, pool: KVPool
) -> None:
    """Refuse, by a ValueError, positions without a cosine and slots outside the pool.

    It reads the values, so on GPU tensors it waits for the GPU. ``project_kv`` therefore calls it
    itself only for CPU tensors: who restores to a GPU calls it once a restore, on the indices'
    CPU copies, and not once per layer.

    Args:
        positions: Positions of the tokens, integers ``[n]``.
        slots: Slots of the tokens, integers ``[n]``.
        projection: Any layer's; only the length of its cos/sin cache counts.
        pool: Any layer's; only its number of slots counts.
    """
    _check_range("slots", slots, len(pool.k), "the pool's slots")
    if projection.rotary is not None:
        limit = len(projection.rotary.cos_sin)
        _check_range("positions", positions, limit, "the rows of rotary.cos_sin")


def _check_range(name: str, values: torch.Tensor, limit: int, what: str) -> None:
    bad = ((values < 0) | (values >= limit)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"{name}[{row}]: {int(values[row])} is outside 0..{limit - 1}, {what}")


def _check_norm(norm: KeyNorm, projection: KVProjection) -> None:
    width = projection.kv_heads * projection.head_dim
    if norm.kind not in ("rms", "layer"):
        raise _wrong("norm.kind", repr(norm.kind), "'rms' or 'layer'")
    if norm.over not in ("head", "all"):
        raise _wrong("norm.over", repr(norm.over), "'head' or 'all'")
    if not norm.epsilon >= 0:
        raise _wrong("norm.epsilon", norm.epsilon, "at least 0")
    sizes = (width,) if norm.over == "all" else (projection.head_dim, width)
    for name, parameter in (("norm.weight", norm.weight), ("norm.bias", norm.bias)):
        if parameter is not None:
            _check_vector(name, parameter, sizes, MODEL_TYPES, projection.weight.device)


def _check_rotary(rotary: Rotary, projection: KVProjection) -> None:
    dim, cos_sin = rotary.rotary_dim, rotary.cos_sin
    if rotary.style not in ("neox", "interleaved"):
        raise _wrong("rotary.style", repr(rotary.style), "'neox' or 'interleaved'")
    if not (dim % 2 == 0 and 2 <= dim <= projection.head_dim):
        raise _wrong("rotary.rotary_dim", dim, f"even, at most head_dim {projection.head_dim}")
    if not (cos_sin.ndim == 2 and cos_sin.shape[1] == dim):
        raise _wrong(
            "rotary.cos_sin", tuple(cos_sin.shape), f"[positions, {dim}], as wide as rotary_dim"
        )
    _check_storage("rotary.cos_sin", cos_sin, MODEL_TYPES, projection.weight.device)


def _check_pool(pool: KVPool, projection: KVProjection) -> None:
    heads, dim = projection.kv_heads, projection.head_dim
    types = MODEL_TYPES + FP8_TYPES
    for name, tensor in (("pool.k", pool.k), ("pool.v", pool.v)):
        if not (tensor.ndim == 3 and tensor.shape[1:] == (heads, dim)):
            raise _wrong(name, tuple(tensor.shape), f"[slots, {heads}, {dim}]")
        if tensor.dtype not in types:
            raise _wrong(name, tensor.dtype, _names(types))
        if tensor.stride(2) != 1:
            raise _wrong(name, f"strides {tensor.stride()}", "last stride 1")
    if pool.v.shape != pool.k.shape:
        raise _wrong("pool.v", tuple(pool.v.shape), f"{tuple(pool.k.shape)}")
    if pool.v.dtype != pool.k.dtype:
        raise _wrong("pool.v", pool.v.dtype, f"{pool.k.dtype}, as pool.k")
    for name, scale in (("pool.k_scale", pool.k_scale), ("pool.v_scale", pool.v_scale)):
        if not scale > 0:
            raise _wrong(name, scale, "more than 0")
        if pool.k.dtype not in FP8_TYPES and scale != 1.0:
            raise _wrong(name, scale, f"1.0 for a pool of {pool.k.dtype}")


def _check_vector(
    name: str,
    vector: torch.Tensor,
    sizes: tuple[int, ...],
    types: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if not (vector.ndim == 1 and vector.shape[0] in sizes):
        raise _wrong(name, tuple(vector.shape), " or ".join(f"[{size}]" for size in sizes))
    _check_storage(name, vector, types, device)


def _check_storage(
    name: str, tensor: torch.Tensor, types: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tensor.dtype not in types:
        raise _wrong(name, tensor.dtype, _names(types))
    if not tensor.is_contiguous():
        raise _wrong(name, f"strides {tensor.stride()}", "contiguous")
    if tensor.device != device:
        raise _wrong(name, tensor.device, f"on {device}")


def _names(types: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in types)


def _wrong(name: str, value: object, right: str) -> ValueError:
    """What to raise. Made only then: texts for what is right would cost more than the checks."""
    return ValueError(f"{name}: {value} is not {right}")
