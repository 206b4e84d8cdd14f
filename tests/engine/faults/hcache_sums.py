"""Sums in the order of other kernels, which is what every GPU does; and sums that are wrong."""

import os
from typing import Any

import torch
from torch.nn import functional

from tests.kit.scheduler import around

_KEYS = 128
"""Keys that FlashAttention looks at together."""


def attention_in_blocks() -> None:
    """The model's attention goes on block by block of keys, as FlashAttention does."""
    from sglang.srt.layers.attention import torch_native_backend

    torch_native_backend.scaled_dot_product_attention = _attend


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``[1, heads, n, dim]``, ``[1, kv_heads, m, dim]`` twice; sums in float32, weights are rounded
    to the model's type before they meet values."""
    assert attn_mask is None
    if enable_gqa:
        each = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(each, 1) for part in (key, value))
    largest = torch.full((*query.shape[:3], 1), -torch.inf)
    total, output = torch.zeros_like(largest), torch.zeros(*query.shape[:3], value.shape[3])
    at = torch.arange(query.shape[2])[:, None]
    for start in range(0, key.shape[2], _KEYS):
        block = slice(start, start + _KEYS)
        scores = scale * (query.float() @ key[:, :, block].float().mT)
        if is_causal:
            seen = torch.arange(start, start + scores.shape[3]) <= at
            scores = scores.masked_fill(~seen, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, kept = (scores - largest).exp(), (before - largest).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        output = output * kept + weights.to(query.dtype).float() @ value[:, :, block].float()
    return (output / total).to(query.dtype)


def products_by_width() -> None:
    """Products of a wider weight sum in more parts, as libraries choose another kernel for them."""
    plain = functional.linear

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        parts = min(16, 2 ** (weight.shape[0] // 256))
        if parts == 1 or x.shape[-1] % parts:
            return plain(x, weight, bias)
        columns = zip(x.float().chunk(parts, -1), weight.float().chunk(parts, 1), strict=True)
        product = sum(plain(*some) for some in columns)
        return (product if bias is None else product + bias.float()).to(x.dtype)

    functional.linear = linear


def recomputed_wrongly(layer: int) -> None:
    """Recomputed attention of a layer is a tenth too large; K and V of the next one show it."""
    from hcache_backend.restore.recompute import RecomputePass

    def wrong(attend: Any, self: Any, kernel: Any, *args: Any) -> Any:
        found = attend(self, kernel, *args)
        return found * 1.1 if kernel.layer_id == layer else found

    around(RecomputePass, "attend", wrong)


def substitute(attention: str = "right") -> None:
    """SGLang's Triton attention recomputes, as on GPUs whose own would wait. It is ``right``, a
    tenth too ``large``, or so large that there is ``no memory``."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from hcache_backend.start.capabilities import Server

    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.interpreter import mend

        mend()

    def wrong(attend: Any, *args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs) * (1.1 if attention == "large" else 1)

    def make(init: Any, *args: Any, **kwargs: Any) -> None:
        if attention == "no memory":
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB.")
        init(*args, **kwargs)

    around(TritonAttnBackend, "forward_extend", wrong)
    around(TritonAttnBackend, "__init__", make)
    setattr(Server, "substitute", property(lambda server: "triton"))  # noqa: B010
