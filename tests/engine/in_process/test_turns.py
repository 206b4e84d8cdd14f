"""One agreement of the ranks in a turn of the scheduler, whatever has something to say."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.ranks import Turn
from hcache_backend.sglang import controller as controllers
from hcache_backend.sglang.hook_registry import guarded
from hcache_backend.sglang.radix_cache import TURN
from tests.engine.in_process.hits.eager_scene import PAGES, SIZE, Restore, Scene
from tests.kit.host import Host, bare_controller, checked
from tests.kit.prefetch import Operation
from tests.kit.ranks import Ranks, together


class Cache:
    """SGLang's radix cache, as far as a turn needs it; notes what is reduced."""

    def __init__(self, controller: Any) -> None:
        self.cache_controller = controller
        self.reduced: list[list[int]] = []
        self.ongoing_prefetch: dict[int, Any] = {}

    def evict_host(self, tokens: int) -> None:
        self.cache_controller._pool.on_freed[0](np.arange(tokens // SIZE))

    def _all_reduce_attn_groups(self, numbers: torch.Tensor, operation: Any) -> None:
        assert operation == dist.ReduceOp.MIN
        self.reduced.append(numbers.tolist())

    def turn(self) -> None:
        guarded(TURN)(lambda cache: None, self)


def test_a_turn_without_anything_to_say_reduces_nothing() -> None:
    cache = Cache(bare_controller(Host().pool))
    cache.turn()
    assert cache.reduced == []


def test_all_that_a_turn_has_to_say_is_reduced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of checks, a prefetch's slice and the pairs of a node."""
    server = Host()
    checks, _ = checked(server)
    server.backed_up(1)

    def say(*numbers: int) -> Any:
        return SimpleNamespace(
            ask=lambda turn: turn.say(*numbers),
            hear=lambda: None,
            look=lambda turn: turn.say(*numbers),
            answered=lambda: False,
        )

    controller = bare_controller(
        server.pool, kv_checks=checks, checks=say(2, 3), layouts=say(4), eager=say(5)
    )
    cache: Any = Cache(controller)
    cache.tree_core = None
    cache.turn()
    assert cache.reduced == [[5, 4, 2, 3, 1, 1, 1]]


class Loads:
    """Loads whose plan is their number of pages."""

    stored_from = 0

    def plan(self, host_pages: np.ndarray, *_: Any) -> Any:
        return len(host_pages)


class Rank:
    """One of two tensor-parallel ranks, while L3 brings eight pages.

    Attributes:
        problem: Why its restores cannot be launched.
    """

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.problem: Exception | None = None
        self.scene = Scene(need_sort=False)
        budget = SliceBudget(1.0, SIZE, lambda tokens, prefix: 1.0, known=True)
        pool: dict[str, Any] = {"layer_num": 3, "size": 8 * SIZE, "depth": np.zeros_like}
        self.eager = self.scene.loads(
            budget, {"start": self._start, "abandoned": self._abandoned}, pool=pool
        )
        self.controller = bare_controller(
            self.eager._pool,
            Loads(),
            eager=self.eager,
            checks=SimpleNamespace(ask=lambda turn: turn.say(1), hear=lambda: None),
            tp_group=rank,
            after_forwards=lambda stream: None,
        )
        self.cache: Any = Cache(self.controller)
        self.cache._all_reduce_attn_groups = ranks.reduce(rank)
        self.prefetch = Operation(8, SIZE)
        self.cache.ongoing_prefetch = {0: self.prefetch}
        self.cache.turn()

    def _start(self, *_: Any, ahead: bool) -> Restore:
        if self.problem is not None:
            raise self.problem
        return self._new()

    def _abandoned(self, tokens: int) -> Restore:
        restore = self._new()
        restore.failed = self.problem
        return restore

    def _new(self) -> Restore:
        self.scene.restores.append(Restore())
        return self.scene.restores[-1]

    def turn(self) -> int:
        """Free device pages behind a turn."""
        self.cache.turn()
        return self.scene.pages.count()


def test_a_restore_that_one_rank_cannot_launch_is_a_miss_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All go on with their turn, and with the same pages; the next load is from host memory."""
    agreeing, alone = Ranks(2), Ranks(1)
    monkeypatch.setattr(controllers, "smallest", agreeing.smallest)
    ranks = [Rank(0, alone), Rank(0, alone)]
    for number, rank in enumerate(ranks):
        rank.controller.tp_group = number
        rank.cache._all_reduce_attn_groups = agreeing.reduce(number)
        rank.prefetch.completed_tokens = 4 * SIZE
    ranks[1].problem = torch.OutOfMemoryError("no memory")
    assert together(Rank.turn, ranks) == [PAGES - 8] * 2
    ranks[1].problem = None
    for rank in ranks:
        rank.prefetch.completed_tokens = 8 * SIZE
    assert together(Rank.turn, ranks) == [PAGES - 8] * 2

    def load(rank: Rank) -> Any:
        return rank.controller._planned(np.arange(8))

    assert together(load, ranks) == [None, None]
    assert together(Rank.turn, ranks) == [PAGES] * 2
    assert all(restore.waited for rank in ranks for restore in rank.scene.restores)
    assert together(load, ranks) == [8, 8]


def test_every_rank_gets_the_smallest_of_each_number() -> None:
    ranks = Ranks(2)

    def agree(rank: int) -> tuple[list[int], list[int]]:
        turn = Turn()
        first, second = turn.say(rank, 1 - rank), turn.say(7 + rank)
        turn.agree(ranks.reduce(rank))
        return first.least, second.least

    assert together(agree, [0, 1]) == [([0, 0], [7])] * 2
