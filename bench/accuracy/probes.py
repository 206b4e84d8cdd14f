"""Layers whose K and V are at hand, and what merging each two of them does to their attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from hcache_backend.krul.statistics import attention_weights

KV = tuple[torch.Tensor, torch.Tensor]
"""K ``[n, kv_heads, dim]`` and V ``[n, kv_heads, value_dim]`` of one layer."""
_TINY = 1e-30


class LayerProbe(NamedTuple):
    """A :class:`~hcache_backend.krul.statistics.ProbedLayer` whose K and V, of all tokens, are at
    hand."""

    q: torch.Tensor
    kv: KV
    scale: float

    @property
    def length(self) -> int:
        return len(self.kv[0])

    @property
    def kv_heads(self) -> int:
        return self.kv[0].shape[1]

    def keys(self, heads: slice) -> torch.Tensor:
        return self.kv[0][:, heads]


def output_distances(
    layers: Sequence[LayerProbe], merge: Callable[[KV, KV], tuple[KV, KV]]
) -> torch.Tensor:
    """How much merging each two layers changes the output of attention: the root mean square of the
    relative errors in both, float64 ``[layers, layers]``, symmetric.

    Args:
        layers: In the order of the model, with the same queries and tokens.
        merge: Returns what comes back of the K and V of two layers that are merged.
    """
    exact = [_output(layer, layer.kv) for layer in layers]
    size = torch.stack([output.double().square().sum() for output in exact])
    squared = size.new_zeros(len(layers), len(layers))
    for pair in combinations(range(len(layers)), 2):
        merged = merge(*(layers[layer].kv for layer in pair))
        for layer, other, kv in zip(pair, reversed(pair), merged, strict=True):
            error = _output(layers[layer], kv) - exact[layer]
            squared[layer, other] = error.double().square().sum()
    relative = squared / size.clamp_min(_TINY)[:, None]
    return ((relative + relative.T) / 2).sqrt()


def _output(layer: LayerProbe, kv: KV) -> torch.Tensor:
    """Output of attention with these K and V, float32 ``[kv_heads, group, t, value_dim]``."""
    k, v = kv
    weights = attention_weights(layer.q, k, layer.scale).unflatten(0, (k.shape[1], -1))
    return torch.einsum("ghtn,ngd->ghtd", weights, v.float())
