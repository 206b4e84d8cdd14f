"""The projection of each layer on this server: by a proven spec, or by its attention module."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from hcache_backend.checks.comparison import first_problem
from hcache_backend.checks.probe import Probe
from hcache_backend.config import PROJECTION_VARIABLE
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.exactness import Bound, KVExactness, kv_exactness, together, worst
from hcache_backend.projection.projector import LayerSpec, Projector
from hcache_backend.projection.search import (
    LESS_EXACT,
    Evidence,
    NoSpec,
    dependence,
    find_spec,
    gather_evidence,
    spec_exactness,
)
from hcache_backend.ranks import Refused, smallest
from hcache_backend.server_report import LayerGroup
from hcache_kernels.project_kv import Way, ways_in_use
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import measure_choice

logger = logging.getLogger("hcache")


@dataclass(frozen=True)
class Found:
    """Findings on one layer.

    Attributes:
        detail: The spec's description, or why there is none.
        own: How exactly the attention module repeats itself at other batch sizes.
        reached: Exactness of the spec, or of the one refused for it; None without one.
    """

    spec: LayerSpec | None
    detail: str
    own: KVExactness
    reached: KVExactness | None = None


class LayerSpecs:
    """Gives the projector its specs, at start and after every update of the weights. ``group``: the
    process group of the tensor-parallel ranks."""

    def __init__(self, runtime: Any, probe: Probe, projector: Projector, group: Any) -> None:
        self._runtime, self._probe, self._projector = runtime, probe, projector
        self._group, self._stale = group, False
        self._found: list[Found] = []

    def find(self) -> None:
        """Look for the spec of every layer on this rank; all ranks call it. Raises Refused if not
        even the attention modules can restore pages."""
        found, problems = [], []
        limit, batch = int(self._runtime.runner.model_config.context_len), self._projector.batch
        for layer, hidden in zip(self._probe.layers, self._probe.hidden, strict=True):
            evidence = gather_evidence(layer, hidden, self._probe.positions, batch, limit)
            problems.append(dependence(layer, evidence))
            found.append(self._find(layer, evidence))
        self._found = found
        problem = first_problem(problems)
        if problem is not None:
            raise Refused(problem)

    def _find(self, layer: AttentionLayer, evidence: Evidence) -> Found:
        own = evidence.own
        if os.environ.get(PROJECTION_VARIABLE) == "generic":
            return Found(None, f"{PROJECTION_VARIABLE} is 'generic'", own)
        try:
            spec = find_spec(layer, evidence, self._projector.batch)
            return Found(spec, spec.describe(), own, spec_exactness(spec, evidence.samples))
        except NoSpec as error:
            return Found(None, str(error), own, error.reached)
        except Exception as error:  # a model's own code, called in a new way
            return Found(None, f"the search broke: {type(error).__name__}: {error}", own)

    def measure(self) -> None:
        """On a GPU, find the faster way to project each kind of layer, or use the library's. It
        takes seconds on the first start with a model: a file of the device keeps the times. Its
        choice is tested too, because :meth:`check_writing` comes after it."""
        if not self._probe.hidden[0].is_cuda:
            return
        specs = (found.spec for found in self._found)
        found = (spec.projection() for spec in specs if spec and spec.fused)
        try:
            for projection in {kind_of(projection): projection for projection in found}.values():
                measure_choice(projection, self._projector.pool.dtype)
        except Exception as error:  # no memory left, or the compiler fails
            logger.warning("hcache: the ways to project could not be timed: %s", error)

    def check_writing(self) -> None:
        """Drop specs that do not write the model's K and V to the pool. Nothing may run yet. A
        fused spec multiplies by some rows of a weight. If that is not exact enough, the product of
        the whole module, as the model computes it, is tried before the attention module."""
        for layer in self._probe.layers:
            found = self._found[layer.index]
            while found.spec is not None:
                checked = self._written(layer, found)
                if checked is found:
                    break
                if found.spec.fused:
                    whole = replace(found.spec, fused=False)
                    checked = replace(found, spec=whole, detail=whole.describe())
                self._found[layer.index] = found = checked

    def _written(self, layer: AttentionLayer, found: Found) -> Found:
        """``found``, or a replacement with the reason against its spec."""
        assert found.spec is not None
        probe, projector = self._probe, self._projector
        projector.specs = [one.spec for one in self._found]
        rows, kept = (probe.hidden[layer.index], probe.positions, probe.slots), projector.pool.dtype
        try:
            ways = ways_in_use(found.spec.projection(), kept) if found.spec.fused else [None]
            written = written_exactness(layer, *rows, projector, ways)
        except Exception as error:
            problem = f"its kernel failed: {type(error).__name__}: {error}"
            return Found(None, problem, found.own)
        if written.as_good_as(found.own, Bound.of_product(kept)):
            return found
        return Found(None, f"in the KV pool {LESS_EXACT}", found.own, written)

    def settle(self) -> None:
        """Use the specs found on every rank; all ranks call it. Raises Refused on all ranks if
        projections could get in the way of forward passes."""
        # Some attention modules talk to the other ranks: all must call them, or none.
        agreed = smallest(self._group, *(found.spec is not None for found in self._found))
        pairs = zip(self._found, agreed, strict=True)
        specs = [found.spec if fine else None for found, fine in pairs]
        self._projector.specs = specs
        self._report()
        self._stale = False
        generic = [layer for layer, spec in enumerate(specs) if spec is None]
        if not generic or not self._probe.hidden[0].is_cuda:
            return
        called = (self._probe.layers[layer].module for layer in generic)
        refuse_shared_workspaces(called, "projecting by attention modules")
        if dist.get_world_size(group=self._group) > 1:
            raise Refused(
                f"layers {', '.join(map(str, generic))} have no spec, and on a GPU their attention "
                "modules must not run beside forward passes of several tensor-parallel ranks"
            )

    def follow_weights(self) -> None:
        """Forget the specs whenever weights change, and find them anew."""
        self._runtime.on_weights_changed.append(self._forget)
        self._runtime.on_caches_flushed.append(self._renew)

    def _forget(self) -> None:
        """Weights change: attention modules stay right, specs may not."""
        self._projector.specs = [None] * len(self._probe.layers)
        self._stale = True

    def _renew(self) -> None:
        if not self._stale:
            return
        try:
            self.find()
        except Exception as error:
            reason = f"after a weight update: {type(error).__name__}: {error}"
            self._found = [
                replace(found, spec=None, detail=reason, reached=None) for found in self._found
            ]
            if isinstance(error, Refused):
                self._runtime.begin_quarantine(reason)
            else:
                logger.exception("hcache: the search for specs raised an error")
        try:
            self.settle()
        except Refused as refused:
            self._runtime.begin_quarantine(f"after a weight update: {refused}")

    def _report(self) -> None:
        groups: dict[tuple[Literal["spec", "generic"], str], list[int]] = {}
        for layer, (spec, found) in enumerate(zip(self._projector.specs, self._found, strict=True)):
            refused = spec is None and found.spec is not None
            detail = "another rank has no spec" if refused else found.detail
            groups.setdefault(("generic" if spec is None else "spec", detail), []).append(layer)
        self._runtime.projection = [
            LayerGroup(
                method=method,
                detail=detail,
                layers=tuple(layers),
                exactness=_figures([self._found[layer] for layer in layers]),
            )
            for (method, detail), layers in groups.items()
        ]
        by_spec = [group for group in self._runtime.projection if group.method == "spec"]
        parts = [f"{len(group.layers)} layers by spec ({group.detail})" for group in by_spec]
        if parts:
            logger.debug("hcache: projection: %s", "; ".join(parts))
        for group in self._runtime.projection:
            numbers, how = ", ".join(map(str, group.layers)), "by their attention modules"
            if group.method == "generic":
                logger.debug("hcache: projection: layers %s %s: %s", numbers, how, group.detail)
            logger.debug("hcache: exactness: layers %s: %s", numbers, group.exactness)


def refuse_shared_workspaces(modules: Iterable[torch.nn.Module], what: str) -> None:
    """Raise Refused if a kernel of ``modules`` locks memory of its own. Marlin's kernels of
    quantised layers do: in one module on two streams they wait for ever, or mix sums."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(getattr(part, "workspace", None), torch.Tensor):
                raise Refused(
                    f"{what} beside forward passes: the kernel of {name or type(part).__name__} "
                    "has one workspace for all streams"
                )


