"""A layer whose K and V are at hand, as what measures its attention wants it."""

from __future__ import annotations

from typing import NamedTuple

import torch

KV = tuple[torch.Tensor, torch.Tensor]
"""K ``[n, kv_heads, dim]`` and V ``[n, kv_heads, value_dim]`` of one layer."""


class LayerProbe(NamedTuple):
    """A :class:`~hcache_backend.restore.recompute.ProbedLayer` whose K and V are at hand."""

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
