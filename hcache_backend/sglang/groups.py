"""SGLang's groups of ranks, and messages between pipeline stages."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hcache_backend.config import ConfigError

logger = logging.getLogger("hcache")

_Result = TypeVar("_Result")

_STOP_SECONDS = 10.0  # SGLang kills its ranks at once; if not, they end by themselves


def attention_ranks() -> Any:
    """SGLang's group of the ranks that have heads of one request, for calls that all of them make.
    With data-parallel attention it is a part of the tensor-parallel ranks."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return get_attn_tp_group()


def said_by_all_ranks(own: Any) -> list[Any]:
    """``own`` (pickled) of all ranks that attach a storage backend together: those of one
    data-parallel group, because such groups attach one by one."""
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
            said = [item for part in group.all_gather_object(said) for item in part]
    return said


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


class PipelineStages:
    """Gathers values of all pipeline stages, during the scheduler's work. All construct it at one
    point.

    A stage passes a request on only after it is done with it. If the scheduler thread waited for an
    answer to a request (new weights), the next stage would never get that request. So exchanges
    have their own group and thread, and end in the order in which they began, on every stage.
    """

    def __init__(self) -> None:
        self._group = _new_stage_group()
        self._said: SimpleQueue[tuple[Any, Future[list[Any]]]] = SimpleQueue()
        if self._group is not None:
            threading.Thread(target=self._exchange, name="hcache-stages", daemon=True).start()

    @property
    def alone(self) -> bool:
        return self._group is None

    def say(self, own: Any) -> Future[list[Any]]:
        """Values of all stages (pickled), in order, once each has said one; every stage must."""
        future: Future[list[Any]] = Future()
        if self._group is None:
            future.set_result([own])
        else:
            self._said.put((own, future))
        return future

    def _exchange(self) -> None:
        while True:
            own, future = self._said.get()
            every: list[Any] = [None] * dist.get_world_size(group=self._group)
            try:
                dist.all_gather_object(every, own, group=self._group)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(every)


class FirstStage:
    """Decisions of the first pipeline stage, on every stage. All must construct it at one point.
    Ask it while a step is put together: the first stage begins that before the others, so they wait
    for a decision that is under way. The first stage never waits: the others may still be busy with
    the step before, until it has gone on with this one."""

    def __init__(self) -> None:
        self._group = _new_stage_group()
        self._decided: list[SimpleQueue[bool]] = []
        if self._group is not None and self.is_here:
            # A thread for each: one stage may be waiting for another that waits for a decision.
            for stage in range(1, dist.get_world_size(group=self._group)):
                self._decided.append(SimpleQueue())
                threading.Thread(
                    target=self._tell, args=(stage,), name=f"hcache-stage-{stage}", daemon=True
                ).start()

    @property
    def is_here(self) -> bool:
        return self._group is None or dist.get_rank(group=self._group) == 0

    def decide(self, verdict: bool) -> bool:
        """The first stage's ``verdict``; those of other stages are ignored."""
        if self._group is None:
            return verdict
        if self.is_here:
            for decided in self._decided:
                decided.put(verdict)
            return verdict
        message = torch.empty((), dtype=torch.int32)
        dist.recv(message, group_src=0, group=self._group)
        return bool(message)

    def _tell(self, stage: int) -> None:
        while True:
            message = torch.tensor(self._decided[stage - 1].get(), dtype=torch.int32)
            dist.send(message, group_dst=stage, group=self._group)


def _new_stage_group() -> Any:
    """A gloo process group of this rank's pipeline stages, or None if there is one stage."""
    if not dist.is_initialized():
        return None
    from sglang.srt.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return None
    # One stage may send its value hours after another one, when its next request comes.
    patience = timedelta(days=20)
    return dist.new_group(group.ranks, patience, backend="gloo", use_local_synchronization=True)
