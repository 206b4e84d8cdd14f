"""Attention by PyTorch, as it has to be for models with latent K and V, and for measurements.

- Prompts without a prefix of such models SGLang computes by expanded K and V (`forward_mha`), which
  its `torch_native` attention looks for in the pool, where the latent ones are: the output is
  wrong. Behind a prefix it takes the latent ones, and the output is right; here it does so always.
- `torch_native` computes all tokens of a sequence again for every new part of it, so a prefix from
  a cache would hardly save time. A program that measures time asks for new tokens only.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.functional import pad

VARIABLE = "HCACHE_CPU_ATTENTION"
"""`new`: attention of new tokens only, which may differ in the last bits."""


def install() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    if os.environ.get(VARIABLE) == "new":
        TorchNativeAttnBackend._run_sdpa_forward_extend = extend


def extend(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """As SGLang's own, for decoders without cross attention and sliding windows.

    Args:
        query: `[new tokens, heads, head_size]`, one sequence after the other; `output` likewise.
        k_cache: `[tokens, kv_heads, head_size]`; `v_cache` likewise.
    """
    if encoder_lens is not None or not causal or any(others.values()):
        raise NotImplementedError(f"{VARIABLE}: this model's attention")
    start = 0
    for request, total, before, new in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    ):
        slots, rows = req_to_token[request, :total], slice(start, start + new)
        found = _attend(
            query[rows].movedim(0, 1),
            k_cache[slots].movedim(0, 1).to(query.dtype),
            v_cache[slots].movedim(0, 1).to(query.dtype),
            before,
            scaling,
        )
        output[rows] = found.movedim(0, 1)
        start += new
    return output


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: int, scale: float | None
) -> torch.Tensor:
    """Attention of new tokens, `[heads, new, head_size]`, to `before` others and to themselves.

    The two parts are put together by their sums: a mask for both would take twice as long.
    """
    each = len(query) // len(key)
    new = key[:, before:].repeat_interleave(each, 0), value[:, before:].repeat_interleave(each, 0)
    own, own_sums = _flash(query, *new, causal=True, scale=scale)
    if not before:
        return own
    # All heads that share K and V are asked at once.
    others, sums = _flash(
        query.reshape(len(key), -1, query.shape[-1]),
        key[:, :before],
        value[:, :before],
        causal=False,
        scale=scale,
    )
    share = torch.sigmoid(own_sums - sums.reshape_as(own_sums))[..., None].to(own.dtype)
    others = others.reshape_as(own)
    return others + share * (own - others)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithms of the sums that its weights are divided by."""
    attend, width = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, value.shape[-1]
    value = pad(value, (0, key.shape[-1] - width))  # those of latent K and V are narrower
    found, sums = attend(query[None], key[None], value[None], 0.0, causal, scale=scale)
    return found[0, ..., :width], sums[0]
