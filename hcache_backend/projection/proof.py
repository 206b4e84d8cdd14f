"""Proof by numbers that a spec gives the K and V of the model's own attention module.

The module is asked about more than the probe shows: large positions (a RoPE that is no plain
look-up), loud hidden states (clamps, saturation), quiet ones (biases, epsilons). Other batch sizes
show other orders of sums: a spec may be as far off as these explain, and no further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.exactness import (
    Bound,
    KVExactness,
    kv_exactness,
    relative_difference,
    together,
    tolerance,
    worst,
)
from hcache_backend.projection.generic import ProjectionBatch, project_with_module
from hcache_backend.projection.spec import COS_SIN, LayerSpec

_LOUD = 4096.0  # largest number of K and V from loud hidden states
_QUIET = 1e-3  # and from quiet ones

_PLACES = 16

LESS_EXACT = "K or V are less exact than the attention module's own at other batch sizes"


_BATCH_SIZES = (1, 16)  # a decode step and a small batch; many tokens at once are evidence anyway


@dataclass(frozen=True)
class Sample:
    """K and V that the module made of some tokens; a spec must make the same."""

    what: str  # the purpose of these tokens
    hidden: torch.Tensor  # [n, hidden]
    positions: torch.Tensor  # int64 [n]
    k: torch.Tensor  # [n, kv_heads, head_dim], like v
    v: torch.Tensor


@dataclass(frozen=True)
class Evidence:
    """Answers of a layer's attention module."""

    samples: list[Sample]  # the probe, then the probe with other positions beside it, then others
    own: KVExactness  # how exactly the module repeats the probe at other batch sizes


def spec_tolerance(dtype: torch.dtype) -> float:
    """Half of the tolerance of a layer in the pool: both sides round at the same places."""
    return tolerance(dtype) / 2


@torch.no_grad()
def gather_evidence(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    batch: ProjectionBatch,
    position_limit: int,
) -> Evidence:
    """Ask the attention module; always the same number of calls, on every rank.

    ``hidden`` (``[n, hidden]``) and ``positions`` are the probe's. The model serves positions below
    ``position_limit``.

    Raises:
        ProjectionFailed: The module gave no K and V.
    """

    def ask(what: str, rows: torch.Tensor, where: torch.Tensor) -> Sample:
        k, v = project_with_module(layer, rows, where, batch)
        return Sample(what, rows, where, k, v)

    n = len(hidden)
    probe = ask("the probe's tokens", hidden, positions)
    places = _places(min([position_limit, *_table_lengths(layer)]))
    far = ask(
        "the probe's tokens at other positions",
        hidden.repeat(1 + len(places), 1),
        torch.cat([positions, places.repeat_interleave(n).to(positions.device)]),
    )
    largest = float(torch.maximum(probe.k.abs().amax(), probe.v.abs().amax()))
    loud = hidden * min(_LOUD / largest, _room(hidden)) if largest else hidden
    quiet = hidden * (_QUIET / largest) if largest else hidden
    samples = [
        probe,
        far,
        ask("loud hidden states", loud, positions),
        ask("quiet hidden states", quiet, positions),
    ]
    again = [(far.k[:n], far.v[:n])]
    for size in _BATCH_SIZES:
        batches = zip(hidden.split(size), positions.split(size), strict=True)
        k, v = zip(*(project_with_module(layer, *rows, batch) for rows in batches), strict=True)
        again.append((torch.cat(k), torch.cat(v)))
    first = (probe.k, probe.v)
    return Evidence(samples, worst(kv_exactness(kv, first, hidden.dtype) for kv in again))


def dependence(layer: AttentionLayer, evidence: Evidence) -> str | None:
    """A message if K of a token changes with the positions projected beside it, or None. No page of
    such a layer can be restored: it does not say which tokens stood beside its own."""
    probe, far = evidence.samples[:2]
    n = len(probe.hidden)
    if relative_difference(far.k[:n], probe.k) <= tolerance(probe.hidden.dtype):
        return None
    return (
        f"K of {layer.name} at positions 0..{n - 1} changes when position "
        f"{int(far.positions.max())} is projected with them"
    )


@torch.no_grad()
def difference(spec: LayerSpec, samples: list[Sample]) -> tuple[float, str]:
    """The worst relative difference between a spec's K and V and the module's, and its place."""
    largest, where = 0.0, ""
    n = len(samples[0].hidden)  # the probe's tokens: compared together at all their positions
    for sample in samples:
        try:
            made = spec.compute(sample.hidden, sample.positions)
        except Exception as error:  # the model's linear module, or a table that is too short
            return float("inf"), f"K and V of {sample.what} ({type(error).__name__}: {error})"
        for name, got, want in zip("KV", made, (sample.k, sample.v), strict=True):
            groups = zip(got.split(n), want.split(n), strict=True)
            found = max(relative_difference(a.float(), b.float()) for a, b in groups)
            if found > largest:
                largest, where = found, f"{name} of {sample.what}"
    return largest, where


def difference_problem(spec: LayerSpec, samples: list[Sample]) -> str | None:
    """A message if rounding does not explain a difference of a spec from the module, or None."""
    allowed = spec_tolerance(samples[0].hidden.dtype)
    largest, where = difference(spec, samples)
    if largest <= allowed:
        return None
    return f"{where} differ from the module's by {largest:.1e} (allowed {allowed:.0e})"


@torch.no_grad()
def spec_exactness(spec: LayerSpec, samples: list[Sample]) -> KVExactness:
    return together(
        kv_exactness(
            spec.compute(sample.hidden, sample.positions), (sample.k, sample.v), sample.k.dtype
        )
        for sample in samples
    )


def spec_problem(spec: LayerSpec, evidence: Evidence) -> str | None:
    """A message if a spec is wrong for its layer, or None."""
    problem = difference_problem(spec, evidence.samples)
    if problem is not None:
        return problem
    bound = Bound.of_product(evidence.samples[0].k.dtype)
    if spec_exactness(spec, evidence.samples).as_good_as(evidence.own, bound):
        return None
    return LESS_EXACT


def _places(limit: int) -> torch.Tensor:
    """Positions of all magnitudes below ``limit``; the same on every rank."""
    source = torch.Generator().manual_seed(limit)
    powers = torch.linspace(0, 1, _PLACES) * max(0.0, torch.tensor(float(limit)).log2().item())
    jitter = 0.5 + 0.5 * torch.rand(_PLACES, generator=source)
    places = (2**powers * jitter).long().clamp(0, limit - 1)
    places[-1] = limit - 1
    return places


def _table_lengths(layer: AttentionLayer) -> list[int]:
    """Rows of the RoPE tables in sight: the module may not be asked beyond them."""
    tables = (getattr(module, COS_SIN, None) for module in layer.module.modules())
    return [len(table) for table in tables if isinstance(table, torch.Tensor)]


def _room(hidden: torch.Tensor) -> float:
    """The factor by which hidden states can still grow in their type."""
    return float(torch.finfo(hidden.dtype).max) / 16 / max(float(hidden.abs().amax()), 1e-30)
