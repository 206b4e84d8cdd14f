"""Exchange of shards of hidden states between tensor-parallel ranks (paper section 5).

Collectives must begin in the same order on every rank. Two communicators must not run at once on a
device, because each could wait for room that the other holds. So the exchange has its own process
group, and :class:`CollectiveOrder` keeps it and recomputation apart from forward passes. On a CPU
collectives block the scheduler thread before the rest of a restore begins: a rank whose restore
fails has taken part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hcache_backend.format.units import EIGHTHS, Shard
from hcache_backend.ranks import Group
from hcache_backend.streams import Event, Stream, current_stream

Fetch = Callable[[torch.Tensor], None]  # writes this rank's shard into the given memory


class ExchangeFailed(RuntimeError):
    """A rank could not give its shard."""


def shard_of_rank(rank: int, ranks: int, page_size: int) -> Shard:
    """The share of the tokens of every page that a tensor-parallel rank has. Beyond eight ranks
    several have the same; a ``page_size`` that eight does not divide is not shared."""
    shards = 1 if page_size % EIGHTHS else math.gcd(ranks, EIGHTHS)
    return Shard(rank % shards, shards)


class Exchange:
    """The ranks whose shards make whole pages. Scheduler thread only. ``number`` is this rank's
    shard. The groups are in the order of shards and used by nothing else; ``device_group`` is None
    if the device is the CPU."""

    def __init__(self, number: int, cpu_group: Group, device_group: Group = None) -> None:
        self.number, self.shards = number, dist.get_world_size(group=cpu_group)
        self._cpu_group, self._device_group = cpu_group, device_group

    @classmethod
    def between(cls, ranks: Sequence[int], device: torch.device | str) -> Exchange:
        """The exchange between global ``ranks``, in the order of shards. Makes its process groups,
        so all of them call this."""
        number = list(ranks).index(dist.get_rank())
        options = {"timeout": timedelta(minutes=5), "use_local_synchronization": True}
        groups = [dist.new_group(list(ranks), backend="gloo", **options)]
        if torch.device(device).type == "cuda":
            groups.append(dist.new_group(list(ranks), backend="nccl", **options))
        return cls(number, *groups)

    @property
    def on_scheduler_thread(self) -> bool:
        """True if collectives block the calling thread, as on a CPU."""
        return self._device_group is None

    def gather(self, shards: torch.Tensor, fetch: Fetch) -> None:
        """Fetch this rank's ``shards[number]`` and gather the others, on the current stream (GPU).
        ``shards``: uint8 ``[shards, ...]``, contiguous, on the device."""
        own_shard = shards[self.number]
        fetch(own_shard)
        dist.all_gather_into_tensor(shards.view(-1), own_shard.view(-1), group=self._device_group)

    def gather_now(self, shards: torch.Tensor, fetch: Fetch) -> None:
        """:meth:`gather`, in CPU memory; every rank takes part. Each rank's shard goes straight to
        its place: gloo's ``all_gather`` copies all of them twice more. Raises ExchangeFailed on all
        ranks if one could not fetch its shard."""
        problem, group = None, self._cpu_group
        try:
            fetch(shards[self.number])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        succeeded = torch.tensor([problem is None], dtype=torch.int32)
        collectives = [dist.all_reduce(succeeded, op=dist.ReduceOp.MIN, group=group, async_op=True)]
        for number, shard in enumerate(shards):
            collectives.append(dist.broadcast(shard, group=group, group_src=number, async_op=True))
        for collective in collectives:
            collective.wait()
        if not succeeded.item():
            reason = problem or "another rank failed"
            raise ExchangeFailed(f"shards of hidden states were not exchanged: {reason}")

    def check(self, device: torch.device | str) -> str | None:
        """Try the exchange, on all ranks at the same point; returns the problem, or None."""
        wanted = torch.arange(self.shards, dtype=torch.uint8).repeat_interleave(64).view(-1, 64)
        try:
            in_host_memory = torch.zeros_like(wanted)
            self.gather_now(in_host_memory, lambda own_shard: own_shard.fill_(self.number))
            if not torch.equal(in_host_memory, wanted):
                return "shards of the ranks arrive in another order than they were sent"
            if not self.on_scheduler_thread:
                on_device = torch.zeros((self.shards, 64), dtype=torch.uint8, device=device)
                self.gather(on_device, lambda own_shard: own_shard.fill_(self.number))
                if not torch.equal(on_device.cpu(), wanted):
                    return "shards of the ranks arrive in another order over the device's links"
        except Exception as error:  # a library's, or the network's
            return f"shards of the ranks cannot be exchanged: {type(error).__name__}: {error}"
        return None


class CollectiveOrder:
    """Keeps collectives of restores and of forward passes apart: never two at once on the device,
    and in the scheduler's order, the same on every rank. On a CPU both block that thread."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._forward: Stream | None = None
        self._restores: list[Event] = []

    def forward_begins(self) -> None:
        """Call before a forward pass is launched: its stream waits for launched restores."""
        self._forward = current_stream(self._device)
        launched_restores, self._restores = self._restores, []
        for event in launched_restores:
            self._forward.wait(event)

    def restore_begins(self, stream: Stream) -> None:
        """Call before ``stream`` gets a restore's collectives: it waits for launched passes."""
        if self._forward is not None and self._device.type != "cpu":
            launched = self._forward.record()
            stream.wait(launched)

    def restore_launched(self, stream: Stream) -> None:
        """Call when ``stream`` has got all collectives of a restore."""
        if self._device.type != "cpu":
            self._restores.append(stream.record())
