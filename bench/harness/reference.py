"""The reference of a run: always another run, or no comparison could fail."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

_Run = TypeVar("_Run")


class OwnReference(ValueError):
    """A row of results would be compared with itself."""


def reference_of(row: str, run: object, reference: _Run) -> _Run:
    """The run that a row is compared with.

    Raises:
        OwnReference: It is the same run.
    """
    if run is reference:
        raise OwnReference(
            f"the reference of row {row!r} is the row's own run; it must be another run"
        )
    return reference


@dataclass
class Scores:
    """One run's scores of the tokens of some texts, each after the true ones before it.

    Attributes:
        best: The token that the run finds most likely in the place of each.
        logprobs: Log-probability of each.
    """

    best: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, best: Sequence[int], logprobs: Sequence[float]) -> None:
        """Those of one more text."""
        self.best += best
        self.logprobs += logprobs


@dataclass(frozen=True)
class Agreement:
    """How near the scores of a run are to those of its reference.

    Attributes:
        same: For how many tokens both find the same token most likely.
        mean_difference: Of the log-probabilities.
    """

    tokens: int
    same: int
    mean_difference: float
    largest_difference: float


def agreement(row: str, run: Scores, reference: Scores) -> Agreement:
    """Compare scores of the same texts.

    Raises:
        OwnReference: They are the same run's.
    """
    reference = reference_of(row, run, reference)
    same = [got == want for got, want in zip(run.best, reference.best, strict=True)]
    differences = [
        abs(got - want) for got, want in zip(run.logprobs, reference.logprobs, strict=True)
    ]
    return Agreement(len(same), sum(same), fmean(differences), max(differences))
