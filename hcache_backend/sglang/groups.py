"""SGLang's groups of ranks."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from hcache_backend.config import ConfigError
from hcache_backend.metrics import logger
from hcache_backend.ranks import Group

_Result = TypeVar("_Result")

_STOP_SECONDS = 10.0  # SGLang kills its ranks at once; if not, they end by themselves


def attention_ranks() -> Any:
    """SGLang's group of the ranks that have heads of one request, for calls that all of them make.
    With data-parallel attention it is a part of the tensor-parallel ranks."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return get_attn_tp_group()


def new_stage_group() -> Group:
    """A gloo process group of this rank's pipeline stages; None if there is one stage."""
    if not dist.is_initialized():
        return None
    from sglang.srt.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return None
    # One stage may send its value hours after another one, when its next request comes.
    patience = timedelta(days=20)
    return dist.new_group(group.ranks, patience, backend="gloo", use_local_synchronization=True)


def from_all_ranks(value: _Result) -> list[_Result]:
    """``value`` (pickled) of all ranks that attach a storage backend together, in one order."""
    if not dist.is_initialized():
        return [value]
    from sglang.srt.distributed import parallel_state as state

    gathered = [value]
    for group in (state.get_attn_tp_group(), state.get_attn_cp_group(), state.get_pp_group()):
        if group.world_size > 1:
            gathered = [item for part in group.all_gather_object(gathered) for item in part]
    return gathered


def or_stop(work: Callable[[], _Result]) -> _Result:
    """The result of ``work`` on this rank. All ranks of a data-parallel group call it at one point.
    A ConfigError on one raises SystemExit on all, with one log line and no traceback."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    launcher = socket.gethostname(), os.getppid()
    problem: str | None = None
    try:
        result = work()
    except ConfigError as error:
        problem = str(error)
    gathered = from_all_ranks((rank, launcher, problem))
    failed = [other for other, _, its_problem in gathered if its_problem is not None]
    if not failed:
        return result
    if failed[0] == rank:
        logger.error("%s", problem)
    from_all_ranks(None)  # the first signal ends all ranks, so it comes after that line
    if rank == next(other for other, its_launcher, _ in gathered if its_launcher == launcher):
        # SGLang's schedulers send this signal when they fail; a second one would add a traceback.
        os.kill(os.getppid(), signal.SIGQUIT)
    else:
        time.sleep(_STOP_SECONDS)  # a launcher that sees a rank end logs that instead
    raise SystemExit(1)
