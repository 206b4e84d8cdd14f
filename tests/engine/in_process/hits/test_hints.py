"""What hints of clients hold, and when they end."""

import time
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheRequestHandle

from hcache_backend import metrics
from hcache_backend.prefetch.prefetch import Hint
from hcache_backend.ranks import Turn
from hcache_backend.sglang import hints, waiting
from hcache_backend.sglang.hint_route import RefusedHint, Told, as_sent
from hcache_backend.sglang.runtime import Runtime
from tests.engine.in_process.hits.test_waiting import HOST, Cache, Operation, scheduler

__all__ = ["scheduler"]


class HintedCache(Cache):
    """Ends prefetches, too. ``first_stage``: its flags of the hints whose time may be over; None:
    this is the first pipeline stage."""

    first_stage: list[int] | None = None

    def release_aborted_request(self, handle: Any) -> None:
        self.ongoing_prefetch.pop(handle, None)

    def _pp_sync(self, data: torch.Tensor) -> None:
        if self.first_stage is not None:
            data.copy_(torch.tensor(self.first_stage))


TREE = SimpleNamespace()
"""Stands for the content of the cache, until a flush."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of hints."""
    found: list[str] = []
    monkeypatch.setattr(metrics.HINTS, "count", found.append)
    return found


def a_hint(runtime: Runtime, name: str, tokens: int, **fields: Any) -> Hint:
    """One whose prompt host memory has, at node 1 and up."""
    request = SimpleNamespace(
        rid=name,
        cache_request_handle=CacheRequestHandle(name, 0),
        last_host_node=1 + len(runtime.prefetches.held),
        host_hit_length=tokens,
        prefix_len=0,
        extra_key=None,
        cache_salt=None,
    )
    now = {"seconds": 300.0, "since": time.monotonic(), "prefetch": False, "tree": TREE} | fields
    hint = Hint(request=request, prompt=array("q", range(tokens)), **now)
    runtime.prefetches.held[name] = hint
    waiting.hold(runtime.prefetches.scheduler.tree_cache, hint)
    return hint


@pytest.fixture
def cache(runtime: Runtime, scheduler: Any) -> HintedCache:
    scheduler.tree_cache = HintedCache()
    scheduler.tree_cache.storage_prefetch_retries = TREE
    runtime.prefetches.scheduler = scheduler
    found: HintedCache = scheduler.tree_cache
    return found


def test_a_hint_is_no_request_that_has_left(cache: HintedCache, runtime: Runtime) -> None:
    assert a_hint(runtime, "hint", 320).tokens == 320
    waiting.left()
    assert list(runtime.prefetches.held) == ["hint"]


def test_hints_give_way_to_requests_the_oldest_first(
    cache: HintedCache, runtime: Runtime, counted: list[str]
) -> None:
    for name in ("first", "second", "third"):
        a_hint(runtime, name, 240)
    cache.answer(Operation("request", 320, 5000))
    assert cache.take() == ["request"]
    assert list(runtime.prefetches.held) == ["second", "third"]
    assert counted == ["given_up"]
    cache.answer(Operation("another", 480, 9000))
    assert cache.take() == ["another"]
    assert list(runtime.prefetches.held) == []
    assert cache.unlocked == [1, 2, 3]


def test_nobody_waits_for_the_prefetch_of_a_hint(
    cache: HintedCache, runtime: Runtime, counted: list[str]
) -> None:
    a_hint(runtime, "hint", 0, reads=True)
    cache.answer(Operation("hint", HOST, 0), Operation("request", 320, 5000))
    assert cache.take() == ["hint", "request"], "the first one was ended, so HiCache drops it"
    assert [handle.rid for handle in cache.ongoing_prefetch] == ["request"]
    assert counted == ["given_up"]


@pytest.mark.parametrize(
    ("ids", "extra_key", "used"),
    [
        ([*range(320), 7], None, True),
        ([*range(319), 9, 7], None, False),
        (range(320), None, True),
        (range(300), None, False),
        ([*range(320), 7], "other", False),
    ],
)
def test_a_hint_is_useful_if_a_request_begins_with_its_prompt(
    ids: Any, extra_key: str | None, used: bool, cache: HintedCache, runtime: Runtime
) -> None:
    hint = a_hint(runtime, "hint", 320)
    prompt = array("q", ids)
    names = {"rid": "r", "extra_key": extra_key, "cache_salt": None}
    waiting.count_used([SimpleNamespace(origin_input_ids=prompt, **names)])
    assert hint.used == used
    assert list(runtime.prefetches.held) == ["hint"], "it stays until its time is over"


