"""Ranks that share the tokens of every page: real processes, a real process group.

With as many GPUs as ranks the same runs over their links. A group of the device's is gloo here, and
its streams are worker threads, so restores and forward passes really run beside each other."""

import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hcache_backend import streams
from hcache_backend.restore.exchange import CollectiveOrder, Exchange, shard_of_rank
from hcache_backend.streams import StreamFailed, WorkerStream
from tests.unit.restore.pipeline_server import PAGES, Server, recompute

pytestmark = pytest.mark.slow
SIZE = 8
Ranked = Callable[[Exchange], Any]
Results = Callable[[Ranked], list[Any]]
"""What something gave on each of two ranks."""


def run_ranks(work: Ranked, ranks: int, kind: str = "cpu") -> list[Any]:
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs are needed")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_all_ranks, (work, ranks, folder, kind))
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def _all_ranks(_: int, work: Ranked, ranks: int, folder: str, kind: str) -> None:
    """In a process that has imported everything and has no threads: the ranks are its copies."""
    arguments = (work, ranks, folder, kind)
    processes.start_processes(_rank, arguments, nprocs=ranks, start_method="fork")


def _rank(rank: int, work: Ranked, ranks: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    backend = "cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    exchange = Exchange.between(range(ranks), device)
    assert exchange.check(device) is None
    torch.save(work(exchange), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "page_size", "shards"),
    [(1, 64, 1), (2, 64, 2), (3, 64, 1), (4, 16, 4), (6, 64, 2), (8, 8, 8), (16, 64, 8), (2, 4, 1)],
)
def test_shards_of_ranks(ranks: int, page_size: int, shards: int) -> None:
    found = [shard_of_rank(rank, ranks, page_size) for rank in range(ranks)]
    # Consecutive ranks make whole pages.
    assert found == [(number, shards) for number in range(shards)] * (ranks // shards)


def rank_of(exchange: Exchange, chunk_pages: int) -> Server:
    return Server(("hidden", "kv", "hidden"), chunk_pages * SIZE, exchange)


def some_pages(random: np.random.Generator, count: int) -> tuple[np.ndarray, torch.Tensor]:
    """Pages and slots; the same on every rank."""
    pages = random.permutation(PAGES)[:count].astype(np.int64)
    places = torch.from_numpy(random.permutation(PAGES)[:count])
    return pages, (places[:, None] * SIZE + torch.arange(SIZE)).flatten()


def restore_random_pages(exchange: Exchange) -> int:
    """Several restores, of one or many chunks."""
    for chunk_pages in (1, 3, 16):
        rank = rank_of(exchange, chunk_pages)
        for seed in range(4):
            pages, slots = some_pages(np.random.default_rng(seed), 1 + 3 * seed)
            with WorkerStream("engine").as_current():
                restore = rank.pipeline.start(pages, slots.to(rank.device))
            rank.assert_whole(restore, pages, slots)
    return exchange.number


def test_every_one_of_four_ranks_gets_the_rows_of_all() -> None:
    assert run_ranks(restore_random_pages, 4) == [*range(4)]


def test_every_rank_gets_the_rows_of_all(two_ranks: Results) -> None:
    assert two_ranks(restore_random_pages) == [0, 1]


def forward_passes_and_restores(exchange: Exchange) -> bool:
    """Both talk to the other ranks; the restores are launched while forward passes may run."""
    rank = rank_of(exchange, 3)
    value = torch.ones(1 << 16, device=rank.device)
    random = np.random.default_rng(0)
    for _ in range(30):
        pages, slots = some_pages(random, 7)
        restore = rank.pipeline.start(pages, slots.to(rank.device))
        rank.order.forward_begins()
        for layer in range(3):
            restore.wait_for_layer(layer)
            dist.all_reduce(value)
            value /= exchange.shards
        if random.random() < 0.3:
            rank.assert_whole(restore, pages, slots)
    return bool((value == 1).all())


def test_restores_between_forward_passes(two_ranks: Results) -> None:
    assert two_ranks(forward_passes_and_restores) == [True, True]


@pytest.mark.gpu
def test_restores_between_forward_passes_on_gpus() -> None:
    assert run_ranks(restore_random_pages, 2, "cuda") == [0, 1]
    assert run_ranks(forward_passes_and_restores, 2, "cuda") == [True, True]


def recompute_and_restore(exchange: Exchange) -> bool:
    rank, calls = rank_of(exchange, 4), []

    def fill() -> None:
        calls.append(1)
        dist.all_reduce(torch.ones(1))  # as the model's own layers do

    pages = np.array([5, 2, 7], np.int64)
    slots = torch.arange(3 * SIZE)
    restore = rank.pipeline.start(pages, slots, recompute(1, slots, fill))
    assert restore.failed is None
    rank.assert_whole(restore, pages, slots, first=1)
    return calls == [1]


def test_first_layers_are_recomputed_beside_an_exchange(two_ranks: Results) -> None:
    assert two_ranks(recompute_and_restore) == [True, True]


def fail_on_one_rank(exchange: Exchange) -> str:
    """Rank 1 cannot read its pages."""
    rank = rank_of(exchange, 16)

    def broken(*arguments: Any) -> None:
        raise OSError("no such page")

    if exchange.number == 1:
        rank.pipeline._bring_own = broken  # type: ignore[method-assign]
    restore = rank.pipeline.start(np.arange(4), torch.arange(4 * SIZE))
    with pytest.raises(StreamFailed) as failed:
        restore.layers[-1].synchronize()
    assert exchange.check("cpu") is None  # nobody is left in a collective
    return str(failed.value)


def test_a_restore_that_fails_on_one_rank_fails_on_all_and_nobody_waits_for_ever(
    two_ranks: Results,
) -> None:
    healthy, failed = two_ranks(fail_on_one_rank)
    assert "ExchangeFailed" in healthy and "another rank failed" in healthy
    assert "ExchangeFailed" in failed and "no such page" in failed


def whole_and_check(exchange: Exchange) -> list[Any]:
    shards = torch.empty((2, 3), dtype=torch.uint8)
    exchange.gather_now(shards, lambda own: own.fill_(exchange.number))
    swapped = Exchange(1 - exchange.number, exchange._cpu_group)
    return [shards.flatten().tolist(), exchange.check("cpu"), swapped.check("cpu")]


def test_whole_and_the_check_at_start(two_ranks: Results) -> None:
    for whole, fine, swapped in two_ranks(whole_and_check):
        assert whole == [0, 0, 0, 1, 1, 1]
        assert fine is None
        assert "another order" in swapped


def collectives_by_parts(exchange: Exchange) -> list[int]:
    """How many collectives a restore of two parts makes, and one of eight."""
    found = []
    for chunk_pages in (16, 1):
        pipeline = rank_of(exchange, chunk_pages).pipeline
        with ExitStack() as stack:
            counted = [
                stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name)))
                for name in ("all_gather", "all_reduce", "broadcast")
            ]
            pipeline.start(np.arange(4), torch.arange(4 * SIZE)).layers[-1].synchronize()
        found.append(sum(one.call_count for one in counted))
    return found


