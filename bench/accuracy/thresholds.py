"""What Krul leaves open, with several values of each beside each other: in what a model says.

One value is changed at a time. The others are gamma 0 (every layer may be merged), half of the
layers in pairs, no bound of what a merge changes, t = 1/2 and one retained token of 16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch

from bench.accuracy import pairs
from bench.accuracy.engine import Engine, History
from bench.accuracy.methods import Method, exact, pair_forms, paired_method
from bench.accuracy.report import whole
from bench.harness.report import markdown
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.pair_forms import MergedPair
from hcache_backend.krul.paired_layout import CodedPair
from hcache_backend.krul.selection import Pair
from hcache_kernels.codecs import Codec

GAMMAS = 0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0
RATIOS = 0.25, 0.5, 0.75
ERRORS = 0.1, 0.2, 0.3, 0.4, 0.5, 1.0
RETAINED = 8, 16, 32
BETWEEN = 0.5, 0.6


class Retaining(MergedPair):
    """Retains another share of the tokens."""

    def __init__(self, retained: int, *of_pairs: Any) -> None:
        self.retained = retained  # type: ignore[misc]
        super().__init__(*of_pairs)


class Between(MergedPair):
    """Goes share ``t`` of the way from the direction of the first layer to that of the second."""

    def __init__(self, t: float, *of_pairs: Any) -> None:
        self._t = t
        super().__init__(*of_pairs)

    def _between(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        angle = (first * second).sum(-1, keepdim=True).clamp(-1, 1).acos()
        return ((1 - self._t) * angle).sin() * first + (self._t * angle).sin() * second


class Thresholds(NamedTuple):
    """How a server chooses the pairs of a node, by attention.

    Attributes:
        mergeable: Which pairs may be merged; None: any.
    """

    gamma: float = 0.0
    ratio: float = pairs.PAIRED
    mergeable: Collection[Pair] | None = None

    def pairs_of(self, layers: int) -> int:
        """As many as a server's pages have."""
        return max(1, int(self.ratio * layers / 2))

    def choose(self, engine: Engine, history: History) -> Sequence[CodedPair]:
        """The pairs of a history: merged, or ``fp8``."""
        layers = len(engine.layers)
        mergeable = self.mergeable
        if mergeable is None:
            mergeable = [*combinations(range(layers), 2)]
        choice = PairChoice(layers, self.pairs_of(layers), mergeable, self.ratio, self.gamma)
        return choice.by_distance(pairs.attention_of(engine, history))


def rows(engine: Engine) -> Iterator[Method]:
    """K and V as they are, and a method for each value.

    Raises:
        UnsupportedRows: K and V of this model cannot be merged.
    """
    yield from exact(engine)
    merged, *others = pair_forms(engine)
    of_pairs = engine.page_cut, engine.kv_shape[1], engine.dtype

    def row(name: str, how: Thresholds, form: Codec = merged) -> Method:
        number = how.pairs_of(len(engine.layers))
        return paired_method(engine, name, [form, *others], how.choose, number)

    plain = Thresholds()
    yield from (row(f"gamma {gamma}", Thresholds(gamma=gamma)) for gamma in GAMMAS)
    yield from (row(f"ratio {ratio}", Thresholds(ratio=ratio)) for ratio in RATIOS)
    changes = pairs.merge_changes(engine, engine.at_start())
    for error in ERRORS:
        small = [(i, j) for i, j in (changes <= error).nonzero().tolist() if i < j]
        yield row(f"error {error}", Thresholds(mergeable=small))
    for one in RETAINED:
        yield row(f"retained: 1 of {one}", plain, Retaining(one, *of_pairs))
    for t in BETWEEN:
        yield row(f"t = {t}", plain, Between(t, *of_pairs))


def table_lines(results: Mapping[str, Any]) -> str:
    """One line per value: bytes, how many of the pairs are merged, what the model says."""
    heads = "value", "bytes per token", "pairs merged", "KL, nats", "largest", "same token"
    lines = []
    for row in whole(results)[1:]:
        chosen = row.get("pairs", {})
        merged = sum(count for pair, count in chosen.items() if pair.endswith(MergedPair.name))
        lines.append(
            (
                row["method"],
                f"{row['bytes_per_token']:,}",
                f"{merged} of {sum(chosen.values())}" if chosen else None,
                f"{row['kl']:.1e}",
                f"{row['largest_kl']:.1e}",
                f"{row['same']:,} of {row['tokens']:,}",
            )
        )
    return markdown(heads, lines)
