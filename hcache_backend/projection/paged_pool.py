"""SGLang's KV pool for projections, recomputation and their checks."""

from __future__ import annotations

from typing import Any

import torch

from hcache_backend.projection.attention import KV, AttentionLayer
from hcache_kernels.project_kv import KVPool

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def full_attention(kvcache: Any) -> Any:
    """The pool of the layers that attend to all tokens: ``kvcache`` itself, or a part of it in
    hybrid models, whose other layers keep sliding windows or recurrent states."""
    return getattr(kvcache, "full_kv_pool", kvcache)


def holds_latents(kvcache: object) -> bool:
    """True for SGLang's pool of MLA: one latent per token and layer in the place of K and V, the
    same on every tensor-parallel rank."""
    return hasattr(kvcache, "kv_lora_rank")


def planes_of(kvcache: Any, layer: int) -> tuple[torch.Tensor, ...]:
    """What SGLang's pool keeps of a layer, ``[slots, heads, dim]`` each: K and V, or a latent."""
    if holds_latents(kvcache):
        return (kvcache.kv_buffer[layer],)
    return kvcache.k_buffer[layer], kvcache.v_buffer[layer]


def index_keys_of(kvcache: object, layer: int) -> torch.Tensor | None:
    """The indexer's keys of a layer with sparse attention (DSA), uint8 ``[pages, bytes]``, with
    their scales; None: the layer chooses no tokens of its own."""
    pools = getattr(kvcache, "index_k_with_scale_buffer", None)
    return pools[layer] if pools and len(pools[layer]) else None


class PagedPool:
    """Reads and writes K and V of slots in an ``MHATokenToKVPool``, with the scales of a layer;
    reads latents in an ``MLATokenToKVPool`` (``latent``). ``kernel`` is SGLang's attention object
    of the layer; ``dtype`` is the stored type."""

    def __init__(self, kvcache: Any) -> None:
        self._kvcache = kvcache
        self.dtype: torch.dtype = kvcache.dtype
        self.latent = holds_latents(kvcache)

    def of_layer(self, layer: AttentionLayer) -> KVPool | None:
        """The pool of one layer for the kernels, or None if they cannot apply its scales."""
        pool = self._kvcache
        k, v = (buffers[layer.index].view(pool.dtype) for buffers in (pool.k_buffer, pool.v_buffer))
        k_scale, v_scale = (_scale(layer.kernel, name) for name in "kv")
        if k_scale is None or v_scale is None:
            return None
        plain = k_scale == v_scale == 1.0
        return KVPool(k, v, k_scale, v_scale) if plain or pool.dtype in _FP8 else None

    def store(self, kernel: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V ``[n, kv_heads, head_dim]`` to ``slots``."""
        self._kvcache.set_kv_buffer(kernel, slots, k, v, kernel.k_scale, kernel.v_scale)

    def fetch(self, kernel: Any, slots: torch.Tensor, dtype: torch.dtype) -> KV:
        """K and V in ``slots``, ``[n, kv_heads, head_dim]`` each, in the model's type ``dtype``; of
        MLA the parts of the latents without and with RoPE. ``kernel``: the layer's attention."""
        index = kernel.layer_id - self._kvcache.start_layer
        if self.latent:
            rows = self._kvcache.kv_buffer[index][slots].view(self.dtype).to(dtype)
            return rows.tensor_split([self._kvcache.kv_lora_rank], 2)
        k, v = self._kvcache.k_buffer[index], self._kvcache.v_buffer[index]
        return self._rows(kernel, "k", k[slots], dtype), self._rows(kernel, "v", v[slots], dtype)

    def fetch_keys(
        self, kernel: Any, slots: torch.Tensor, dtype: torch.dtype, heads: slice
    ) -> torch.Tensor:
        """K of :meth:`fetch` in some heads; nothing else is read."""
        k = self._kvcache.k_buffer[kernel.layer_id - self._kvcache.start_layer]
        return self._rows(kernel, "k", k[:, heads][slots], dtype)

    def _rows(self, kernel: Any, name: str, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Stored ``rows`` of ``k`` or ``v`` (``name``) in the model's type, times their scale."""
        rows = rows.view(self._kvcache.dtype).to(dtype)
        # As in set_kv_buffer, which divides by the scales only where types differ.
        return rows if self._kvcache.dtype == dtype else rows * (_scale(kernel, name) or 1.0)


def _scale(kernel: Any, name: str) -> float | None:
    """The scale of K or V; None if the model keeps it in a tensor only."""
    if getattr(kernel, f"{name}_scale") is None:
        return 1.0
    scale: float | None = getattr(kernel, f"{name}_scale_float")
    return scale
