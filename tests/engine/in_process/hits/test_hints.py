"""What hints of clients hold, and when they end."""

from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from hcache_backend import metrics
from hcache_backend.prefetch.prefetch import Hint
from hcache_backend.ranks import Turn
from hcache_backend.sglang import hints, waiting
from hcache_backend.sglang.hint_route import RefusedHint, Told, as_sent
from hcache_backend.sglang.runtime import Runtime
from tests.engine.in_process.hits.test_waiting import HOST, Cache, Operation, waiting_request
from tests.kit.turns import Reduce, alone

TREE = SimpleNamespace()
"""Stands for the content of the cache, until a flush."""


class HintedCache(Cache):
    """Ends prefetches, too; the device or host memory has ``there`` tokens of every prompt.

    Attributes:
        first_stage: Its flags of the hints whose time may be over; None: this is the first stage.
        ends: What became of hints.
        now: The time of hints, in seconds.
    """

    first_stage: list[int] | None = None
    there, now = 0, 1000.0

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.prefetches, self.storage_prefetch_retries = runtime.prefetches, TREE
        self.looked_up, self.ends = list[str](), list[str]()
        storage = SimpleNamespace(backups=None, use=lambda keys: None)
        self.cache_controller.storage_backend = storage

    def release_aborted_request(self, handle: Any) -> None:
        self.ongoing_prefetch.pop(handle, None)

    def _pp_sync(self, data: torch.Tensor) -> None:
        if self.first_stage is not None:
            data.copy_(torch.tensor(self.first_stage))

    def request(self, rid: str, prompt: Any, extra_key: Any, cache_salt: Any) -> Any:
        names = {"extra_key": extra_key, "cache_salt": cache_salt, "prefix_len": 0}
        found = waiting_request(rid, node=0, origin_input_ids=prompt + array("q", [0]), **names)

        def look_up(cache: Any, *, cow_mamba: bool) -> None:
            self.looked_up.append(rid)
            found.host_hit_length = min(self.there, len(prompt))
            found.last_host_node = 1 + int(rid.rpartition(":")[2], 16)

        found.init_next_round_input = look_up
        return found

    def hold(self, name: str, tokens: int, **fields: Any) -> Hint:
        """A hint whose prompt host memory has, at node 1 and up."""
        names = {"extra_key": None, "cache_salt": None, "prefix_len": 0}
        request = waiting_request(name, tokens, node=1 + len(self.held), **names)
        given = {"seconds": 300.0, "since": self.now, "prefetch": False, "tree": TREE} | fields
        hint = self.held[name] = Hint(request=request, prompt=array("q", range(tokens)), **given)
        waiting.hold(self, hint)
        return hint

    def told(self, action: str, ids: Any, **fields: Any) -> dict[str, Any]:
        self.scheduler.session_controller = {}
        body = {"action": action, "input_ids": [*ids], **fields}
        sent = as_sent(Told.model_validate(body), 1 << 20, 1 << 20)
        return hints._take(self.scheduler, sent)

    def turns(self, number: int, reduce: Reduce = alone) -> list[list[int]]:
        """So many turns of the scheduler; what was said in those that had something to say."""
        said: list[list[int]] = []
        for _ in range(number):
            waiting.left()
            hints.go_on(self)
            turn = Turn(self)
            due = hints.ask(turn)
            turn.agree(reduce)
            hints.hear(*due)
            said += [turn._own] if turn._own else []
        return said


