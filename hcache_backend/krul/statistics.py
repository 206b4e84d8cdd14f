"""Sums over the last queries of a sequence: how alike layers attend (Krul, section 5).

Krul keeps the attention weights of a whole prompt, tens of gigabytes. Here K is the one that is
cached anyway, and only the last queries are asked again. A query's weights in all layers exist
together, as in a decode step, and are gone before those of the next queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hcache_backend.restore.recompute import ProbedLayer

PROBE_TOKENS = 32
"""How many of the last tokens are asked."""
_ENDS = 0.1
"""Share of the tokens that are the first ones, and of those that are the last ones."""
_WEIGHTS = 1 << 24
"""So many weights of attention exist at once, or those of one query in the heads of a KV head."""


@dataclass(frozen=True)
class PairSums:
    """How layers attend and how unlike each two of them are, summed over rows: a query in a head.
    Sums can be added: of prompt and generated tokens, and of tensor-parallel ranks."""

    rows: int
    mass: torch.Tensor  # weights on the first and last tenth of what a query sees, float64 [layers]
    squared: torch.Tensor  # squared differences of each two layers, float64 [layers, layers]

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums.unpacked(self.packed() + other.packed(), len(self.mass))

    def packed(self) -> torch.Tensor:
        """All of them, float64 ``[1 + layers + layers ** 2]``, on their device."""
        rows = torch.full_like(self.mass[:1], self.rows)
        return torch.cat((rows, self.mass, self.squared.flatten()))

    @staticmethod
    def packed_size(layers: int) -> int:
        return 1 + layers + layers**2

    @classmethod
    def unpacked(cls, packed: torch.Tensor, layers: int) -> PairSums:
        """The sums of :meth:`packed`, or of packed ones that were added."""
        rows, mass, squared = packed.split([1, layers, layers**2])
        return cls(int(rows), mass, squared.view(layers, layers))

    @property
    def initial_recent(self) -> torch.Tensor:
        """Share of attention on first and last tokens; Algorithm 1 compares it with gamma."""
        return self.mass / self.rows

    @property
    def distances(self) -> torch.Tensor:
        """Root mean square of the differences, float64 ``[layers, layers]``, symmetric."""
        return (self.squared / self.rows).sqrt()


def attention_sums(layers: Sequence[ProbedLayer]) -> PairSums:
    """Compare layers by the Euclidean distances of rows of attention weights.

    Raises:
        ValueError: The layers have not the same heads or tokens.
    """
    tokens, heads = _shape(layers)
    mass, squared = _zeros(layers, 1), _zeros(layers, 2)
    for weights, inside in _weights(layers):
        mass += _mass(weights, inside)
        flat = weights.flatten(1)
        # By differences: products of rows would lose the small distances, which are chosen.
        found = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
        squared += found.double().square()
    return PairSums(tokens * heads, mass, squared)


def attention_weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last ``t`` of ``n`` tokens, float32 ``[heads, t, n]``, from ``q``
    ``[t, heads, dim]`` and ``k`` ``[n, kv_heads, dim]``."""
    tokens, _, dim = q.shape
    grouped = q.float().view(tokens, k.shape[1], -1, dim)
    scores = torch.einsum("tghd,ngd->ghtn", grouped, k.float()).flatten(0, 1) * scale
    hidden = torch.ones((tokens, len(k)), dtype=torch.bool, device=q.device)
    scores.masked_fill_(hidden.triu(len(k) - tokens + 1), -math.inf)
    return scores.softmax(-1)


def _at_ends(tokens: int, length: int, device: torch.device) -> torch.Tensor:
    """Mask of the first and last tokens that each of the last ``tokens`` tokens sees."""
    seen = torch.arange(length - tokens + 1, length + 1, dtype=torch.float64, device=device)
    first = torch.minimum((_ENDS * seen).ceil(), seen)
    last = torch.maximum(first, ((1 - _ENDS) * seen).floor())
    at = torch.arange(length, device=device)
    return (at < first[:, None]) | (at >= last[:, None])


def _zeros(layers: Sequence[ProbedLayer], dims: int) -> torch.Tensor:
    shape, device = (len(layers),) * dims, layers[0].q.device
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _weights(layers: Sequence[ProbedLayer]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Weights of all layers, some heads and queries at a time, float32 ``[layers, heads, t, n]``,
    and the mask of tokens on neither end. K is fetched once, of few heads in all layers."""
    (tokens, heads), length = layers[0].q.shape[:2], layers[0].length
    kv_heads = layers[0].kv_heads
    group = heads // kv_heads
    of_query = len(layers) * group * length
    several, at_once = max(1, _WEIGHTS // (of_query * tokens)), max(1, _WEIGHTS // of_query)
    for first in range(0, kv_heads, several):
        here = slice(first, min(first + several, kv_heads))
        asking = slice(here.start * group, here.stop * group)
        held = [layer.keys(here) for layer in layers]
        for start in range(0, tokens, at_once):
            queries = slice(start, min(start + at_once, tokens))
            seen = length - tokens + queries.stop
            weights = torch.stack(
                [
                    attention_weights(layer.q[queries, asking], k[:seen], layer.scale)
                    for layer, k in zip(layers, held, strict=True)
                ]
            )
            yield weights, ~_at_ends(queries.stop - queries.start, seen, weights.device)


def _mass(weights: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return weights.masked_fill(inside, 0.0).sum((1, 2, 3), dtype=torch.float64)


def _shape(layers: Sequence[ProbedLayer]) -> tuple[int, int]:
    """Number of queries, and of heads, of all layers."""
    shapes = {(*layer.q.shape[:2], layer.length) for layer in layers}
    if len(shapes) != 1:
        raise ValueError(
            f"layers have queries, heads and tokens {sorted(shapes)}: all must have the same"
        )
    tokens, heads, length = shapes.pop()
    if not 0 < tokens <= length:
        raise ValueError(f"{tokens} queries of {length} tokens: must be 1 to {length}")
    return tokens, heads
