"""Layers with random weights that compute as the models' layers do, on one rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    layer_norm,
    linear,
    relu,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from bench.gpu.shapes import LLAMA_7B, LLAMA_13B, OPT_30B, Shape
from hcache_kernels.project_kv import KVProjection, Rotary

PREFILL_CHUNK = 8192
MAX_POSITIONS = 1 << 17


SHAPES = (LLAMA_7B, LLAMA_13B, replace(OPT_30B, name="OPT-30B/TP4", heads=14, mlp=7168, ranks=4))


def chosen(models: Sequence[str], *, dry_run: bool) -> list[Shape]:
    return [shape.tiny() if dry_run else shape for shape in SHAPES if shape.name in models]


class Layer:
    def __init__(
        self, shape: Shape, rotary: Rotary | None, device: str, dtype: torch.dtype
    ) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype) * columns**-0.5

        def vector(size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype) * 0.1

        self.shape = shape
        width, hidden = shape.width, shape.hidden
        self.qkv = weight(3 * width, hidden)
        self.qkv_bias = None if shape.gated else vector(3 * width)
        self.out = weight(hidden, width)
        self.up = weight(2 * shape.mlp if shape.gated else shape.mlp, hidden)
        self.down = weight(hidden, shape.mlp)
        self.norms = [1 + vector(hidden) for _ in range(2)]
        self.rotary = rotary
        bias = None if self.qkv_bias is None else self.qkv_bias[width:]
        self.projection = KVProjection(
            self.qkv[width:], bias, shape.heads, shape.head_dim, None, rotary
        )

    def norm(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """The norm before attention (0) or before the MLP (1)."""
        weight = self.norms[which]
        if self.shape.gated:
            return rms_norm(x, weight.shape, weight, 1e-5)
        return layer_norm(x, weight.shape, weight, None, 1e-5)

    def heads_of(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v ``[n, heads, head_dim]`` of the projection's input ``[n, hidden]``."""
        heads = linear(hidden, self.qkv, self.qkv_bias)
        q, k, v = heads.view(len(hidden), 3, self.shape.heads, -1).unbind(1)
        if self.rotary is not None:
            q, k = (rotate(x, positions, self.rotary.cos_sin) for x in (q, k))
        return q, k, v

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        lengths: Sequence[int],
        watch: Callable[[torch.Tensor], object] = lambda hidden: None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prefill of whole sequences in chunks, as an engine does it.

        Args:
            x: Input of the layer, ``[n, hidden]``, one sequence after the other.
            positions: int64 ``[n]``.
            lengths: Tokens of every sequence.
            watch: Called with the projection's input of every chunk.

        Returns:
            The layer's output, and K and V ``[n, heads, head_dim]``.
        """
        out, ks, vs = torch.empty_like(x), [], []
        start = 0
        for length in lengths:
            k_all = x.new_empty(length, self.shape.heads, self.shape.head_dim)
            v_all = torch.empty_like(k_all)
            for first in range(0, length, PREFILL_CHUNK):
                end = min(first + PREFILL_CHUNK, length)
                rows = slice(start + first, start + end)
                hidden = self.norm(x[rows], 0)
                watch(hidden)
                q, k, v = self.heads_of(hidden, positions[rows])
                k_all[first:end], v_all[first:end] = k, v
                mixed = attention(q, k_all[:end], v_all[:end])
                y = x[rows] + linear(mixed.reshape(end - first, -1), self.out)
                out[rows] = y + self.mlp(self.norm(y, 1))
            ks.append(k_all)
            vs.append(v_all)
            start += length
        return out, torch.cat(ks), torch.cat(vs)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        up = linear(x, self.up)
        if not self.shape.gated:
            return linear(relu(up), self.down)
        gate, up = up.chunk(2, -1)
        return linear(silu(gate) * up, self.down)

    def decode(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        watch: Callable[[torch.Tensor], object],
    ) -> torch.Tensor:
        """One decode step of ``n`` requests, whose inputs of the layer are ``[n, hidden]``.

        Args:
            positions: int64 ``[n]``.
            cache: K and V so far, ``[2, n, heads, context, head_dim]``; the last place is this
                token's.
            watch: Called with the projection's input.
        """
        hidden = self.norm(x, 0)
        watch(hidden)
        q, k, v = self.heads_of(hidden, positions)
        cache[0, :, :, -1], cache[1, :, :, -1] = k, v
        mixed = scaled_dot_product_attention(q[:, :, None], cache[0], cache[1])
        y = x + linear(mixed.reshape(len(x), -1), self.out)
        return y + self.mlp(self.norm(y, 1))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last ``len(q)`` of ``len(k)`` tokens, ``[n, heads, dim]``."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    kernels = [SDPBackend.FLASH_ATTENTION] if q.is_cuda else [SDPBackend.MATH]
    with sdpa_kernel(kernels):
        if q.shape == k.shape:
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # the import costs seconds: it brings torch's compiler
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(q.shape[2], k.shape[2])
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return mixed[0].transpose(0, 1)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """RoPE of ``[n, heads, dim]``, first half paired with second."""
    cos, sin = cos_sin[positions].to(x.dtype)[:, None].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotary_of(head_dim: int, positions: int, device: str) -> Rotary:
    exponents = torch.arange(0, head_dim, 2, device=device) / head_dim
    angles = torch.outer(torch.arange(positions, device=device), 1e4**-exponents)
    return Rotary(torch.cat((angles.cos(), angles.sin()), -1), "neox", head_dim)


def build(shape: Shape, device: str, dtype: torch.dtype) -> list[Layer]:
    """All layers of the model, each with its own weights."""
    rotary = rotary_of(shape.head_dim, MAX_POSITIONS, device) if shape.gated else None
    return [Layer(shape, rotary, device, dtype) for _ in range(shape.layers)]
