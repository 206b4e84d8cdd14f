"""Which layers are alike, by how they attend, and which of them share a slot (Krul, sections 4, 5).
Krul keeps the attention weights of a whole prompt, tens of gigabytes. Here K comes from the cache,
and only the last queries are computed again, a few at a time in all layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from hcache_backend.krul.pair_forms import MergedPair
from hcache_backend.restore.recompute import AttentionInputs
from hcache_kernels.codecs import Int8

OBSERVED_TOKENS = 32  # the last tokens of a sequence, whose attention is computed again
_ENDS = 0.1  # share of the tokens that are the first ones, and of those that are the last ones
_WEIGHTS = 1 << 24  # of attention at once, or those of one query in the heads of a KV head

Pair = tuple[int, int]  # the lower layer first
CodedPair = tuple[int, int, str]  # layers that share a slot, and the code of the slot


def check_pairs(layers: int, pairs: Iterable[Pair]) -> None:
    """Raise ValueError for a pair of other than two of ``layers``, or for a layer in two pairs."""
    known: set[int] = set()
    for pair in pairs:
        if not 0 <= pair[0] < pair[1] < layers or known & {*pair}:
            right = f"must be two of the layers 0 to {layers - 1} in order, each in one pair"
            raise ValueError(f"pair {pair}: {right}")
        known |= {*pair}


def unpaired(layers: int, pairs: Iterable[Sequence[object]]) -> list[int]:
    paired = {layer for pair in pairs for layer in pair[:2]}
    return [layer for layer in range(layers) if layer not in paired]


def initial_recent_layers(masses: torch.Tensor, gamma: float) -> list[int]:
    """Krul's I-R ("initial-recent") layers: those whose queries attend to the first and last tokens
    with at least ``gamma`` of their weight. ``masses``: that share by layer, ``[layers]``."""
    return [layer for layer, mass in enumerate(masses.tolist()) if mass >= gamma]


def closest_pairs(
    distances: torch.Tensor,
    candidates: Iterable[int],
    ratio: float,
    allowed: Collection[Pair] | None = None,
) -> list[Pair]:
    """Pair ``candidates`` (layers) greedily, each layer at most once (Algorithm 1, lines 14 to 22),
    until the share ``ratio`` (0 to 1) of them is paired. The pairs are in ascending order of
    ``distances``, ``[layers, layers]``. Only ``allowed`` pairs are made; None: any."""
    candidates = sorted(candidates)
    possible = [pair for pair in combinations(candidates, 2) if allowed is None or pair in allowed]
    pair_of: dict[int, Pair] = {}
    for pair in sorted(possible, key=lambda pair: float(distances[pair])):
        if len(pair_of) >= ratio * len(candidates):
            break
        if not pair_of.keys() & {*pair}:
            pair_of |= dict.fromkeys(pair, pair)
    return list(dict.fromkeys(pair_of.values()))


@dataclass(frozen=True)
class PairSums:
    """How layers attend and how unlike each two of them are, summed over rows: a query in a head.
    Tables can be added: of prompt and generated tokens, and of tensor-parallel ranks."""

    # float64 [layers + 2, layers]: the number of rows, for every layer; weights on the first and
    # last tenth of what a query sees; and squared differences of each two layers
    table: torch.Tensor

    @property
    def initial_recent(self) -> torch.Tensor:
        """Share of attention on first and last tokens; Algorithm 1 compares it with gamma."""
        return self.table[1] / self.table[0]

    @property
    def distances(self) -> torch.Tensor:
        """Root mean square of the differences, float64 ``[layers, layers]``, symmetric."""
        return (self.table[2:] / self.table[0]).sqrt()


@dataclass(frozen=True)
class PairChoice:
    """Chooses the pairs of a page."""

    layers: int  # of the model
    pairs: int  # number to choose
    mergeable: Collection[Pair]  # pairs that a merge does not change too much
    ratio: float  # largest share of the I-R layers to merge
    gamma: float  # least mass of an I-R layer, see initial_recent_layers

    def by_distance(self, sums: PairSums) -> tuple[CodedPair, ...]:
        """Merge the closest I-R layers (Krul's Algorithm 1)."""
        candidates = initial_recent_layers(sums.initial_recent, self.gamma)
        closest = closest_pairs(sums.distances, candidates, self.ratio, self.mergeable)
        return self.coded(closest[: self.pairs])

    def coded(self, wanted: Iterable[Pair]) -> tuple[CodedPair, ...]:
        """Sorted pairs of a page: ``wanted`` ones, then neighbours among the other layers, from the
        last layer on. Code: ``merged`` if a pair is wanted and mergeable, otherwise ``int8``."""
        codes = {pair: MergedPair.name if pair in self.mergeable else Int8.name for pair in wanted}
        others = unpaired(self.layers, codes)
        while len(codes) < self.pairs:
            second = others.pop()
            codes[others.pop(), second] = Int8.name
        return tuple((*pair, code) for pair, code in sorted(codes.items()))


def attention_sums(layers: Sequence[AttentionInputs]) -> PairSums:
    """Compare layers by Euclidean distances of their attention weights, row by row. Raises
    ValueError if they differ in heads or tokens, or there are fewer tokens than queries."""
    shapes = {(*layer.q.shape[:2], layer.length) for layer in layers}
    (tokens, heads, length), *others = shapes
    if others or not 0 < tokens <= length:
        raise ValueError(f"layers of queries, heads and tokens {sorted(shapes)} cannot be compared")
    rows = len(layers) + 2
    table = torch.zeros((rows, len(layers)), dtype=torch.float64, device=layers[0].q.device)
    table[0] = tokens * heads  # rows: a query in a head
    for weights, inside in _part_weights(layers):
        table[1] += weights.masked_fill(inside, 0.0).sum((1, 2, 3), dtype=torch.float64)
        flat = weights.flatten(1)
        # By differences: products of rows would lose the small distances, which are chosen.
        distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
        table[2:] += distances.double().square()
    return PairSums(table)


def attention_weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last ``t`` of ``n`` tokens, float32 ``[heads, t, n]``, from ``q``
    ``[t, heads, dim]`` and ``k`` ``[n, kv_heads, dim]``."""
    tokens, _, dim = q.shape
    grouped = q.float().view(tokens, k.shape[1], -1, dim)
    scores = torch.einsum("tghd,ngd->ghtn", grouped, k.float()).flatten(0, 1) * scale
    later = torch.ones((tokens, len(k)), dtype=torch.bool, device=q.device)
    scores.masked_fill_(later.triu(len(k) - tokens + 1), -math.inf)
    return scores.softmax(-1)


def _at_ends(tokens: int, length: int, device: torch.device) -> torch.Tensor:
    """bool ``[tokens, length]``: first and last tenth of what each of the last ``tokens`` sees."""
    seen = torch.arange(length - tokens + 1, length + 1, dtype=torch.float64, device=device)
    first = torch.minimum((_ENDS * seen).ceil(), seen)
    last = torch.maximum(first, ((1 - _ENDS) * seen).floor())
    places = torch.arange(length, device=device)
    return (places < first[:, None]) | (places >= last[:, None])


def _part_weights(layers: Sequence[AttentionInputs]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Attention weights of all layers, for some heads and queries at a time to bound the memory:
    float32 ``[layers, heads, t, n]``, and the tokens at neither end, bool ``[t, n]``."""
    (tokens, heads), length = layers[0].q.shape[:2], layers[0].length
    kv_heads, group = layers[0].kv_heads, heads // layers[0].kv_heads
    weights_per_query = len(layers) * group * length
    queries_at_once = max(1, _WEIGHTS // weights_per_query)
    heads_at_once = max(1, _WEIGHTS // (weights_per_query * tokens))
    for first in range(0, kv_heads, heads_at_once):
        kv_part = slice(first, min(first + heads_at_once, kv_heads))
        head_part = slice(kv_part.start * group, kv_part.stop * group)
        keys = [layer.keys(kv_part) for layer in layers]
        for start in range(0, tokens, queries_at_once):
            queries = slice(start, min(start + queries_at_once, tokens))
            seen = length - tokens + queries.stop
            weights = torch.stack([
                attention_weights(layer.q[queries, head_part], k[:seen], layer.scale)
                for layer, k in zip(layers, keys, strict=True)
            ])  # fmt: skip
            yield weights, ~_at_ends(queries.stop - queries.start, seen, weights.device)
