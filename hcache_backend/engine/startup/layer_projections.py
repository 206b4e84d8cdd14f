"""How each layer is projected on this server: by its spec where one is proven, and why not."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist

from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.self_check import Probe, SelfCheckFailed, written_problem
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.projector import Projector
from hcache_backend.projection.proof import RowsDependOnEachOther, gather_evidence
from hcache_backend.projection.search import NoSpec, find_spec
from hcache_backend.projection.spec import LayerSpec
from hcache_backend.server_report import LayerGroup
from hcache_kernels.project_kv import KVPool
from hcache_kernels.project_kv.choice import measure_choice
from hcache_kernels.project_kv.spec import kind_of

logger = logging.getLogger("hcache")

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedPool:
    """SGLang's KV pool, as the projector and recomputation want it.

    Args:
        kvcache: An ``MHATokenToKVPool``.
    """

    def __init__(self, kvcache: Any) -> None:
        self._kvcache = kvcache

    def of_layer(self, layer: AttentionLayer) -> KVPool | None:
        pool = self._kvcache
        k, v = (buffers[layer.index].view(pool.dtype) for buffers in (pool.k_buffer, pool.v_buffer))
        scales = [_scale(layer.kernel, name) for name in "kv"]
        plain = scales == [1.0, 1.0]
        if None in scales or not (plain or pool.dtype in _FP8):
            return None
        return KVPool(k, v, *scales)

    def write(
        self, layer: AttentionLayer, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.store(layer.kernel, slots, k, v)

    def store(self, kernel: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._kvcache.set_kv_buffer(kernel, slots, k, v, kernel.k_scale, kernel.v_scale)

    def fetch(
        self, kernel: Any, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool, index = self._kvcache, kernel.layer_id - self._kvcache.start_layer
        rows = [
            buffers[index][slots].view(pool.dtype).to(dtype)
            for buffers in (pool.k_buffer, pool.v_buffer)
        ]
        if pool.dtype in _FP8:
            scales = (_scale(kernel, name) or 1.0 for name in "kv")
            rows = [part * scale for part, scale in zip(rows, scales, strict=True)]
        return rows[0], rows[1]


def _scale(kernel: Any, name: str) -> float | None:
    if getattr(kernel, f"{name}_scale") is None:
        return 1.0
    scale: float | None = getattr(kernel, f"{name}_scale_float")
    return scale


class LayerProjections:
    """Gives the projector its specs, at start and again after every update of the weights.

    Args:
        runtime: State of this process.
        probe: The layers, and what they received.
        projector: Projects by attention modules until it is told otherwise.
        kvcache: The KV pool.
        group: Process group of the tensor-parallel ranks.
    """

    def __init__(
        self, runtime: Runtime, probe: Probe, projector: Projector, kvcache: Any, group: Any
    ) -> None:
        self._runtime = runtime
        self._probe = probe
        self._projector = projector
        self._kvcache = kvcache
        self._group = group
        self._stale = False
        self._found: list[LayerSpec | str] = []

    def find(self) -> None:
        """Look for the spec of every layer, on this rank.

        Raises:
            SelfCheckFailed: Not even the attention modules can restore pages.
        """
        assert self._runtime.config is not None
        limit = int(self._runtime.runner.model_config.context_len)
        generic_only = self._runtime.config.projection == "generic"
        self._found = []
        for layer, hidden in zip(self._probe.layers, self._probe.hidden, strict=True):
            try:
                evidence = gather_evidence(
                    layer, hidden, self._probe.positions, self._projector.generic, limit
                )
            except RowsDependOnEachOther as error:
                raise SelfCheckFailed(str(error)) from None
            found: LayerSpec | str
            try:
                found = (
                    "option 'projection' is 'generic'"
                    if generic_only
                    else find_spec(layer, evidence, self._projector.generic)
                )
            except NoSpec as error:
                found = str(error)
            except Exception as error:  # a model's own code, looked at in a new way
                found = f"the search broke: {type(error).__name__}: {error}"
            self._found.append(found)

    def check_writing(self) -> None:
        """Drop specs that do not write to the pool what the model did. Nothing may run yet."""
        self._projector.use_specs([_spec(found) for found in self._found])
        for layer, hidden in zip(self._probe.layers, self._probe.hidden, strict=True):
            if _spec(self._found[layer.index]) is not None:
                problem = written_problem(
                    layer,
                    hidden,
                    self._probe.positions,
                    self._probe.slots,
                    self._projector,
                    self._kvcache,
                )
                if problem is not None:
                    self._found[layer.index] = problem

    def settle(self) -> None:
        """Use what was found on every rank. All ranks must call it."""
        # Some attention modules talk to the other ranks: all must call them, or none.
        agreed = on_all_ranks(self._group, *(_spec(found) is not None for found in self._found))
        self._projector.use_specs(
            [
                _spec(found) if fine else None
                for found, fine in zip(self._found, agreed, strict=True)
            ]
        )
        self._report()
        self._stale = False

    def racing(self) -> str | None:
        """Why projections could get in the way of forward passes; the same on all ranks.

        A layer without a spec is projected by its attention module, which may talk to the other
        ranks. On a GPU it would do so while a forward pass does.
        """
        if not self._probe.hidden[0].is_cuda or dist.get_world_size(group=self._group) == 1:
            return None
        generic = [layer for layer, spec in enumerate(self._projector.specs) if spec is None]
        if not generic:
            return None
        return (
            f"layers {', '.join(map(str, generic))} have no spec, and on a GPU their attention "
            "modules must not run beside forward passes of several tensor-parallel ranks"
        )

    def measure(self) -> None:
        """On a GPU, find the faster way to project each kind of layer.

        It takes seconds, on the first start with a model only: a file of the device keeps the
        times. What is not measured is projected the library's way.
        """
        if not self._probe.hidden[0].is_cuda:
            return
        found = (spec.projection() for spec in self._projector.specs if spec and spec.fused)
        kinds = {kind_of(projection): projection for projection in found}
        try:
            for projection in kinds.values():
                measure_choice(projection, self._kvcache.dtype)
        except Exception as error:  # no memory left, or a compiler that cannot
            logger.warning("hcache: the ways to project were not measured: %s", error)

    def follow_weights(self) -> None:
        """From now on, forget the specs when weights change, and find them anew."""
        self._runtime.on_weights_changed.append(self._forget)
        self._runtime.on_caches_flushed.append(self._renew)

    def _forget(self) -> None:
        """Weights change: attention modules are right whatever they become."""
        self._projector.use_specs([None] * len(self._probe.layers))
        self._stale = True

    def _renew(self) -> None:
        if not self._stale:
            return
        try:
            self.find()
        except Exception as error:
            reason = f"after a weight update: {type(error).__name__}: {error}"
            self._found = [reason] * len(self._probe.layers)
            if isinstance(error, SelfCheckFailed):
                self._runtime.lose_trust(reason)
            else:
                logger.exception("hcache: the search for specs broke")
        self.settle()
        racing = self.racing()
        if racing is not None:
            self._runtime.lose_trust(f"after a weight update: {racing}")

    def _report(self) -> None:
        specs = self._projector.specs
        self._runtime.projection = _grouped(
            (
                ("spec", spec.describe())
                if spec is not None
                else ("generic", found if isinstance(found, str) else "another rank has no spec")
            )
            for spec, found in zip(specs, self._found, strict=True)
        )
        by_spec = [group for group in self._runtime.projection if group.method == "spec"]
        if by_spec:
            parts = [f"{len(group.layers)} layers by spec ({group.detail})" for group in by_spec]
            logger.info("hcache: projection: %s", "; ".join(parts))
        for group in self._runtime.projection:
            if group.method == "generic":
                logger.info(
                    "hcache: projection: layers %s by their attention modules: %s",
                    ", ".join(map(str, group.layers)),
                    group.detail,
                )


def _spec(found: LayerSpec | str) -> LayerSpec | None:
    return None if isinstance(found, str) else found


def _grouped(methods: Iterable[tuple[Literal["spec", "generic"], str]]) -> list[LayerGroup]:
    groups: dict[tuple[Literal["spec", "generic"], str], list[int]] = {}
    for index, method in enumerate(methods):
        groups.setdefault(method, []).append(index)
    return [
        LayerGroup(method=method, detail=detail, layers=tuple(layers))
        for (method, detail), layers in groups.items()
    ]
