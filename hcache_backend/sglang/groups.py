"""SGLang's groups of ranks, and what pipeline stages tell each other."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist


def attention_ranks() -> Any:
    """SGLang's group of the ranks that have heads of one request; all of them are called at one
    point. With data-parallel attention it is a part of the tensor-parallel ones."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return get_attn_tp_group()


def said_by_all_ranks(own: Any) -> list[Any]:
    """What every rank that attaches a storage backend together with this one says.

    These are the ranks of one data-parallel group: its tensor-parallel, context-parallel and
    pipeline-parallel ranks. Data-parallel groups attach one by one. ``own`` is pickled.
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
            said = [item for part in group.all_gather_object(said) for item in part]
    return said


class PipelineStages:
    """What every pipeline stage says, gathered while the scheduler goes on.

    A stage passes a request on when it is done with it. So what a request makes it say (new
    weights) must not be waited for on the scheduler thread: the next stage would never hear of it.
    The exchanges have a process group and a thread of their own, and end in the order in which
    they began, which is the same on every stage.

    All stages must construct it at the same point.
    """

    def __init__(self) -> None:
        self._group = _new_stage_group()
        self._said: SimpleQueue[tuple[Any, Future[list[Any]]]] = SimpleQueue()
        if self._group is not None:
            threading.Thread(target=self._exchange, name="hcache-stages", daemon=True).start()

    @property
    def alone(self) -> bool:
        """Whether there is one stage only."""
        return self._group is None

    def say(self, own: Any) -> Future[list[Any]]:
        """What all stages said (pickled), in their order, once they did; all must say something."""
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
    """What the first pipeline stage decides, on every stage. All must construct it at one point.

    To be asked while a step is being put together: the first stage begins that before the others
    do, so what they wait for is under way. It never waits itself: they may still be busy with the
    step before, until it has gone on with this one.
    """

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
        """Whether this is the first stage, or the only one."""
        return self._group is None or dist.get_rank(group=self._group) == 0

    def decide(self, verdict: bool) -> bool:
        """``verdict`` of the first stage; what the others say is not looked at."""
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
    """A process group of this rank's pipeline stages (gloo), or None where there is one stage."""
    if not dist.is_initialized():
        return None
    from sglang.srt.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return None
    # One stage may say a thing hours after another one, when its next request comes.
    patience = timedelta(days=20)
    return dist.new_group(group.ranks, patience, backend="gloo", use_local_synchronization=True)
