"""``project_kv`` in torch: what the kernels are compared with, and what serves on the CPU."""

import torch
from torch.nn import functional as F

from .spec import FP8_TYPES, KeyNorm, KVProjection, ProjectionCall, Rotary, Rounding


def project_kv_reference(call: ProjectionCall) -> None:
    """Like :func:`hcache_kernels.project_kv.project_kv`, on any device, arguments unchecked."""
    k, v = compute_kv_reference(call.hidden, call.positions, call.projection)
    _store(call.pool.k, call.slots, k, call.pool.k_scale)
    _store(call.pool.v, call.slots, v, call.pool.v_scale)


def compute_kv_reference(
    hidden: torch.Tensor, positions: torch.Tensor, projection: KVProjection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like :func:`hcache_kernels.project_kv.compute_kv`, on any device, arguments unchecked."""
    heads, dim = projection.kv_heads, projection.head_dim
    kv = F.linear(hidden, projection.weight, projection.bias)
    k, v = kv.view(len(hidden), 2, heads, dim).unbind(1)
    return finish_keys(k, positions, projection.norm, projection.rotary, projection.rounding), v


def finish_keys(
    k: torch.Tensor,
    positions: torch.Tensor,
    norm: KeyNorm | None,
    rotary: Rotary | None,
    rounding: Rounding,
) -> torch.Tensor:
    """Norm and RoPE of K ``[n, kv_heads, head_dim]`` that some linear module has made, unchecked.
    Positions are integers ``[n]``; the result is like ``k``."""
    model, finished = k.dtype, k.float()
    if norm is not None:
        finished = _normalise(finished, norm, model, rounding)
    if rotary is not None:
        finished = _rotate(finished, positions, rotary, model, rounding)
    return finished.to(model)


def _rounded(x: torch.Tensor, model: torch.dtype, really: bool) -> torch.Tensor:
    return x.to(model).float() if really else x


def _normalise(
    k: torch.Tensor, norm: KeyNorm, model: torch.dtype, rounding: Rounding
) -> torch.Tensor:
    """Normalise float32 ``[n, kv_heads, head_dim]``."""
    over = (-1,) if norm.over == "head" else (-2, -1)
    if norm.kind == "layer":
        k = k - k.mean(over, keepdim=True)
    k = k * torch.rsqrt(k.square().mean(over, keepdim=True) + norm.epsilon)
    k = _rounded(k, model, rounding.normed)
    if norm.weight is not None:
        k = k * _by_head(norm.weight, k)
    if norm.bias is not None:
        k = k + _by_head(norm.bias, k)
    return _rounded(k, model, rounding.norm)


def _by_head(parameter: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A norm's parameter as ``[1 or kv_heads, head_dim]``."""
    return parameter.float().view(-1, k.shape[-1])


def _rotate(
    k: torch.Tensor, positions: torch.Tensor, rotary: Rotary, model: torch.dtype, rounding: Rounding
) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` dimensions of float32 ``[n, kv_heads, head_dim]``."""
    table = _rounded(rotary.cos_sin[positions].float(), model, rounding.table)
    cos, sin = table.unsqueeze(1).chunk(2, -1)
    turned, rest = k[..., : rotary.rotary_dim], k[..., rotary.rotary_dim :]
    neox = rotary.style == "neox"
    a, b = turned.chunk(2, -1) if neox else (turned[..., 0::2], turned[..., 1::2])
    a_cos, b_cos = (_rounded(part * cos, model, rounding.cos_products) for part in (a, b))
    a_sin, b_sin = (_rounded(part * sin, model, rounding.sin_products) for part in (a, b))
    pair = (a_cos - b_sin, b_cos + a_sin)
    turned = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned, rest), -1)


def _store(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    """Write rows, K or V of tokens, to slots of the pool: for fp8 divided by ``scale`` before."""
    if pool.dtype in FP8_TYPES:
        limit = torch.finfo(pool.dtype).max
        rows = (rows / scale).float().clamp(-limit, limit).to(pool.dtype)
        # torch cannot scatter fp8, but the bytes are the same.
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool[slots.long()] = rows.to(pool.dtype)
