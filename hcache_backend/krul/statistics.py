"""How alike layers attend: sums over the last queries of a sequence (Krul, section 5).

Krul keeps the attention weights of a whole prompt, which are tens of gigabytes. Here K and V are
the ones that are cached anyway, and only the last queries are asked again. A query's weights in all
layers exist together, as in a decode step, and are gone before those of the next queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, Protocol

import torch

KV = tuple[torch.Tensor, torch.Tensor]
"""K ``[n, kv_heads, dim]`` and V ``[n, kv_heads, value_dim]`` of one layer."""

PROBE_TOKENS = 32
"""How many of the last tokens are asked."""
_ENDS = 0.1
"""Share of the tokens that are the first ones, and of those that are the last ones."""


_WEIGHTS = 1 << 24
"""So many weights of attention, or those of one query, exist at once."""


class ProbedLayer(Protocol):
    """What :class:`LayerProbe` has; K and V may be made when they are asked for."""

    @property
    def q(self) -> torch.Tensor: ...

    @property
    def kv(self) -> KV: ...

    @property
    def scale(self) -> float: ...


class LayerProbe(NamedTuple):
    """The last queries of a sequence in one layer, and what they attend to.

    Attributes:
        q: Of the last ``t`` tokens, ``[t, heads, dim]``, as attention receives them.
        kv: K and V of all ``n`` tokens, whose type may be another one.
        scale: Factor of the products of queries and keys.
    """

    q: torch.Tensor
    kv: KV
    scale: float


@dataclass(frozen=True)
class AttentionSums:
    """How layers attend, summed over rows: weights of one query in one head.

    Sums can be added: of a prompt's tokens and of generated ones, of tensor-parallel ranks.

    Attributes:
        rows: How many.
        mass: Weights on the first and on the last tenth of what a query sees, float64 ``[layers]``.
        squared: Squared Euclidean distance of the rows of two layers, float64 ``[layers, layers]``.
    """

    rows: int
    mass: torch.Tensor
    squared: torch.Tensor

    def __add__(self, other: AttentionSums) -> AttentionSums:
        return AttentionSums(
            self.rows + other.rows, self.mass + other.mass, self.squared + other.squared
        )

    @property
    def initial_recent(self) -> torch.Tensor:
        """Share of the attention on the first and on the last tokens, float64 ``[layers]``: what
        Algorithm 1 compares with its threshold."""
        return self.mass / self.rows

    @property
    def distances(self) -> torch.Tensor:
        """Root mean square distance of the rows of two layers, float64 ``[layers, layers]``."""
        return (self.squared / self.rows).sqrt()


@dataclass(frozen=True)
class OutputSums:
    """What a merge does to the output of attention, summed over queries and heads.

    Sums can be added, as :class:`AttentionSums`.

    Attributes:
        squared: Squared norm of each layer's output, float64 ``[layers]``.
        errors: ``errors[i, j]`` is the squared error of layer ``i``'s output when layer ``i`` is
            merged with layer ``j``, float64 ``[layers, layers]``.
    """

    squared: torch.Tensor
    errors: torch.Tensor

    def __add__(self, other: OutputSums) -> OutputSums:
        return OutputSums(self.squared + other.squared, self.errors + other.errors)

    @property
    def distances(self) -> torch.Tensor:
        """Root mean square of the relative errors of both layers, float64 ``[layers, layers]``."""
        relative = self.errors / self.squared[:, None]
        return ((relative + relative.T) / 2).sqrt()


def attention_sums(layers: Sequence[ProbedLayer]) -> AttentionSums:
    """Compare the attention of layers.

    Raises:
        ValueError: The layers have not the same heads or tokens.
    """
    tokens, heads = _shape(layers)
    length, device = len(layers[0].kv[0]), layers[0].q.device
    mass = torch.zeros(len(layers), dtype=torch.float64, device=device)
    squared = torch.zeros((len(layers), len(layers)), dtype=torch.float64, device=device)
    at_once = max(1, _WEIGHTS // (len(layers) * heads * length))
    for start in range(0, tokens, at_once):
        queries = slice(start, min(start + at_once, tokens))
        seen = length - tokens + queries.stop
        weights = torch.stack(
            [
                attention_weights(layer.q[queries], layer.kv[0][:seen], layer.scale)
                for layer in layers
            ]
        )  # [layers, heads, t, seen]
        inside = ~_at_ends(queries.stop - queries.start, seen, device)
        mass += weights.masked_fill(inside, 0.0).sum((1, 2, 3), dtype=torch.float64)
        flat = weights.flatten(1)
        # By differences: products of rows would lose the small distances, which are chosen.
        found = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
        squared += found.double().square()
    return AttentionSums(tokens * heads, mass, squared)


def output_sums(
    layers: Sequence[LayerProbe], merge: Callable[[KV, KV], tuple[KV, KV]]
) -> OutputSums:
    """Measure what merging each two layers does to the output of their attention.

    Args:
        layers: In the order of the model.
        merge: Returns what comes back of the K and V of two layers that are merged.

    Raises:
        ValueError: The layers have not the same heads or tokens.
    """
    _shape(layers)
    errors = torch.zeros((len(layers), len(layers)), dtype=torch.float64)
    exact = [_output(layer, layer.kv) for layer in layers]
    for pair in combinations(range(len(layers)), 2):
        merged = merge(layers[pair[0]].kv, layers[pair[1]].kv)
        for layer, other, kv in zip(pair, reversed(pair), merged, strict=True):
            error = _output(layers[layer], kv) - exact[layer]
            errors[layer, other] = error.double().square().sum()
    squared = torch.stack([output.double().square().sum() for output in exact])
    return OutputSums(squared.cpu(), errors)


def attention_weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last ``t`` of ``n`` tokens, float32 ``[heads, t, n]``.

    ``q`` is ``[t, heads, dim]``, ``k`` is ``[n, kv_heads, dim]``.
    """
    tokens, _, dim = q.shape
    grouped = q.float().view(tokens, k.shape[1], -1, dim)
    scores = torch.einsum("tghd,ngd->ghtn", grouped, k.float()).flatten(0, 1) * scale
    hidden = torch.ones((tokens, len(k)), dtype=torch.bool, device=q.device)
    scores.masked_fill_(hidden.triu(len(k) - tokens + 1), -math.inf)
    return scores.softmax(-1)


