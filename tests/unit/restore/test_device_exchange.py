"""Ranks that exchange shares over a group of their device: two processes, gloo for its links.

Streams are worker threads, so restores and forward passes really run beside each other.
"""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hcache_backend import streams
from hcache_backend.restore.exchange import CollectiveOrder, Exchange
from tests.unit.restore.test_exchange import run_ranks

GPU = torch.device("cuda", 0)


def with_a_device_group(exchange: Exchange) -> Exchange:
    """The same ranks with a second group, which stands for NCCL's."""
    make = dist.new_group

    def gloo(ranks: list[int], backend: str, **options: Any) -> Any:
        made.append(backend)
        return make(ranks, backend="gloo", **options)

    made: list[str] = []
    with patch.object(dist, "new_group", gloo):
        whole = Exchange.between(range(exchange.shares), GPU)
    assert made == ["gloo", "nccl"] and not whole.on_scheduler_thread
    return whole


def shares_arrive(exchange: Exchange) -> list[Any]:
    """What the check says, also of ranks in another order, and rows of every restore."""
    whole = with_a_device_group(exchange)
    turned = Exchange(1 - whole.number, whole._cpu_group, whole._device_group)
    found = [whole.check("cpu"), turned.check("cpu")]

    def swapped(self: Exchange, shares: torch.Tensor, fetch: Any) -> None:
        shares[1 - self.number].copy_(shares[self.number])

    with patch.object(Exchange, "gather", swapped):
        found.append(whole.check("cpu"))
    with patch.object(Exchange, "gather", lambda *_: 1 / 0):
        found.append(whole.check("cpu"))
    own = torch.zeros((2, 4), dtype=torch.uint8)
    whole.gather(own, lambda mine: mine.fill_(whole.number + 1))
    return [*found, own.tolist()]


def test_shares_arrive_over_the_links_of_the_device() -> None:
    for fine, turned, swapped, broken, rows in run_ranks(shares_arrive, 2):
        assert fine is None
        assert "another order than they were sent" in turned
        assert "another order over the device's links" in swapped
        assert "cannot be exchanged: ZeroDivisionError" in broken
        assert rows == [[1] * 4, [2] * 4]


class Door(streams.Door):
    """A GPU whose streams are threads."""

    def __init__(self) -> None:
        self.forward = streams.WorkerStream("forward")

    def new_stream(self, device: torch.device, name: str, *, in_turn: bool = False) -> Any:
        return streams.WorkerStream(name)

    def current_stream(self, device: torch.device) -> Any:
        return self.forward


class Contended:
    """One link between ranks, and the numbers that forward passes and restores send over it."""

    def __init__(self, exchange: Exchange, ordered: bool) -> None:
        self.links = with_a_device_group(exchange)._device_group
        self.number = exchange.number
        self.seconds = 0.2 if ordered else 20.0

    def send(self, value: int) -> list[int]:
        """What all ranks sent in this collective."""
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(every, torch.tensor([value]), group=self.links)
        return [int(one) for one in every]


def forward_beside_restore(exchange: Exchange, *, ordered: bool) -> dict[str, list[int]]:
    """On each rank another of the two streams is the slower one: it waits for the other one's
    collective, for a while, if no order forbids that."""
    door = Door()
    with streams.through(door):
        contended, order = Contended(exchange, ordered), CollectiveOrder(GPU)
        restores = streams.new_stream(GPU, "restores")
        sent = {"forward": threading.Event(), "restore": threading.Event()}
        got: dict[str, list[int]] = {}

        def work(name: str, value: int, slow_rank: int) -> None:
            other = next(event for one, event in sent.items() if one != name)
            if contended.number == slow_rank:
                other.wait(contended.seconds)
            got[name] = contended.send(value)
            sent[name].set()

        order.forward_begins()
        door.forward.run(lambda: work("forward", 1, 0))
        if ordered:
            order.restore_begins(restores)
        restores.run(lambda: work("restore", 2, 1))
        if ordered:
            order.restore_launched(restores)
            order.forward_begins()
        door.forward.record().synchronize()
        restores.record().synchronize()
        return got


def in_order(exchange: Exchange) -> dict[str, list[int]]:
    return forward_beside_restore(exchange, ordered=True)


def out_of_order(exchange: Exchange) -> dict[str, list[int]]:
    return forward_beside_restore(exchange, ordered=False)


def test_collectives_of_restores_and_forward_passes_meet_their_own() -> None:
    assert run_ranks(in_order, 2) == [{"forward": [1, 1], "restore": [2, 2]}] * 2


def test_without_the_order_they_meet_each_other() -> None:
    """So the test above would find a missing order."""
    first, second = run_ranks(out_of_order, 2)
    assert first["restore"] == second["forward"] == [2, 1]