@pytest.mark.parametrize("fields", [{"asked": 0, "read": 320}, {"reads": True}, {}])
def test_a_hint_of_a_prefetch_ends_with_its_use(
    fields: dict[str, Any], cache: HintedCache, runtime: Runtime, counted: list[str]
) -> None:
    a_hint(runtime, "hint", 320, prefetch=True, **fields)
    request = SimpleNamespace(
        rid="r", extra_key=None, cache_salt=None, origin_input_ids=array("q", range(400))
    )
    waiting.count_used([request])
    assert runtime.prefetches.held == {}
    assert counted == ["useful"]


def test_the_time_of_hints_ends_on_all_ranks_at_once(
    cache: HintedCache, runtime: Runtime, counted: list[str]
) -> None:
    a_hint(runtime, "over", 320, since=0.0)
    a_hint(runtime, "goes on", 320)
    for all_agree in (0, 1):
        others = partial(torch.Tensor.mul_, other=all_agree)
        said: list[list[int]] = []
        for _ in range(64):
            turn = Turn(cache)
            due = hints.ask(turn)
            turn.agree(lambda numbers, _, others=others: others(numbers))
            hints.hear(*due)
            said.append(turn._own)
        assert [numbers for numbers in said if numbers] == [[1, 1, 0, 0]]
        assert ("over" in runtime.prefetches.held) != all_agree
    assert list(runtime.prefetches.held) == ["goes on"]
    assert counted == ["useless"]


def test_the_time_of_hints_ends_by_the_clock_of_the_first_stage(
    cache: HintedCache, runtime: Runtime
) -> None:
    a_hint(runtime, "over", 320)
    a_hint(runtime, "goes on", 320, since=0.0)
    cache.first_stage = [1, 0, 0, 0]
    for _ in range(64):
        turn = Turn(cache)
        due = hints.ask(turn)
        turn.agree(lambda *_: None)
        hints.hear(*due)
    assert list(runtime.prefetches.held) == ["goes on"]


def test_an_attach_is_none_of_our_business(scheduler: Any) -> None:
    asked = SimpleNamespace(hicache_storage_backend="file")
    assert hints.around_attach(lambda *a: a, scheduler, asked) == (scheduler, asked)


def test_a_server_without_our_l3_refuses_hints(cache: HintedCache, scheduler: Any) -> None:
    sent = as_sent(Told.model_validate({"action": "retain", "input_ids": [1]}), 10, 10)
    with pytest.raises(RefusedHint, match="takes no hints"):
        hints._take(scheduler, sent)


