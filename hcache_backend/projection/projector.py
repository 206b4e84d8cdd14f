"""K and V of every layer, each made in the best way that was proven for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.generic import GenericProjector
from hcache_backend.projection.spec import LayerSpec
from hcache_kernels.project_kv import KVPool, project_kv


class DevicePool(Protocol):
    """The engine's KV pool."""

    def of_layer(self, layer: AttentionLayer) -> KVPool | None:
        """The pool of one layer, or None where only :meth:`write` knows how to fill it."""

    def write(
        self, layer: AttentionLayer, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store K and V ``[n, kv_heads, head_dim]`` of ``n`` tokens in ``slots`` (int64)."""


class Projector:
    """Projects hidden states by a layer's spec, or by its attention module where there is none.

    Args:
        generic: For layers without a spec.
        pool: Where K and V go.
        layers: How many layers there are.
    """

    def __init__(self, generic: GenericProjector, pool: DevicePool, layers: int) -> None:
        self.generic = generic
        self._pool = pool
        self._specs: list[LayerSpec | None] = [None] * layers

    @property
    def specs(self) -> tuple[LayerSpec | None, ...]:
        """The spec of every layer, None for those of the generic projector."""
        return tuple(self._specs)

    def use_specs(self, specs: Sequence[LayerSpec | None]) -> None:
        """Project every layer by its entry from now on."""
        self._specs = list(specs)

    @torch.no_grad()
    def project(
        self, layer: AttentionLayer, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`GenericProjector.project`, by the layer's spec where it has one."""
        spec = self._specs[layer.index]
        if spec is None:
            return self.generic.project(layer, hidden, positions)
        return spec.compute(hidden, positions)

    @torch.no_grad()
    def project_to_pool(
        self,
        layer: AttentionLayer,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write K and V of one layer into the pool.

        Args:
            layer: The layer.
            hidden: Input of the QKV projection, ``[n, hidden]``, on the model's device.
            positions: Positions of the tokens, int64 ``[n]``, on the model's device.
            slots: Where they go, int64 ``[n]``, on the model's device; any order.

        Raises:
            ProjectionFailed: The attention module gave no K and V.
        """
        spec, pool = self._specs[layer.index], self._pool.of_layer(layer)
        if spec is not None and spec.fused and pool is not None:
            project_kv(hidden, positions, slots, spec.projection(), pool)
        else:
            self._pool.write(layer, slots, *self.project(layer, hidden, positions))