def _at_ends(tokens: int, length: int, device: torch.device) -> torch.Tensor:
    """Which of ``length`` tokens are the first or the last ones of those that each of the last
    ``tokens`` ones sees, bool ``[tokens, length]``."""
    seen = torch.arange(length - tokens + 1, length + 1, dtype=torch.float64, device=device)
    first = torch.minimum((_ENDS * seen).ceil(), seen)
    last = torch.maximum(first, ((1 - _ENDS) * seen).floor())
    at = torch.arange(length, device=device)
    return (at < first[:, None]) | (at >= last[:, None])


def _output(layer: LayerProbe, kv: KV) -> torch.Tensor:
    """Output of attention with these K and V, float32 ``[kv_heads, group, t, value_dim]``."""
    k, v = kv
    weights = attention_weights(layer.q, k, layer.scale).unflatten(0, (k.shape[1], -1))
    return torch.einsum("ghtn,ngd->ghtd", weights, v.float())


def _shape(layers: Sequence[ProbedLayer]) -> tuple[int, int]:
    """Queries and heads of all layers."""
    shapes = {(*layer.q.shape[:2], len(layer.kv[0])) for layer in layers}
    if len(shapes) != 1:
        raise ValueError(
            f"layers have queries, heads and tokens {sorted(shapes)}: all must have the same"
        )
    tokens, heads, length = shapes.pop()
    if not 0 < tokens <= length:
        raise ValueError(f"{tokens} queries of {length} tokens: must be 1 to {length}")
    return tokens, heads
