"""The pairs of a page: as many as its form has, merged if that is good enough."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from hcache_backend.krul.pair_forms import Fp8Pair, MergedPair
from hcache_backend.krul.paired_layout import CodedPair
from hcache_backend.krul.selection import Pair, closest_pairs, initial_recent_layers
from hcache_backend.krul.statistics import PairSums


@dataclass(frozen=True)
class PairChoice:
    """Chooses pairs of layers."""

    layers: int  # of the model
    pairs: int  # number to choose
    mergeable: Collection[Pair]  # pairs that a merge does not change too much
    ratio: float  # largest share of the I-R layers to merge
    gamma: float  # least mass of an I-R layer, see initial_recent_layers

    def by_distance(self, sums: PairSums) -> tuple[CodedPair, ...]:
        """Merge the closest I-R layers (Krul's Algorithm 1)."""
        candidates = initial_recent_layers(sums.initial_recent, self.gamma)
        distances = sums.distances
        allowed = torch.full_like(distances, torch.inf)
        for pair in self.mergeable:
            allowed[pair] = allowed[pair[::-1]] = distances[pair]
        first = closest_pairs(allowed, candidates, self.ratio)
        return self.coded([pair for pair in first if pair in self.mergeable][: self.pairs])

    def coded(self, wanted: Iterable[Pair]) -> tuple[CodedPair, ...]:
        """``wanted`` pairs, then neighbours among the other layers from the last on; by first
        layers. Pairs are merged if they are wanted and mergeable, and otherwise in ``fp8``."""
        found = {pair: pair in self.mergeable for pair in wanted}
        left = [layer for layer in range(self.layers) if all(layer not in pair for pair in found)]
        while len(found) < self.pairs:
            second = left.pop()
            found[left.pop(), second] = False
        return tuple(
            (*pair, MergedPair.name if merged else Fp8Pair.name)
            for pair, merged in sorted(found.items())
        )
