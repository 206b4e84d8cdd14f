"""Numbers and flags on which the ranks of one process group agree. Every rank must reach every
collective: nothing here may be called from a branch that only some ranks take. In each turn of the
scheduler tensor-parallel ranks agree once: every part of ours that depends on what differs between
them (an event that has passed, an estimate, a page that was read) adds its numbers to the turn
before, and acts on the smallest of each behind that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

logger = logging.getLogger("hcache")

Group: TypeAlias = dist.ProcessGroup | None  # None: a single rank

_Result = TypeVar("_Result")


class Refused(Exception):
    """A server cannot have a capability, such as hidden states; the message says why."""


class OutOfStep(RuntimeError):
    """Other ranks may wait for this one for ever: its server must end."""


def smallest(group: Group, *numbers: int) -> list[int]:
    """The smallest of each of ``numbers`` on all ranks of ``group``, by one MIN-reduce; of a flag 1
    if it is true on every rank. ``group`` is on the CPU (gloo); None: a single rank."""
    least = torch.tensor(numbers, dtype=torch.int64)
    if group is not None and dist.is_initialized() and dist.get_world_size(group=group) > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return list[int](least.tolist())


def sum_of_all_ranks(group: Group, table: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of ``group`` of each element of ``table`` (on the CPU). It is added in
    the order of ranks, so all ranks get the same bits; an all-reduce does not promise that."""
    if group is None or not dist.is_initialized() or dist.get_world_size(group=group) == 1:
        return table
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size(group=group))]
    dist.all_gather(tables, table.contiguous(), group=group)
    return torch.stack(tables).sum(0)


def all_or_none(groups: tuple[Group, ...], work: Callable[[], _Result]) -> _Result:
    """The result of ``work`` on this rank; raises Refused on every rank if ``work`` raised on one.
    ``work`` may use collectives, if it reaches all of them before it raises. ``groups`` are on the
    CPU (tensor-parallel ranks, perhaps pipeline stages): one MIN-reduce in each brings agreement.
    """
    reason: str | None = None
    try:
        result = work()
    except Refused as refused:
        reason = str(refused)
    except Exception as error:
        logger.error("hcache: the self-check raised an error", exc_info=error)
        reason = f"the self-check raised an error: {type(error).__name__}: {error}"
    fine: int = reason is None  # on this rank; after each reduce on all ranks of the groups so far
    for group in groups:
        [fine] = smallest(group, fine)
    if not fine:
        raise Refused(reason or "another tensor-parallel rank or pipeline stage refused")
    return result


class Proposal(NamedTuple):
    """Numbers that one part of ours added to a turn: where they are among all of them."""

    turn: Turn
    places: slice

    @property
    def least(self) -> list[int]:
        """The smallest of each on all ranks; known once the ranks have agreed."""
        return self.turn.least[self.places]


class Turn:
    """Numbers of this rank in one turn. Every rank has equally many, in the same order."""

    def __init__(self, cache: Any = None) -> None:
        self.cache = cache  # SGLang's radix cache, whose turn it is
        self.least: list[int] = []  # the smallest of each on all ranks, from :meth:`agree`
        self._numbers: list[int] = []

    def propose(self, *numbers: int) -> Proposal:
        self._numbers += numbers
        return Proposal(self, slice(len(self._numbers) - len(numbers), len(self._numbers)))

    def agree(self, reduce: Callable[[torch.Tensor, Any], object]) -> None:
        """Reduce the proposed numbers of all ranks, if any, by ``reduce(tensor, operation)``."""
        numbers = torch.tensor(self._numbers, dtype=torch.int64)
        if self._numbers:
            reduce(numbers, dist.ReduceOp.MIN)
        self.least = numbers.tolist()
