"""Choice of the layers that share a slot (Krul, section 4 and Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Pair = tuple[int, int]


@dataclass(frozen=True)
class Strategy:
    """Pairs of layers that are merged, the lower one first; the same for all pages of a sequence.

    Raises:
        ValueError: A layer that does not exist, or that is in two pairs.
    """

    layers: int  # of the model
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
        """The layers of each slot of a page, by first layers."""
        paired = {layer for pair in self.pairs for layer in pair}
        alone = ((layer,) for layer in range(self.layers) if layer not in paired)
        return tuple(sorted([*self.pairs, *alone]))

    def page_bytes(self, plain: int, pair: int) -> int:
        """Bytes of a page: ``plain`` in a slot of one layer and ``pair`` in a slot of two."""
        return (self.layers - 2 * len(self.pairs)) * plain + len(self.pairs) * pair


def initial_recent_layers(masses: torch.Tensor, gamma: float) -> list[int]:
    """I-R layers: their queries look at the first and last tokens, with a mass of at least
    ``gamma`` (:attr:`PairSums.initial_recent`), whatever they ask."""
    return [layer for layer, mass in enumerate(masses.tolist()) if mass >= gamma]


def closest_pairs(distances: torch.Tensor, candidates: list[int], ratio: float) -> tuple[Pair, ...]:
    """Pair layers greedily, the closest first, each layer once (Algorithm 1, lines 14 to 22).

    No pair is added once the share ``ratio`` (0 to 1) of the candidates is paired. Pairs come by
    distance (``[layers, layers]``, symmetric), equal ones by layers.

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