class Tree:
    """SGLang's radix cache: the device or host memory has ``there`` tokens of every prompt. ``now``
    is the time of hints, in seconds."""

    def __init__(self, cache: HintedCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.looked_up, self.now = 0, list[str](), 1000.0
        monkeypatch.setattr(hints, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(hints, "_request", self.request)
        monkeypatch.setattr(hints, "keys_to", lambda *_: [])
        storage = SimpleNamespace(backups=None, use=lambda keys: None)
        cache.cache_controller.storage_backend = storage

    def request(self, rid: str, prompt: Any, extra_key: Any, cache_salt: Any) -> Any:
        handle = CacheRequestHandle(rid, 0)
        names = {"extra_key": extra_key, "cache_salt": cache_salt, "cache_request_handle": handle}
        found = SimpleNamespace(
            rid=rid, origin_input_ids=prompt + array("q", [0]), last_host_node=0, **names
        )
        found.prefix_len = found.host_hit_length = 0

        def look_up(cache: Any, *, cow_mamba: bool) -> None:
            self.looked_up.append(rid)
            found.host_hit_length = min(self.there, len(prompt))
            found.last_host_node = 1 + int(rid.rpartition(":")[2], 16)

        found.init_next_round_input = look_up
        return found


@pytest.fixture
def tree(cache: HintedCache, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(cache, monkeypatch)


def told(scheduler: Any, action: str, ids: Any, **fields: Any) -> dict[str, Any]:
    scheduler.session_controller = {}
    body = {"action": action, "input_ids": [*ids], **fields}
    return hints._take(scheduler, as_sent(Told.model_validate(body), 1 << 20, 1 << 20))


def turns(cache: HintedCache, number: int) -> None:
    for _ in range(number):
        waiting.left()
        hints.go_on(cache)
        turn = Turn(cache)
        due = hints.ask(turn)
        turn.agree(lambda *_: None)
        hints.hear(*due)


def test_a_demoted_prompt_does_not_count_as_used(
    tree: Tree, scheduler: Any, runtime: Runtime, counted: list[str]
) -> None:
    tree.there = 320
    for length in (320, 160, 64):
        told(scheduler, "retain", range(length, 2 * length))
    tree.looked_up.clear()
    assert told(scheduler, "demote", range(320, 480)) == {"tokens": 160, "ended": 1}
    assert (tree.looked_up, counted) == ([], ["replaced"])
    assert [hint.tokens for hint in runtime.prefetches.hints.values()] == [160, 64]


def test_a_flush_ends_all_hints(
    tree: Tree, cache: HintedCache, scheduler: Any, runtime: Runtime, counted: list[str]
) -> None:
    tree.there = 320
    told(scheduler, "retain", range(320))
    told(scheduler, "prefetch", range(1000, 1320))
    cache.storage_prefetch_retries = SimpleNamespace()  # as a flush leaves it
    waiting.left()
    told(scheduler, "retain", range(2000, 2320))
    waiting.left()
    assert [hint.tokens for hint in runtime.prefetches.hints.values()] == [320]
    assert counted == ["useless", "useless"]
    assert cache.unlocked == [], "the locks are gone with the tree"


def test_a_prompt_that_is_being_computed_is_held_once_host_memory_has_it(
    tree: Tree, cache: HintedCache, scheduler: Any, runtime: Runtime
) -> None:
    asked: list[int] = []
    scheduler._prefetch_kvcache = lambda request: asked.append(len(request.origin_input_ids) - 1)
    assert told(scheduler, "retain", range(160))["kept"] == 0
    told(scheduler, "prefetch", range(1000, 1320))
    turns(cache, 64)
    assert asked == [320]
    retained, prefetched = runtime.prefetches.hints.values()
    tree.there, tree.now = 160, 1001.5
    tree.looked_up.clear()
    turns(cache, 64)
    assert (retained.tokens, prefetched.tokens) == (160, 160)
    assert len(tree.looked_up) == 2
    turns(cache, 64)
    assert len(tree.looked_up) == 2, "the next look is two seconds after the hint came"
    assert asked == [320, 320], "L3 may have what is behind it"
    tree.now = 1301.0
    turns(cache, 64)
    assert runtime.prefetches.held == {}
    assert len(cache.unlocked) == 2


def test_l3_is_read_once_no_request_waits_also_after_a_look(
    tree: Tree, cache: HintedCache, scheduler: Any
) -> None:
    asked: list[str] = []
    scheduler._prefetch_kvcache = lambda request: asked.append(request.rid)
    told(scheduler, "prefetch", range(320))
    scheduler.waiting_queue = [SimpleNamespace(rid="r")]
    tree.now += 1.5
    turns(cache, 64)
    assert (len(tree.looked_up), asked) == (2, [])
    scheduler.waiting_queue = []
    turns(cache, 1)
    assert len(asked) == 1


def test_hints_hold_half_of_host_memory_and_are_not_too_many(
    tree: Tree, cache: HintedCache, scheduler: Any, runtime: Runtime, counted: list[str]
) -> None:
    """One of them is for a prompt that is longer than host memory."""
    tree.there = 10 * HOST
    assert told(scheduler, "retain", range(9 * HOST))["kept"] == 0
    for number in range(1, 256):
        told(scheduler, "retain", range(100_000 + 10 * number, 100_064 + 10 * number))
    with pytest.raises(RefusedHint, match="256 hints are there already"):
        told(scheduler, "retain", range(900_000, 900_064))
    held = runtime.prefetches.held.values()
    assert len(held) == 256
    assert waiting.held_tokens(held) == sum(hint.tokens for hint in held) == HOST // 2 // 64 * 64
    tree.now += 301
    turns(cache, 64)
    assert runtime.prefetches.held == {}
    assert len(cache.unlocked) == HOST // 2 // 64
