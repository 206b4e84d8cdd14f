"""One agreement of the ranks in a turn of the scheduler, whatever has something to say."""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.sglang import controller as controllers
from hcache_backend.sglang import radix_cache
from hcache_backend.sglang.hook_registry import guarded
from hcache_backend.sglang.radix_cache import TURN
from tests.engine.in_process.hits.eager_scene import PAGES, SIZE, Scene
from tests.kit.host import Host, bare_controller, checked
from tests.kit.prefetch import Operation, Restore
from tests.kit.ranks import Ranks, together
from tests.kit.turns import Reduce, alone

of_thread = threading.local()


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: MonkeyPatch) -> None:
    """Each has the state of a process."""
    monkeypatch.setattr(radix_cache, "current", lambda: of_thread)


class Cache:
    """SGLang's radix cache, as far as a turn needs it; notes what is reduced."""

    tree_core = None

    def __init__(self, controller: Any, reduce: Reduce = alone) -> None:
        self.cache_controller, self._reduce = controller, reduce
        self.reduced: list[list[int]] = []
        self.ongoing_prefetch: dict[int, Any] = {}
        self.prefetches = Prefetches()

    def evict_host(self, tokens: int) -> None:
        self.cache_controller._pool.on_freed[0](np.arange(tokens // SIZE))

    def _all_reduce_attn_groups(self, numbers: torch.Tensor, operation: Any) -> None:
        assert operation == dist.ReduceOp.MIN
        self.reduced.append(numbers.tolist())
        self._reduce(numbers, operation)

    def turn(self) -> None:
        """In the thread of its rank."""
        of_thread.prefetches = self.prefetches
        guarded(TURN)(lambda cache: None, self)


def test_a_turn_without_anything_to_say_reduces_nothing() -> None:
    cache = Cache(bare_controller(Host().pool))
    cache.turn()
    assert cache.reduced == []


def test_all_that_a_turn_has_to_say_is_reduced_at_once() -> None:
    """Two kinds of checks, a prefetch's slice and the pairs of a node."""
    server = Host()
    checks, _ = checked(server)
    server.backed_up(1)

    def part(of: str, *numbers: int) -> Any:
        return SimpleNamespace(
            **{
                f"propose_{of}": lambda turn, *_: turn.propose(*numbers),
                f"apply_{of}": lambda: None,
            }
        )

    controller = bare_controller(
        server.pool,
        kv_checks=checks,
        checks=part("checks", 2, 3),
        layouts=part("answer", 4),
        eager=SimpleNamespace(fronts=part("slices", 5), restore_arrived=lambda cache: []),
    )
    cache = Cache(controller)
    cache.turn()
    assert cache.reduced == [[5, 4, 2, 3, 1, 1, 1]]


class Rank:
    """One of two tensor-parallel ranks, while L3 brings eight pages. The plan of its loads is their
    number of pages.

    Attributes:
        problem: Why its restores cannot be launched.
    """

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.problem: Exception | None = None
        self.scene = Scene(need_sort=False)
        self.eager = self.scene.loads(
            SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, in_seconds=True),
            {"start": self._start, "failed_restore": self._failed_restore},
            pool={
                "size": 8 * SIZE,
                "usable": lambda pages: True,
                "arena": SimpleNamespace(
                    physical=lambda pages: pages, unfit=lambda pages: pages < 0
                ),
            },
        )
        self.controller = bare_controller(
            self.eager._pool,
            SimpleNamespace(stored_from=0, plan=lambda host_pages, *_: len(host_pages)),
            eager=self.eager,
            checks=SimpleNamespace(
                propose_checks=lambda turn: turn.propose(1), apply_checks=lambda: None
            ),
            tp_group=rank,
            after_forwards=lambda stream: None,
        )
        self.cache = Cache(self.controller, ranks.reduce(rank))
        self.eager._prefetches = self.eager.fronts._prefetches = self.cache.prefetches
        self.prefetch = self.cache.ongoing_prefetch[0] = Operation(8, SIZE)
        self.cache.turn()

    def _start(self, *_: Any, ahead: bool) -> Restore:
        if self.problem is not None:
            raise self.problem
        return self.scene._launch(ahead=ahead)

    def _failed_restore(self, tokens: int) -> Restore:
        restore = self.scene._launch(ahead=True)
        restore.failed = self.problem
        return restore

    def turn(self, arrived: int = 8) -> int:
        """So many pages have arrived; free device pages behind a turn."""
        self.prefetch.completed_tokens = arrived * SIZE
        self.cache.turn()
        return self.scene.pages.count()

    def load(self) -> Any:
        return self.controller._plan_load(np.arange(8))


def test_a_restore_that_one_rank_cannot_launch_is_a_miss_on_all(monkeypatch: MonkeyPatch) -> None:
    """All go on with their turn, and with the same pages; the next load is from host memory."""
    agreeing = Ranks(2)
    monkeypatch.setattr(controllers, "smallest", agreeing.smallest)
    ranks = together(partial(Rank, ranks=agreeing), range(2))
    ranks[1].problem = torch.OutOfMemoryError("no memory")
    assert together(partial(Rank.turn, arrived=4), ranks) == [PAGES - 8] * 2
    ranks[1].problem = None
    assert together(Rank.turn, ranks) == [PAGES - 8] * 2
    assert together(Rank.load, ranks) == [None, None]
    assert together(Rank.turn, ranks) == [PAGES] * 2
    assert all(restore.is_done for rank in ranks for restore in rank.scene.restores)
    assert together(Rank.load, ranks) == [8, 8]
