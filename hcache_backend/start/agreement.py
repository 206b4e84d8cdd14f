"""Agreement of ranks at start-up: all take a step towards hidden mode, or none. A wrong option
stops all of them, once, and before anything is set up for it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hcache_backend.config import ConfigError
from hcache_backend.ranks import on_all_ranks
from hcache_backend.sglang.groups import said_by_all_ranks

logger = logging.getLogger("hcache")

_Result = TypeVar("_Result")

_STOP_SECONDS = 10.0  # SGLang kills its ranks at once; if not, they end by themselves


class Refused(Exception):
    """A server cannot have a capability, such as hidden mode; the message says why."""


def all_or_none(work: Callable[[], _Result], *groups: Any) -> _Result:
    """The result of ``work`` on this rank; raises Refused on every rank if it failed on one.

    - Every rank reaches every collective, in the same order.
    - All ranks learn the outcome, by one MIN-reduce per group, before any rank goes on. So all of
      them leave at the same step.
    - Work with collectives must reach each of them whatever it finds, and refuse after the last.

    ``groups`` are on the CPU: tensor-parallel ranks, and pipeline stages if there is no fallback.
    """
    reason: str | None = None
    try:
        result = work()
    except Refused as refused:
        reason = str(refused)
    except Exception as error:
        logger.error("hcache: the self-check raised an error", exc_info=error)
        reason = f"the self-check raised an error: {type(error).__name__}: {error}"
    fine = reason is None
    for group in groups:
        (fine,) = on_all_ranks(group, fine)
    if not fine:
        raise Refused(reason or "another tensor-parallel rank or pipeline stage refused")
    return result


def or_stop(work: Callable[[], _Result]) -> _Result:
    """The result of ``work`` on this rank; stops the server if a rank found a wrong option.

    All ranks of a data-parallel group call it at one point. A ConfigError on one raises SystemExit
    on all, with one log line: to an exception SGLang adds tracebacks that hide the message.
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    launcher = socket.gethostname(), os.getppid()
    problem: str | None = None
    try:
        result = work()
    except ConfigError as error:
        problem = str(error)
    said = said_by_all_ranks((own, launcher, problem))
    found = [rank for rank, _, what in said if what is not None]
    if not found:
        return result
    if found[0] == own:
        logger.error("%s", problem)
    said_by_all_ranks(None)  # the first signal ends all ranks, so it comes after that line
    if own == next(rank for rank, other, _ in said if other == launcher):
        # SGLang's schedulers send this signal when they fail. A second one would add a traceback
        # while the handler logs the first.
        os.kill(os.getppid(), signal.SIGQUIT)
    else:
        time.sleep(_STOP_SECONDS)  # a launcher that sees a rank end logs that instead
    raise SystemExit(1)
