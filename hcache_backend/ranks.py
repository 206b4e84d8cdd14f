"""Numbers and flags on which the ranks of one process group agree.

Every rank must reach every collective: nothing here may be called from a branch that only some
ranks take.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class OutOfStep(RuntimeError):
    """Other ranks may wait for this one for ever: its server must end."""


def on_all_ranks(group: Any, *flags: bool) -> tuple[bool, ...]:
    """For each flag, whether it is true on every rank of ``group`` (one MIN-reduce).

    Args:
        group: A process group on the CPU (gloo), or None for a single rank.
    """
    return tuple(bool(flag) for flag in smallest(group, *flags))


def smallest(group: Any, *numbers: int) -> list[int]:
    """The smallest on all ranks of ``group``, for each of ``numbers``; see :func:`on_all_ranks`."""
    least = torch.tensor(numbers, dtype=torch.int64)
    if group is not None and dist.is_initialized() and dist.get_world_size(group=group) > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    found: list[int] = least.tolist()
    return found


def sum_of_all_ranks(group: Any, own: torch.Tensor) -> torch.Tensor:
    """What all ranks of ``group`` have, on the CPU, added in their order: the same on each, to the
    bit."""
    if group is None or not dist.is_initialized() or dist.get_world_size(group=group) == 1:
        return own
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group=group))]
    dist.all_gather(every, own.contiguous(), group=group)
    return torch.stack(every).sum(0)