def written_exactness(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projector: Projector,
    ways: Sequence[Way | None] = (None,),
) -> KVExactness:
    """Exactness of the projector's writes to ``slots`` against the model's K and V there, which are
    restored. The worst of ``ways`` counts; rows are written in another order than the model's.
    Arguments as in :meth:`Projector.project_to_pool`."""
    pool, kernel, found = projector.pool, layer.kernel, []
    wanted = pool.fetch(kernel, slots, hidden.dtype)
    order = torch.arange(len(slots) - 1, -1, -1, device=slots.device)
    try:
        for way in ways:
            pool.store(kernel, slots, *map(torch.zeros_like, wanted))
            projector.project_to_pool(layer, hidden[order], positions[order], slots[order], way)
            got = pool.fetch(kernel, slots, hidden.dtype)
            found.append(kv_exactness(got, wanted, pool.dtype))
    finally:
        pool.store(kernel, slots, *wanted)
    return worst(found)


def _figures(found: Sequence[Found]) -> str:
    """Exactness of layers that are alike, for the log and ``hcache doctor``."""
    parts = [f"attention modules at other batch sizes {together(one.own for one in found)}"]
    reached = [one.reached for one in found if one.reached is not None]
    if reached:
        parts.insert(0, f"spec {together(reached)}")
    return "; ".join(parts)
