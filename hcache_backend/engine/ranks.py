"""Agreement between tensor-parallel ranks.

Every rank must reach every collective: nothing here may be called from a branch that only some
ranks take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_Value = TypeVar("_Value")


def on_all_ranks(group: Any, *flags: bool) -> tuple[bool, ...]:
    """For each flag, whether it is true on every rank of ``group`` (one MIN-reduce).

    Args:
        group: A process group on the CPU (gloo), or None for a single rank.
    """
    verdict = torch.tensor(flags, dtype=torch.int32)
    if group is not None and dist.is_initialized() and dist.get_world_size(group=group) > 1:
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    return tuple(bool(flag) for flag in verdict.tolist())


def from_first_rank(group: Any, make: Callable[[], _Value]) -> _Value:
    """What ``make`` gives on the group's first rank, on every rank; only that one calls it.

    Args:
        group: As in :func:`on_all_ranks`.
        make: Gives something that can be pickled, and does not raise.
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group=group) == 1:
        return make()
    first = dist.get_global_rank(group, 0)
    box: list[Any] = [make() if dist.get_rank() == first else None]
    dist.broadcast_object_list(box, src=first, group=group)
    value: _Value = box[0]
    return value


def said_by_all_ranks(own: Any) -> list[Any]:
    """What every rank that attaches a storage backend together with this one says.

    These are the ranks of one data-parallel group: its tensor-parallel, context-parallel and
    pipeline-parallel ranks. Data-parallel groups attach one by one.

    Args:
        own: What this rank says; it is pickled.
    """
    if not dist.is_initialized():
        return [own]
    from sglang.srt.distributed import parallel_state

    said = [own]
    for group in (
        parallel_state.get_attn_tp_group(),
        parallel_state.get_attn_cp_group(),
        parallel_state.get_pp_group(),
    ):
        if group.world_size > 1:
            every: list[list[Any]] = [[]] * group.world_size
            dist.all_gather_object(every, said, group=group.cpu_group)
            said = [item for part in every for item in part]
    return said
