"""Which layers share a slot (Krul, section 4 and Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Pair = tuple[int, int]


@dataclass(frozen=True)
class Strategy:
    """Which layers of a sequence are merged, two by two; it is one for all of its pages.

    Attributes:
        layers: How many the model has.
        pairs: Layers that share a slot, the lower one first.

    Raises:
        ValueError: A layer that does not exist, or that is in two pairs.
    """

    layers: int
    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        known: set[int] = set()
        for pair in self.pairs:
            if not 0 <= pair[0] < pair[1] < self.layers or known & {*pair}:
                raise ValueError(
                    f"pair {pair}: must be two of the layers 0 to {self.layers - 1} in order, each "
                    "in one pair"
                )
            known |= {*pair}

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each slot of a page, in the order of their first layers."""
        paired = {layer for pair in self.pairs for layer in pair}
        alone = ((layer,) for layer in range(self.layers) if layer not in paired)
        return tuple(sorted([*self.pairs, *alone]))

    def page_bytes(self, plain: int, pair: int) -> int:
        """Bytes of a page whose slots have ``plain`` bytes for one layer and ``pair`` for two."""
        return (self.layers - 2 * len(self.pairs)) * plain + len(self.pairs) * pair


def initial_recent_layers(masses: torch.Tensor, gamma: float) -> list[int]:
    """Layers whose queries look at the first and the last tokens, whatever they ask (I-R layers).

    Args:
        masses: One for each layer, see :attr:`PairSums.initial_recent`.
        gamma: Least mass.
    """
    return [layer for layer, mass in enumerate(masses.tolist()) if mass >= gamma]


def closest_pairs(distances: torch.Tensor, candidates: list[int], ratio: float) -> tuple[Pair, ...]:
    """Pair layers greedily, the closest first, each layer once (Algorithm 1, lines 14 to 22).

    Args:
        distances: ``[layers, layers]``, symmetric.
        candidates: Layers that may be paired.
        ratio: Share of the candidates after which no further pair is made: from 0 to 1.

    Returns:
        The pairs by ascending distance; equal distances in the order of the layers.

    Raises:
        ValueError: ``ratio`` is no such share.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio {ratio} of layers in pairs: must be from 0 to 1")
    ordered = sorted(
        (float(distances[first, second]), first, second)
        for first in candidates
        for second in candidates
        if first < second
    )
    paired: set[int] = set()
    pairs: list[Pair] = []
    for _, first, second in ordered:
        if len(paired) >= ratio * len(candidates):
            break
        if first not in paired and second not in paired:
            paired |= {first, second}
            pairs.append((first, second))
    return tuple(pairs)