@pytest.fixture
def cache(runtime: Runtime, monkeypatch: MonkeyPatch) -> HintedCache:
    found = HintedCache(runtime)
    batches = {"waiting_queue": [], "running_batch": None, "last_batch": None}
    runtime.prefetches.scheduler = SimpleNamespace(tree_cache=found, **batches)
    monkeypatch.setattr(metrics.HINTS, "count", found.ends.append)
    monkeypatch.setattr(hints, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(hints, "_request", found.request)
    monkeypatch.setattr(hints, "keys_to", lambda *_: [])
    return found


def test_hints_give_way_to_requests_the_oldest_first(cache: HintedCache) -> None:
    for name in ("first", "second", "third"):
        cache.hold(name, 240)
    cache.answer(Operation("request", 320, 5000))
    assert cache.take() == ["request"]
    assert list(cache.held) == ["second", "third"]
    assert cache.ends == ["given_up"]
    cache.answer(Operation("another", 480, 9000))
    assert cache.take() == ["another"]
    assert list(cache.held) == []
    assert cache.unlocked == [1, 2, 3]


def test_nobody_waits_for_the_prefetch_of_a_hint(cache: HintedCache) -> None:
    cache.hold("hint", 0, reads=True)
    cache.answer(Operation("hint", HOST, 0), Operation("request", 320, 5000))
    assert cache.take() == ["hint", "request"], "the first one was ended, so HiCache drops it"
    assert [handle.rid for handle in cache.ongoing_prefetch] == ["request"]
    assert cache.ends == ["given_up"]


def used(ids: Any, extra_key: str | None = None) -> None:
    """A request comes."""
    names = {"rid": "r", "extra_key": extra_key, "cache_salt": None}
    waiting.count_used([SimpleNamespace(origin_input_ids=array("q", ids), **names)])


@pytest.mark.parametrize(
    ("ids", "extra_key", "useful"),
    [
        ([*range(320), 7], None, True),
        ([*range(319), 9, 7], None, False),
        (range(320), None, True),
        (range(300), None, False),
        ([*range(320), 7], "other", False),
    ],
)
def test_a_hint_is_useful_if_a_request_begins_with_its_prompt(
    ids: Any, extra_key: str | None, useful: bool, cache: HintedCache
) -> None:
    hint = cache.hold("hint", 320)
    used(ids, extra_key)
    assert hint.used == useful
    assert list(cache.held) == ["hint"], "it stays until its time is over"


@pytest.mark.parametrize("fields", [{"asked": 0, "read": 320}, {"reads": True}, {}])
def test_a_hint_of_a_prefetch_ends_with_its_use(fields: dict[str, Any], cache: HintedCache) -> None:
    cache.hold("hint", 320, prefetch=True, **fields)
    used(range(400))
    assert (cache.held, cache.ends) == ({}, ["useful"])


def test_the_time_of_hints_ends_on_all_ranks_at_once(cache: HintedCache) -> None:
    cache.hold("over", 320, since=0.0)
    cache.hold("goes on", 320)
    for all_agree in (0, 1):
        others = partial(torch.Tensor.mul_, other=all_agree)
        said = cache.turns(64, lambda numbers, _, others=others: others(numbers))  # type: ignore[misc]
        assert said == [[1, 1, 0, 0]]
        assert ("over" in cache.held) != all_agree
    assert list(cache.held) == ["goes on"]
    assert cache.ends == ["useless"]


def test_the_time_of_hints_ends_by_the_clock_of_the_first_stage(cache: HintedCache) -> None:
    cache.hold("over", 320)
    cache.hold("goes on", 320, since=0.0)
    cache.first_stage = [1, 0, 0, 0]
    cache.turns(64)
    assert list(cache.held) == ["goes on"]


def test_a_server_without_our_l3_refuses_hints(cache: HintedCache) -> None:
    cache.cache_controller.storage_backend = None
    with pytest.raises(RefusedHint, match="takes no hints"):
        cache.told("retain", [1])


def test_a_demoted_prompt_does_not_count_as_used(cache: HintedCache) -> None:
    cache.there = 320
    for length in (320, 160, 64):
        cache.told("retain", range(length, 2 * length))
    cache.looked_up.clear()
    assert cache.told("demote", range(320, 480)) == {"tokens": 160, "ended": 1}
    assert (cache.looked_up, cache.ends) == ([], ["replaced"])
    assert [hint.tokens for hint in cache.prefetches.hints.values()] == [160, 64]


def test_a_flush_ends_all_hints(cache: HintedCache) -> None:
    cache.there = 320
    cache.told("retain", range(320))
    cache.told("prefetch", range(1000, 1320))
    cache.storage_prefetch_retries = SimpleNamespace()  # as a flush leaves it
    waiting.left()
    cache.told("retain", range(2000, 2320))
    waiting.left()
    assert [hint.tokens for hint in cache.prefetches.hints.values()] == [320]
    assert cache.ends == ["useless", "useless"]
    assert cache.unlocked == [], "the locks are gone with the tree"


def test_a_prompt_that_is_computed_is_held_once_host_memory_has_it(cache: HintedCache) -> None:
    asked: list[int] = []
    cache.scheduler._prefetch_kvcache = lambda one: asked.append(len(one.origin_input_ids) - 1)
    assert cache.told("retain", range(160))["kept"] == 0
    cache.told("prefetch", range(1000, 1320))
    cache.turns(64)
    assert asked == [320]
    retained, prefetched = cache.prefetches.hints.values()
    cache.there, cache.now = 160, 1001.5
    cache.looked_up.clear()
    cache.turns(64)
    assert (retained.tokens, prefetched.tokens) == (160, 160)
    assert len(cache.looked_up) == 2
    cache.turns(64)
    assert len(cache.looked_up) == 2, "the next look is two seconds after the hint came"
    assert asked == [320, 320], "L3 may have what is behind it"
    cache.now = 1301.0
    cache.turns(64)
    assert cache.held == {}
    assert len(cache.unlocked) == 2


def test_l3_is_read_once_no_request_waits_also_after_a_look(cache: HintedCache) -> None:
    asked: list[str] = []
    cache.scheduler._prefetch_kvcache = lambda request: asked.append(request.rid)
    cache.told("prefetch", range(320))
    cache.scheduler.waiting_queue = [SimpleNamespace(rid="r")]
    cache.now += 1.5
    cache.turns(64)
    assert (len(cache.looked_up), asked) == (2, [])
    cache.scheduler.waiting_queue = []
    cache.turns(1)
    assert len(asked) == 1


def test_hints_hold_half_of_host_memory_and_are_not_too_many(cache: HintedCache) -> None:
    """One of them is for a prompt that is longer than host memory."""
    cache.there = 10 * HOST
    assert cache.told("retain", range(9 * HOST))["kept"] == 0
    for number in range(1, 256):
        cache.told("retain", range(100_000 + 10 * number, 100_064 + 10 * number))
    with pytest.raises(RefusedHint, match="256 hints are there already"):
        cache.told("retain", range(900_000, 900_064))
    held = cache.held.values()
    assert len(held) == 256
    assert waiting.held_tokens(held) == sum(hint.tokens for hint in held) == HOST // 2 // 64 * 64
    cache.now += 301
    cache.turns(64)
    assert cache.held == {}
    assert len(cache.unlocked) == HOST // 2 // 64
