"""Agreement between ranks at start-up: all take a step towards hidden mode, or none does.

A wrong option stops all of them, once and before anything is set up for it.
"""

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

_STOP_SECONDS = 10.0
"""SGLang kills its ranks at once; if not, they end by themselves."""


class Refused(Exception):
    """This server cannot use hidden mode and stores KV pages; the message says why."""


def all_or_none(work: Callable[[], _Result], *groups: Any) -> _Result:
    """What ``work`` returns on this rank, when it went well on every rank.

    The invariant: every rank reaches every collective, in the same order. All ranks learn whether
    ``work`` went well on all of them (one MIN-reduce per group, whatever happened), and only then
    does any rank go on. So they all leave at the same step. Work that talks to other ranks itself
    must reach each of its collectives whatever it finds, and refuse after the last.

    Args:
        groups: Process groups on the CPU that have to agree: tensor-parallel ranks and, where
            there is no way back, pipeline stages.

    Raises:
        Refused: On every rank, when ``work`` failed on one of them.
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
    """What ``work`` returns on this rank, when no rank found a wrong option in it.

    Otherwise the server stops, with one line in the log: to an exception SGLang adds tracebacks
    that hide the message. All ranks of a data-parallel group must call it at one point.

    Raises:
        SystemExit: On every rank, when ``work`` raised a ConfigError on one of them.
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
    said_by_all_ranks(None)  # the first signal ends all: it waits for that line
    if own == next(rank for rank, other, _ in said if other == launcher):
        # What SGLang's schedulers send when they fail. A second one, while its handler logs the
        # first, would add a traceback.
        os.kill(os.getppid(), signal.SIGQUIT)
    else:
        time.sleep(_STOP_SECONDS)  # a launcher that saw a rank end would log that instead
    raise SystemExit(1)
