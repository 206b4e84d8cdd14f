"""Ranks of one process: threads, whose collectives end when all of them are in there."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

SECONDS = 60
"""After so long a rank is alone in a collective."""


class Ranks:
    """Their collectives; the group of a rank is its number."""

    def __init__(self, ranks: int) -> None:
        self._said: list[Any] = [None] * ranks
        self._barrier = Barrier(ranks, timeout=SECONDS)

    def gather(self, rank: int, own: Any) -> list[Any]:
        self._said[rank] = own
        self._barrier.wait()
        every = [*self._said]
        self._barrier.wait()
        return every

    def smallest(self, rank: int, *numbers: int) -> list[int]:
        return [min(each) for each in zip(*self.gather(rank, numbers), strict=True)]

    def reduce(self, rank: int) -> Callable[[torch.Tensor, Any], object]:
        """The reduction of a turn, for a rank."""
        return lambda numbers, _: numbers.copy_(
            torch.tensor(self.smallest(rank, *numbers.tolist()))
        )

    def sum_of_all_ranks(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(rank, own.clone())).sum(0)


def together(work: Callable[[Any], Any], ranks: Sequence[Any]) -> list[Any]:
    """What ``work`` gives on each of ``ranks``, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(work, ranks)]
