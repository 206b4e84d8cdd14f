"""Scores of the next turn, with its history's K and V kept by each method.

The reference is a run without a cache: the model computes history and turn at once. A method has
the history's K and V restored; then the turn behind it is computed and compared.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from bench.accuracy.engine import Engine, History
from bench.accuracy.methods import EXACT, Method
from bench.accuracy.pairs import mergeable
from bench.fixtures.text import Text, Texts
from bench.harness.program import Advance
from bench.harness.reference import reference_of
from hcache_backend.projection.exactness import relative_difference

_KEYS, _GAP = 16, 4  # keys of a text's planted lines, and tokens of source between these on average


@dataclass(frozen=True)
class Sizes:
    """How many texts are scored; tokens of each that are kept (whole pages), and of the turn behind
    them."""

    texts: int
    history: int
    turn: int
    seed: int = 0

    def draw(self, texts: Texts) -> Iterator[Text]:
        """The texts, each with a value in its turn that its history gives."""
        source, found = random.Random(self.seed), 0
        while found < self.texts:
            text = texts.draw(source, self.history + self.turn, _KEYS, _GAP)
            if any(self.asks(text)):
                found += 1
                yield text

    def asks(self, text: Text) -> Iterator[tuple[slice, int]]:
        """Values that the turn recalls from the history: places in the turn, and the distance."""
        for value in text.recalled:
            # The turn's first token is the reference's only: its history has no further place.
            if value.given < self.history < value.start:
                turn = slice(value.start - self.history - 1, value.stop - self.history - 1)
                yield turn, value.start - value.given


@dataclass
class Found:
    """A run over all turns.

    Attributes:
        nll: Negative log-likelihood of every true token, in nats.
        kl: Divergence of the run from the reference at every token, in nats.
        same: Whether both find the same token most likely, at every token.
        recalled: Whether each value was recalled, with the distance in tokens.
        lost: Tokens of histories that the method could not keep.
        error: Largest relative error of K and of V of any layer and head.
    """

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    recalled: list[tuple[int, bool]] = field(default_factory=list)
    lost: int = 0
    error: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(
        self, said: torch.Tensor, turn: torch.Tensor, asks: Iterator[tuple[slice, int]]
    ) -> None:
        """Score log-probabilities ``said`` in the place of each token of a turn, ``[n, vocab]``;
        ``turn``: the true tokens, int64 ``[n]``."""
        self.nll += (-said.gather(1, turn[:, None])[:, 0]).tolist()
        right = said.argmax(-1) == turn
        self.recalled += [(far, bool(right[places].all())) for places, far in asks]

    def compare(self, row: str, said: torch.Tensor, reference: torch.Tensor) -> None:
        """Compare log-probabilities of a turn with the reference's.

        Raises:
            OwnReference: It is the same run.
        """
        reference = reference_of(row, said, reference)
        self.kl += (reference.exp() * (reference - said)).sum(-1).tolist()
        self.same += (reference.argmax(-1) == said.argmax(-1)).tolist()

    def report(self) -> dict[str, Any]:
        found = {
            "tokens": len(self.nll),
            "nll": sum(self.nll) / len(self.nll),
            "recall": by_distance(self.recalled),
        }
        if self.kl:
            found |= {"kl": sum(self.kl) / len(self.kl), "largest_kl": max(self.kl)}
            found |= {"same": sum(self.same), "not_kept": self.lost}
        return found

    def errors(self) -> dict[str, float]:
        return dict(zip(("k_error", "v_error"), self.error, strict=True))


def by_distance(recalled: Sequence[tuple[int, bool]]) -> dict[str, list[int]]:
    """How many values were recalled, and of how many, by the power of two above their distance."""
    found: dict[int, list[int]] = {}
    for far, right in recalled:
        until = next(1 << bits for bits in count(5) if far <= 1 << bits)
        hits = found.setdefault(until, [0, 0])
        hits[0] += right
        hits[1] += 1
    return {str(until): found[until] for until in sorted(found)}


@torch.inference_mode()
def score(
    engine: Engine, texts: Texts, sizes: Sizes, advance: Advance, known: Sequence[Method]
) -> dict[str, Any]:
    """Score every method on every text."""
    reference, runs = Found(), [Found() for _ in known]
    for number, text in enumerate(sizes.draw(texts)):
        advance(f"text {number + 1}")
        kept, rest = text.ids[: sizes.history], text.ids[sizes.history :]
        whole = engine.compute(text.ids)[sizes.history : -1]
        turn = torch.tensor(rest[1:], device=whole.device)
        reference.add(whole, turn, sizes.asks(text))
        history = engine.history(kept)
        for method, found in zip(known, runs, strict=True):
            engine.forget(history)
            found.lost += method.restore(history)
            _compare_kv(engine, history, method, found)
            said = engine.go_on(history, rest)[:-1]
            found.add(said, turn, sizes.asks(text))
            found.compare(method.name, said, whole)
    return {
        "exactness": engine.exactness,
        "krul": mergeable(engine),
        "reference": reference.report(),
        "methods": [
            {
                "method": method.name,
                "bytes_per_token": method.bytes_per_token,
                **found.report(),
                **({} if method.pairs is None else {"pairs": dict(method.pairs)}),
                # The others are compared with exact K and V.
                **({} if method.name == EXACT else found.errors()),
            }
            for method, found in zip(known, runs, strict=True)
        ],
    }


def _compare_kv(engine: Engine, history: History, method: Method, found: Found) -> None:
    for layer, wanted in zip(engine.layers, history.kv, strict=True):
        got = engine.pool.fetch(layer.kernel, history.slots, engine.dtype)
        for part in (0, 1):
            error = relative_difference(got[part], wanted[part])
            found.error[part] = max(found.error[part], error)
