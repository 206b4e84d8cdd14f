"""One agreement of the tensor-parallel ranks in each turn of the scheduler.

Every part of ours that depends on what differs between tensor-parallel ranks (an event that has
passed, an estimate, a page that was read) adds its numbers to the turn before the ranks agree, and
acts on the smallest of each behind that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist


class Part(Protocol):
    """A part of ours that has something to do in every turn. Scheduler thread only."""

    def ask(self, turn: Turn) -> None:
        """Add what this rank knows."""

    def hear(self) -> None:
        """The ranks have agreed."""

    def forget(self) -> None:
        """L1 and L2 are emptied, and all that waits was dropped."""


class Said(NamedTuple):
    """Numbers that a part of ours added to a turn, and where they are among all of it."""

    turn: Turn
    where: slice

    @property
    def least(self) -> list[int]:
        """The smallest of each on all ranks; known once the ranks have agreed."""
        return self.turn.least[self.where]


class Turn:
    """What this rank says in one turn. Every rank says equally many numbers, in the same order.

    Attributes:
        cache: SGLang's radix cache, whose turn it is.
        least: The smallest of each number on all ranks, from :meth:`agree`.
    """

    def __init__(self, cache: Any = None) -> None:
        self.cache = cache
        self.least: list[int] = []
        self._own: list[int] = []

    def say(self, *numbers: int) -> Said:
        self._own += numbers
        return Said(self, slice(len(self._own) - len(numbers), len(self._own)))

    def agree(self, reduce: Callable[[torch.Tensor, Any], object]) -> None:
        """Reduce the numbers of all ranks, if there are any, by ``reduce(tensor, operation)``."""
        numbers = torch.tensor(self._own, dtype=torch.int64)
        if self._own:
            reduce(numbers, dist.ReduceOp.MIN)
        self.least = numbers.tolist()
