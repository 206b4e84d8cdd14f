"""One agreement of the ranks in a turn of the scheduler, whatever has something to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hcache_backend.ranks import Turn
from hcache_backend.sglang.hook_registry import guarded
from hcache_backend.sglang.radix_cache import TURN
from tests.kit.host import Host, bare_controller, checked
from tests.kit.ranks import Ranks, together


class Cache:
    """SGLang's radix cache, as far as a turn needs it; notes what is reduced."""

    def __init__(self, controller: Any) -> None:
        self.cache_controller = controller
        self.reduced: list[list[int]] = []

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


def test_every_rank_gets_the_smallest_of_each_number() -> None:
    ranks = Ranks(2)

    def agree(rank: int) -> tuple[list[int], list[int]]:
        turn = Turn()
        first, second = turn.say(rank, 1 - rank), turn.say(7 + rank)
        turn.agree(ranks.reduce(rank))
        return first.least, second.least

    assert together(agree, [0, 1]) == [([0, 0], [7])] * 2