def test_a_restore_of_many_parts_is_one_exchange(two_ranks: Results) -> None:
    """Each collective waits until the other rank has its turn on the CPU."""
    for two_parts, eight_parts in two_ranks(collectives_by_parts):
        assert eight_parts == two_parts


ALL = (
    restore_random_pages,
    collectives_by_parts,
    forward_passes_and_restores,
    recompute_and_restore,
    fail_on_one_rank,
    whole_and_check,
)


def one_after_the_other(exchange: Exchange) -> list[Any]:
    return [work(exchange) for work in ALL]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    """Two processes do all of it; starting them takes longer than that."""
    given = run_ranks(one_after_the_other, 2)
    return lambda work: [results[ALL.index(work)] for results in given]


GPU = torch.device("cuda", 0)


def with_a_device_group(exchange: Exchange) -> Exchange:
    """The same ranks with a second group, which stands for NCCL's."""
    make = dist.new_group

    def gloo(ranks: list[int], backend: str, **options: Any) -> Any:
        made.append(backend)
        return make(ranks, backend="gloo", **options)

    made: list[str] = []
    with patch.object(dist, "new_group", gloo):
        whole = Exchange.between(range(exchange.shards), GPU)
    assert made == ["gloo", "nccl"] and not whole.on_scheduler_thread
    return whole


def shares_arrive(exchange: Exchange) -> list[Any]:
    """What the check says, also of ranks in another order, and rows of every restore."""
    whole = with_a_device_group(exchange)
    turned = Exchange(1 - whole.number, whole._cpu_group, whole._device_group)
    found = [whole.check("cpu"), turned.check("cpu")]

    def swapped(self: Exchange, shards: torch.Tensor, fetch: Any) -> None:
        shards[1 - self.number].copy_(shards[self.number])

    with patch.object(Exchange, "gather", swapped):
        found.append(whole.check("cpu"))
    with patch.object(Exchange, "gather", lambda *_: 1 / 0):
        found.append(whole.check("cpu"))
    own = torch.zeros((2, 4), dtype=torch.uint8)
    whole.gather(own, lambda mine: mine.fill_(whole.number + 1))
    return [*found, own.tolist()]


def test_shards_arrive_over_the_links_of_the_device() -> None:
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


def forward_beside_restore(exchange: Exchange) -> dict[str, list[int]]:
    """Numbers that a forward pass and a restore send over one link between ranks. On each rank
    another of the two streams is the slower one: it waits a while for the other's collective."""
    door = Door()
    links = with_a_device_group(exchange)._device_group
    with streams.through(door):
        order, restores = CollectiveOrder(GPU), streams.new_stream(GPU, "restores")
        sent = {"forward": threading.Event(), "restore": threading.Event()}
        got: dict[str, list[int]] = {}

        def work(name: str, other: str, value: int, slow_rank: int) -> None:
            if exchange.number == slow_rank:
                sent[other].wait(0.2)
            every = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(every, torch.tensor([value]), group=links)
            got[name] = [int(one) for one in every]
            sent[name].set()

        order.forward_begins()
        door.forward.run(lambda: work("forward", "restore", 1, 0))
        order.restore_begins(restores)
        restores.run(lambda: work("restore", "forward", 2, 1))
        order.restore_launched(restores)
        order.forward_begins()
        door.forward.record().synchronize()
        restores.record().synchronize()
        return got


def test_collectives_of_restores_and_forward_passes_meet_their_own() -> None:
    assert run_ranks(forward_beside_restore, 2) == [{"forward": [1, 1], "restore": [2, 2]}] * 2
