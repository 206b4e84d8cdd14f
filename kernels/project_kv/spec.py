"""What K and V of one layer are made of: the contract of every ``project_kv`` implementation.

k, v   = hidden @ weight.T + bias          split at kv_heads * head_dim
k      = norm(k)                           per head, or over all heads
k      = rotary(k, positions)
pool.k[slots], pool.v[slots] = k, v        divided by the pool's scales when it is fp8

The arithmetic is float32. The product with its bias, the finished K and the quotients by an fp8
pool's scales are rounded to the model's type; :class:`Rounding` says what else is.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..checks import INDEX_TYPES, check_range, check_tensor, wrong

MODEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIM_LIMIT = 256


@dataclass(frozen=True)
class KeyNorm:
    kind: Literal["rms", "layer"]  # layer: the mean is subtracted
    over: Literal["head", "all"]  # each head by itself (Qwen3), or all KV heads at once (OLMo2)
    # [head_dim], or [kv_heads * head_dim] for "all" and if every head has other weights; None: ones
    weight: torch.Tensor | None
    bias: torch.Tensor | None  # as the weight; None: zeros
    epsilon: float  # added to the mean square before its root


@dataclass(frozen=True)
class Rotary:
    cos_sin: torch.Tensor  # [positions, rotary_dim]: cosines, then sines, rotary_dim / 2 each
    style: Literal["neox", "interleaved"]  # pairs dimension i with i + rotary_dim / 2; 2i, 2i + 1
    rotary_dim: int  # even: the first dimensions of each head that are rotated


@dataclass(frozen=True)
class Rounding:
    """What is rounded to the model's type between the product and the finished K. Models differ in
    it with the kernels that an engine chooses for a device and a head size. Torch rounds both
    products of the rotation; a multiply-add in the model's type rounds one."""

    normed: bool = False  # the normalised K, before the norm's weight (transformers' RMSNorm)
    norm: bool = True  # the result of the norm; kernels for norm and RoPE at once keep float32
    table: bool = False  # cosines and sines
    cos_products: bool = False  # products with cosines, before they are added
    sin_products: bool = False


@dataclass(frozen=True)
class KVProjection:
    """How one layer makes K and V from its hidden states (paper section 3.1)."""

    weight: torch.Tensor  # [2 * kv_heads * head_dim, hidden]: K, then V; last stride 1
    bias: torch.Tensor | None  # [2 * kv_heads * head_dim]
    kv_heads: int  # of K and of V, on this rank
    head_dim: int
    norm: KeyNorm | None = None
    rotary: Rotary | None = None
    rounding: Rounding = Rounding()


@dataclass(frozen=True)
class KVPool:
    """Where K and V of one layer go: the engine's paged pool. Both are ``[slots, kv_heads,
    head_dim]`` in float32, float16, bfloat16 or an fp8 type."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0  # an fp8 pool holds k / k_scale; 1.0 for other types
    v_scale: float = 1.0


@dataclass(frozen=True)
class ProjectionCall:
    """What one ``project_kv`` reads and writes. Slots may come in any order; slots that are not
    named stay untouched. A slot named twice gets either row. Values beyond the range of an fp8 pool
    are stored as its largest."""

    hidden: torch.Tensor  # input of the QKV projection, [n, hidden], float32, float16 or bfloat16
    positions: torch.Tensor  # of the tokens, int32 or int64 [n]
    slots: torch.Tensor  # where each token goes, int32 or int64 [n]
    projection: KVProjection
    pool: KVPool


@dataclass(frozen=True)
class LayerKind:
    """What decides how fast a layer's projection is; layers of a kind share what was measured."""

    hidden: int  # width
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    norm: str  # what the norm of K goes over: none, head or all
    rotary: str  # style of RoPE: none, neox or interleaved


def kind_of(projection: KVProjection) -> LayerKind:
    norm = projection.norm.over if projection.norm else "none"
    rotary = projection.rotary.style if projection.rotary else "none"
    hidden, dtype = projection.weight.shape[1], projection.weight.dtype
    return LayerKind(hidden, projection.kv_heads, projection.head_dim, dtype, norm, rotary)


def check_projection(projection: KVProjection) -> None:
    """Refuse a projection that contradicts itself: a ValueError names field and right value."""
    heads, dim, weight = projection.kv_heads, projection.head_dim, projection.weight
    norm, rotary, width = projection.norm, projection.rotary, heads * dim
    if heads < 1:
        raise wrong("kv_heads", heads, "at least 1")
    if not (dim % 8 == 0 and 8 <= dim <= HEAD_DIM_LIMIT):
        raise wrong("head_dim", dim, f"a multiple of 8, at most {HEAD_DIM_LIMIT}")
    check_tensor("weight", weight, MODEL_TYPES, (2 * width, "hidden"), whole=False)
    if projection.bias is not None:
        check_tensor("bias", projection.bias, MODEL_TYPES, (2 * width,), weight.device)
    if norm is not None:
        if not norm.epsilon >= 0:
            raise wrong("norm.epsilon", norm.epsilon, "at least 0")
        sizes = width if norm.over == "all" else (dim, width)
        for name, parameter in (("norm.weight", norm.weight), ("norm.bias", norm.bias)):
            if parameter is not None:
                check_tensor(name, parameter, MODEL_TYPES, (sizes,), weight.device)
    if rotary is not None:
        turned = rotary.rotary_dim
        if not (turned % 2 == 0 and 2 <= turned <= dim):
            raise wrong("rotary.rotary_dim", turned, f"even, at most head_dim {dim}")
        shape = ("positions", turned)
        check_tensor("rotary.cos_sin", rotary.cos_sin, MODEL_TYPES, shape, weight.device)


def check_call(call: ProjectionCall) -> None:
    """Refuse arguments that do not fit together, by a ValueError. Reads no values."""
    check_projection(call.projection)
    projection, hidden, pool = call.projection, call.hidden, call.pool
    weight, (n, device) = projection.weight, (len(hidden), projection.weight.device)
    check_tensor("hidden", hidden, (weight.dtype,), ("n", weight.shape[1]), device, whole=False)
    for name, rows in (("positions", call.positions), ("slots", call.slots)):
        check_tensor(name, rows, INDEX_TYPES, (n,), device)
    shape = ("slots", projection.kv_heads, projection.head_dim)
    check_tensor("pool.k", pool.k, MODEL_TYPES + FP8_TYPES, shape, device, whole=False)
    check_tensor("pool.v", pool.v, (pool.k.dtype,), tuple(pool.k.shape), device, whole=False)
    for name, scale in (("pool.k_scale", pool.k_scale), ("pool.v_scale", pool.v_scale)):
        if not scale > 0:
            raise wrong(name, scale, "more than 0")
        if pool.k.dtype not in FP8_TYPES and scale != 1.0:
            raise wrong(name, scale, f"1.0 for a pool of {pool.k.dtype}")


def check_rows(call: ProjectionCall) -> None:
    """Refuse, by a ValueError, positions without a cosine and slots outside the pool. It reads the
    values, so on GPU tensors it waits for the GPU: ``project_kv`` calls it for CPU tensors only."""
    check_range("slots", call.slots, len(call.pool.k), "the pool's slots")
    if (rotary := call.projection.rotary) is not None:
        limit = len(rotary.cos_sin)
        check_range("positions", call.positions, limit, "the rows of rotary.cos_sin")
