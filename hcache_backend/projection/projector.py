"""K and V of every layer, each in the best way that was proven for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hcache_backend.projection.attention import AttentionLayer, ProjectionBatch, project_with_module
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.projection.spec import LayerSpec
from hcache_kernels.project_kv import ProjectionCall, Way, project_kv


class Projector:
    """Projects hidden states to ``pool``, by a layer's spec if it has one, or by its module."""

    def __init__(self, batch: ProjectionBatch, pool: PagedPool, layers: int) -> None:
        self.batch = batch
        self.pool = pool
        self._specs: list[LayerSpec | None] = [None] * layers

    @property
    def specs(self) -> tuple[LayerSpec | None, ...]:
        """The spec of every layer; None: its attention module projects."""
        return tuple(self._specs)

    def use_specs(self, specs: Sequence[LayerSpec | None]) -> None:
        """Project every layer by its entry from now on."""
        self._specs = list(specs)

    @torch.no_grad()
    def project(
        self, layer: AttentionLayer, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :func:`project_with_module`, by the layer's spec if it has one."""
        spec = self._specs[layer.index]
        if spec is None:
            return project_with_module(layer, hidden, positions, self.batch)
        return spec.compute(hidden, positions)

    @torch.no_grad()
    def project_to_pool(
        self,
        layer: AttentionLayer,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        way: Way | None = None,
    ) -> None:
        """:meth:`project` to ``slots`` (int64 ``[n]``, any order) of the pool. ``way``: the kernels
        for a fused spec; None: the fastest ones for ``n``."""
        spec, pool = self._specs[layer.index], self.pool.of_layer(layer)
        if spec is not None and spec.fused and pool is not None:
            project_kv(ProjectionCall(hidden, positions, slots, spec.projection(), pool), way)
        else:
            self.pool.store(layer.kernel, slots, *self.project(layer, hidden, positions))
