"""What K and V of one layer are made of: the contract of every ``project_kv`` implementation.

k, v   = hidden @ weight.T + bias          split at kv_heads * head_dim
k      = norm(k)                           per head, or over all heads
k      = rotary(k, positions)
pool.k[slots], pool.v[slots] = k, v        divided by the pool's scales when it is fp8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


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
class KVProjection:
    """How one layer makes K and V from its hidden states (paper section 3.1).

    Attributes:
        weight: ``[2 * kv_heads * head_dim, hidden]``: rows of K, then rows of V; last stride 1.
        bias: ``[2 * kv_heads * head_dim]`` or None.
        kv_heads: Heads of K and of V on this rank.
        head_dim: Dimensions of a head, the same for K and V.
        norm: Normalisation of K, or None.
        rotary: RoPE of K, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    kv_heads: int
    head_dim: int
    norm: KeyNorm | None = None
    rotary: Rotary | None = None


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
