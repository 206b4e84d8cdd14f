"""Tensor-parallel ranks bring their shares of the hidden states together (paper section 5).

Collectives must begin in the same order on every rank, and two communicators must not run at the
same time on one device, where each could wait for room that the other holds. So the exchange has a
process group of its own, and :class:`CollectiveOrder` keeps it, and recomputation, apart from the
engine's forward passes. On a CPU the collectives run on the calling (scheduler) thread, before
anything else of the restore is launched: a rank whose restore fails has still taken part in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hcache_backend.format.units import EIGHTHS, Share
from hcache_backend.streams import Event, Stream, current_stream

_TIMEOUT = timedelta(minutes=5)

Fetch = Callable[[torch.Tensor], None]
"""Writes this rank's share of something into the memory that it is given."""


class ExchangeFailed(RuntimeError):
    """A rank could not give its share."""


def share_of_rank(rank: int, ranks: int, page_size: int) -> Share:
    """Which share of the tokens of every page belongs to a tensor-parallel rank.

    With more than eight ranks, several have the same. Pages of ``page_size`` tokens that do not
    divide into eighths are not shared.

    """
    shares = 1 if page_size % EIGHTHS else math.gcd(ranks, EIGHTHS)
    return Share(rank % shares, shares)


class Exchange:
    """The ranks whose shares make whole pages. Only the scheduler thread may use it.

    Args:
        number: Number of this rank's share.
        cpu_group: Their process group on the CPU (gloo), in the order of their shares; nobody else
            uses it.
        device_group: The same for memory of the device; None: the device is the CPU.

    Attributes:
        shares: How many there are.
    """

    def __init__(self, number: int, cpu_group: Any, device_group: Any = None) -> None:
        self.number = number
        self.shares = dist.get_world_size(group=cpu_group)
        self._cpu_group = cpu_group
        self._device_group = device_group

    @classmethod
    def between(cls, ranks: Sequence[int], device: torch.device | str) -> Exchange:
        """Make the process groups of global ``ranks``, in the order of their shares.

        Each of them must call this at the same point.
        """
        own = list(ranks).index(dist.get_rank())
        options = {"timeout": _TIMEOUT, "use_local_synchronization": True}
        groups = [dist.new_group(list(ranks), backend="gloo", **options)]
        if torch.device(device).type == "cuda":
            groups.append(dist.new_group(list(ranks), backend="nccl", **options))
        return cls(own, *groups)

    @property
    def on_scheduler_thread(self) -> bool:
        """Whether collectives block the calling thread, as on a CPU."""
        return self._device_group is None

    def gather(self, shares: torch.Tensor, fetch: Fetch) -> None:
        """Fetch this rank's share and gather those of the others, on the current stream (GPU).

        Args:
            shares: uint8 ``[shares, ...]``, contiguous, on the device; written.
            fetch: Writes this rank's, ``shares[number]``.
        """
        own = shares[self.number]
        fetch(own)
        dist.all_gather_into_tensor(shares.view(-1), own.view(-1), group=self._device_group)

    def gather_now(self, wanted: Sequence[tuple[torch.Tensor, Fetch]]) -> None:
        """The same for the arguments of several calls, in memory of the CPU, at once.

        Every rank enters every collective, whatever happens to it.

        Raises:
            ExchangeFailed: On all ranks, when one could not fetch its share.
        """
        problem: str | None = None
        for shares, fetch in wanted:
            own = shares[self.number]
            if problem is None:
                try:
                    fetch(own)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
            parts = [part.view(-1) for part in shares]
            dist.all_gather(parts, own.reshape(-1).clone(), group=self._cpu_group)
        fine = torch.tensor([problem is None], dtype=torch.int32)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=self._cpu_group)
        if not fine.item():
            reason = problem or "another rank failed"
            raise ExchangeFailed(f"shares of hidden states were not exchanged: {reason}")

    def whole(self, share: torch.Tensor) -> torch.Tensor:
        """All shares of ``share`` (on the CPU), one after the other in its first dimension.

        Raises:
            ExchangeFailed: As for :meth:`gather_now`.
        """
        shares = share.new_empty((self.shares, *share.shape))
        self.gather_now([(shares, lambda own: own.copy_(share))])
        return shares.flatten(0, 1)

    def check(self, device: torch.device | str) -> str | None:
        """Try it: why it does not work, or None. Every rank must call it at the same point."""
        want = torch.arange(self.shares, dtype=torch.uint8).repeat_interleave(64).view(-1, 64)
        try:
            here = self.whole(torch.full((1, 64), self.number, dtype=torch.uint8))
            if not torch.equal(here, want):
                return "shares of the ranks arrive in another order than they were sent"
            if not self.on_scheduler_thread:
                there = torch.zeros((self.shares, 64), dtype=torch.uint8, device=device)
                self.gather(there, lambda own: own.fill_(self.number))
                if not torch.equal(there.cpu(), want):
                    return "shares of the ranks arrive in another order over the device's links"
        except Exception as error:  # a library's, or the network's
            return f"shares of the ranks cannot be exchanged: {type(error).__name__}: {error}"
        return None


class CollectiveOrder:
    """Keeps the collectives of restores and of the engine's forward passes apart, on the device.

    They run in the order in which the scheduler launched them, which is the same on every rank, and
    never two at once. On a CPU there is nothing to do: both block the scheduler thread.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._forward: Stream | None = None
        self._restores: list[Event] = []

    def forward_begins(self) -> None:
        """A forward pass is about to be launched on the current stream."""
        self._forward = current_stream(self._device)
        restores, self._restores = self._restores, []
        for event in restores:
            self._forward.wait(event)

    def restore_begins(self, *streams: Stream) -> None:
        """``streams`` are about to be given collectives of a restore."""
        if self._forward is None or self._device.type == "cpu":
            return
        launched = self._forward.record()
        for stream in streams:
            stream.wait(launched)

    def restore_launched(self, *streams: Stream) -> None:
        """They were given all of them."""
        if self._device.type != "cpu":
            self._restores += [stream.record() for stream in streams]
