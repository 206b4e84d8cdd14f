"""Which answers of L3 HiCache may take, and what waiting requests hold of their prompts."""

import time
from queue import Queue
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheRequestHandle
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from hcache_backend.prefetch.prefetches import HeldPrompt, Prefetches
from hcache_backend.sglang import waiting
from hcache_backend.sglang.runtime import Runtime

PAGE, HOST = 16, 1600


class Operation:
    """A prefetch whose hit of ``tokens`` has the ids from ``first`` on."""

    def __init__(self, name: str, tokens: int, first: int, start: int = 0) -> None:
        self.handle = CacheRequestHandle(name, 0)
        self.request_id = name
        self.storage_hit_count = self.stats_requested_tokens = tokens
        pages = range(0, tokens, PAGE)
        self.hash_value = [f"{first + page} at {start + page}" for page in pages]
        self.host_indices: Any = None
        self.pool_transfers: Any = None
        self.comp_xfers: dict[str, list[PoolTransfer]] = {}
        self.completed_tokens, self.start_time = 0, 0.0
        self.terminated = False

    def is_terminated(self) -> bool:
        return self.terminated


class States:
    """A host pool of ``size`` states. Those that no prompt holds may be evicted."""

    page_size = 1

    def __init__(self, size: int, evictable: int = 0) -> None:
        self.size, self.evictable, self.free = size, evictable, size - evictable

    def available_size(self) -> int:
        return self.free

    def evict(self, states: int) -> None:
        freed = min(states, self.evictable)
        self.free, self.evictable = self.free + freed, self.evictable - freed


class Cache:
    """HiCache's, with ``free`` tokens of host memory and as many that it may evict."""

    page_size, prefetch_threshold, is_write_back = PAGE, PAGE, False
    prefetch_stop_policy = "timeout"
    enable_storage, storage_prefetch_retries = True, None
    prefetch_timeout_base = prefetch_timeout_per_page = 0.0
    prefetches: Prefetches

    free, evictable = HOST, 0

    def __init__(self) -> None:
        self.states = States(0)
        self.ongoing_prefetch: dict[Any, Any] = {}
        self.asked_again: list[str] = []
        self.unlocked: list[int] = []
        self._storage_prefetch_wait: dict[Any, Any] = {}
        self.storage_prefetch_retries = SimpleNamespace(refetch=self.asked_again.append)
        self.cache_controller = SimpleNamespace(
            prefetch_hit_queue=Queue(),
            mem_pool_host=SimpleNamespace(
                size=HOST,
                available_size=lambda: self.free,
                entry_map={PoolName.MAMBA: SimpleNamespace(host_pool=self.states)},
            ),
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: HOST)

    @property
    def scheduler(self) -> Any:
        """Its batches are empty."""
        return self.prefetches.scheduler

    @property
    def held(self) -> dict[str, HeldPrompt]:
        return self.prefetches.held

    def evict_host(self, tokens: int, pool: str = "kv") -> None:
        if pool != "kv":
            self.states.evict(tokens)
            return
        freed = min(tokens, self.evictable)
        self.free, self.evictable = self.free + freed, self.evictable - freed

    def revoke_pending_prefetch(self, handle: Any) -> None:
        del self.ongoing_prefetch[handle]

    def is_backuped(self, node: int) -> bool:
        return node > 0

    def inc_host_lock_ref(self, node: int) -> Any:
        return SimpleNamespace(to_dec_params=lambda: node)

    def dec_host_lock_ref(self, node: int, receipt: int) -> None:
        assert node == receipt
        self.unlocked.append(node)

    def answer(self, *operations: Operation) -> None:
        for operation in operations:
            self.ongoing_prefetch[operation.handle] = SimpleNamespace(
                operation=operation, comp_xfers=operation.comp_xfers
            )
            self.cache_controller.prefetch_hit_queue.put(operation)

    def timed_out(self, operation: Operation) -> bool:
        """What SGLang's cache finds when it polls a prefetch."""
        theirs: Any = UnifiedRadixCache
        if not hasattr(theirs, "_start_storage_prefetch_wait"):  # before 0.5.23
            return bool(theirs._prefetch_timeout_check_linear_func(self, operation))
        theirs._start_storage_prefetch_wait(self, operation)
        return bool(theirs._prefetch_deadline_expired(self, operation))

    def looked_at(self) -> None:
        """A turn is at the point behind HiCache's part."""
        waiting.hold_fetched(self, self.prefetches)
        self.prefetches.changed = {}

    def take(self) -> list[str]:
        """Names of the answers that may be taken, which are then being read."""
        answers = self.cache_controller.prefetch_hit_queue
        taken = waiting.admit_answers(self, self.prefetches, answers.qsize())
        assert taken is not None
        names = []
        for operation in [answers.get() for _ in range(taken)]:
            operation.host_indices = range(operation.storage_hit_count)
            if info := self.ongoing_prefetch.get(operation.handle):
                self.ongoing_prefetch[operation.handle] = info
            self.free -= operation.storage_hit_count
            self.states.free -= len(operation.comp_xfers)
            names.append(operation.handle.rid)
        return names


@pytest.fixture(autouse=True)
def cache(runtime: Runtime) -> Cache:
    found = Cache()
    found.prefetches = runtime.prefetches
    found.ongoing_prefetch = found.prefetches.watch({})
    batches = {"waiting_queue": [], "running_batch": None, "last_batch": None}
    runtime.prefetches.scheduler = SimpleNamespace(tree_cache=found, **batches)
    return found


def waiting_request(name: str, held: int = 0, node: int = 1, **known: Any) -> Any:
    """One whose prompt host memory has up to ``node``, ``held`` tokens."""
    handle = CacheRequestHandle(name, 0)
    there = {"last_host_node": node, "host_hit_length": held}
    return SimpleNamespace(rid=name, cache_request_handle=handle, **there, **known)


def busy() -> Any:
    return SimpleNamespace(is_empty=lambda: False)


def test_answers_are_taken_in_order_as_far_as_half_of_host_memory(cache: Cache) -> None:
    operations = [Operation(str(n), 320, 1000 * n) for n in range(5)]
    cache.answer(*operations, Operation("nothing", 0, 9000))
    assert cache.take() == ["0", "1", "nothing"], "no answer overtakes one that waits for room"
    assert cache.take() == []
    del cache.ongoing_prefetch[operations[0].handle]
    cache.free += 320
    assert cache.take() == ["2"]


def test_no_timeout_runs_while_an_answer_waits_for_room(cache: Cache) -> None:
    """SGLang polls a prefetch whenever its request could be admitted."""
    operations = [Operation(str(n), 320, 1000 * n) for n in range(4)]
    cache.answer(*operations)
    assert [cache.timed_out(one) for one in operations] == [True] * 4
    for _ in range(2):
        cache.take()
        assert [cache.timed_out(one) for one in operations] == [True, True, False, False]
    del cache.ongoing_prefetch[operations[0].handle]
    cache.free += 320
    begin = time.monotonic()
    assert cache.take() == ["2"]
    assert begin <= operations[2].start_time <= time.monotonic()
    assert [cache.timed_out(one) for one in operations[1:]] == [True, True, False]


def test_many_answers_wait_for_room_in_their_order(cache: Cache) -> None:
    """Most of them are looked at once, and then when those before them are taken."""
    operations = [Operation(str(n), 320, 1000 * n) for n in range(60)]
    cache.answer(*operations)
    assert cache.take() == ["0", "1"]
    cache.answer(Operation("late", 16, 90_000), Operation("nothing", 0, 91_000))
    assert cache.take() == ["nothing"], "no request waits for an answer that needs no room"
    aborted = operations.pop(50)
    del cache.ongoing_prefetch[aborted.handle]
    for read, first in zip(operations, operations[2:-1], strict=False):
        del cache.ongoing_prefetch[read.handle]
        cache.free += 320
        assert [name for name in cache.take() if name != "50"] == [first.request_id]
        assert cache.prefetches.short_of_room


def test_a_flush_forgets_the_answers_that_waited(cache: Cache) -> None:
    cache.answer(*(Operation(str(n), 640, 1000 * n) for n in range(40)))
    assert cache.take() == ["0"]
    cache.cache_controller.prefetch_hit_queue.queue.clear()
    cache.ongoing_prefetch = cache.prefetches.watch({})
    assert cache.prefetches.reading == cache.prefetches.waiting == {}
    cache.answer(*(Operation(str(n), 320, 1000 * n) for n in range(30)))
    cache.answer(Operation("nothing", 0, 90_000))
    assert cache.take() == ["0", "1", "nothing"]


def test_nothing_overtakes_an_answer_that_no_turn_looks_at(cache: Cache) -> None:
    cache.answer(Operation("a", 320, 0), *(Operation(f"like a {n}", 320, 0) for n in range(20)))
    cache.answer(Operation("large", 640, 5000))
    assert cache.take() == ["a"]
    cache.answer(Operation("small", 16, 9000))
    assert cache.take() == []


def test_requests_that_wait_for_their_decode_server_do_not_wait_for_the_gpu(cache: Cache) -> None:
    first, other = waiting_request("a"), waiting_request("b")
    cache.answer(Operation("a", 320, 0))
    early = cache.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    waiting.hold_new(cache.scheduler, cache.prefetches, first)
    waiting.hold_new(cache.scheduler, cache.prefetches, other)

    def waits(early_ones: list[Any], queued: list[Any]) -> bool:
        early.queue, cache.scheduler.waiting_queue = early_ones, queued
        waiting.release_departed(cache.prefetches)
        return cache.prefetches.waits_for_gpu()

    assert not waits([first, other], [])
    assert waits([first], [other])
    assert not waits([], [first])
    assert cache.held.keys() == {"a"}
    waiting.hold_new(cache.scheduler, cache.prefetches, first)
    assert not waits([], [first]), "it waits for another try to prefetch"
    cache.revoke_pending_prefetch(first.cache_request_handle)
    assert waits([], [first])
    assert not waits([], [])
    assert cache.held == {}


def test_a_hit_waits_for_room_and_is_read_in_part_if_nothing_gives_any(cache: Cache) -> None:
    """A request that runs gives some at its end, also one of another micro-batch."""
    cache.free, cache.evictable, scheduler = 160, 64, cache.scheduler
    cache.answer(Operation("a", 320, 0))
    scheduler.running_batch = busy()
    assert cache.take() == []
    scheduler.running_batch = None
    for running, others in (([None, busy()], [None, None]), ([None, None], [None, busy()])):
        scheduler.running_mbs, scheduler.mbs = running, others
        assert cache.take() == []
    scheduler.mbs = [None, None]
    assert cache.take() == ["a"]


def test_of_a_model_with_several_pools_no_part_of_a_hit_is_read(cache: Cache) -> None:
    cache.free, hit = 160, Operation("a", 320, 0)
    hit.pool_transfers = ["states"]
    cache.answer(hit)
    cache.take()
    assert cache.ongoing_prefetch == {}, "it is computed"


def with_states(*names: str) -> list[Operation]:
    """Hits of 16 tokens, at the end of which is a state."""
    hits = [Operation(name, PAGE, 1000 * n) for n, name in enumerate(names)]
    for hit in hits:
        hit.pool_transfers = [PoolTransfer(PoolName.MAMBA, keys=["__placeholder__"])]
        hit.comp_xfers = {"states": hit.pool_transfers}
    return hits


def test_a_hit_waits_for_room_for_its_state(cache: Cache) -> None:
    """States are few: half of those of host memory are for hits, and backups have the others."""
    cache.states.__init__(8, evictable=6)  # type: ignore[misc]
    waiting.hold_new(cache.scheduler, cache.prefetches, waiting_request("held", PAGE))
    hits = with_states(*"abcdef")
    cache.answer(*hits)
    assert cache.take() == [*"abc"], "the fourth one is held"
    assert (cache.states.free, cache.states.evictable) == (0, 5)
    assert cache.take() == []
    del cache.ongoing_prefetch[hits[1].handle]
    assert cache.take() == ["d"]


def test_a_hit_without_room_for_its_state_is_computed_if_nothing_gives_any(cache: Cache) -> None:
    """HiCache reads no part of it: the state belongs to its end."""
    cache.states.__init__(2)  # type: ignore[misc]
    cache.states.free = 0
    first, other = with_states("a", "b")
    cache.answer(first)
    cache.scheduler.running_batch = busy()
    assert cache.take() == []
    assert [*cache.ongoing_prefetch] == [first.handle]
    cache.scheduler.running_batch = None
    cache.answer(other)
    cache.take()
    assert cache.ongoing_prefetch == {}


@pytest.mark.parametrize(
    ("requests", "held", "needed"), [(10, 64, 176), (30, 24, 96), (1, 320, 512)]
)
def test_hits_do_not_wait_for_prompts_that_only_they_can_let_go(
    requests: int, held: int, needed: int, cache: Cache
) -> None:
    """Host memory has the beginnings of conversations, and L3 the rest."""
    scheduler = cache.scheduler
    cache.free -= requests * held
    waiting_ones = [str(n) for n in range(requests)]
    for n, name in enumerate(waiting_ones):
        cache.answer(Operation(name, needed, 1000 * n, start=held))
        request = waiting_request(name, held, node=n + 1)
        scheduler.waiting_queue.append(request)
        waiting.hold_new(scheduler, cache.prefetches, request)
    taken: list[str] = []
    while taken != waiting_ones:
        now = cache.take()
        assert now, f"{len(taken)} of {requests} hits were read, and no other one ever"
        taken += now
        for name in now:  # admitted, and evicted
            operation = cache.ongoing_prefetch.pop(CacheRequestHandle(name, 0)).operation
            cache.free += len(operation.host_indices)
            scheduler.waiting_queue = [one for one in scheduler.waiting_queue if one.rid != name]
        before = len(cache.unlocked)
        waiting.release_departed(cache.prefetches)
        cache.free += held * (len(cache.unlocked) - before)


def test_a_prompt_that_many_requests_share_counts_once(cache: Cache) -> None:
    held = cache.held
    for n in range(20):
        request = waiting_request(str(n), 160)
        cache.scheduler.waiting_queue.append(request)
        waiting.hold_new(cache.scheduler, cache.prefetches, request)
    assert [one.tokens for one in held.values()] == [160] * 20
    cache.prefetches.short_of_room = True
    waiting.hold_new(cache.scheduler, cache.prefetches, waiting_request("late", 160))
    assert held["late"].tokens == 0
    assert cache.prefetches.held_tokens == 160, "others hold the node"


def test_hits_do_not_wait_for_a_decode_server(cache: Cache) -> None:
    early = cache.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    request = waiting_request("bootstrapping", HOST // 2)
    waiting.hold_new(cache.scheduler, cache.prefetches, request)
    early.queue = [request]
    waiting.release_departed(cache.prefetches)
    cache.answer(Operation("a", 320, 0))
    assert cache.take() == ["a"]
    early.queue, cache.scheduler.waiting_queue = [], [request]
    waiting.release_departed(cache.prefetches)
    cache.answer(Operation("b", 320, 1000))
    assert cache.take() == [], "a batch will give room"


def test_what_another_prefetch_brings_is_not_read_again(cache: Cache) -> None:
    first, second, other = (Operation(*a) for a in (("a", 320, 0), ("b", 320, 0), ("c", 320, 500)))
    cache.answer(first, second, other)
    assert cache.take() == ["a", "c"]
    assert cache.take() == []
    assert cache.asked_again == []
    first.completed_tokens = 320
    del cache.ongoing_prefetch[first.handle]
    assert cache.take() == ["b"], "which HiCache drops, because nobody waits for it"
    assert cache.asked_again == ["b"]


def test_l3_is_asked_again_behind_what_came_before_its_answer(cache: Cache) -> None:
    """The pages are in host memory, and the request was looked up before they came."""
    first, early, behind, late = (
        Operation(name, tokens, at, at)
        for name, tokens, at in (("a", 320, 0), ("b", 320, 0), ("c", 160, 160), ("d", 320, 0))
    )
    cache.answer(first)
    assert cache.take() == ["a"]
    for one in (early, behind):
        cache.ongoing_prefetch[one.handle] = SimpleNamespace(operation=one, comp_xfers={})
    first.completed_tokens = 320
    del cache.ongoing_prefetch[first.handle]
    for one in (early, behind):
        cache.cache_controller.prefetch_hit_queue.put(one)
    cache.answer(late)  # host memory has lost them since
    assert cache.take() == ["b", "c", "d"]
    assert cache.asked_again == ["b", "c"]
    assert [*cache.ongoing_prefetch] == [late.handle]


def test_a_prefetch_that_brought_nothing_leaves_its_pages_to_the_next_one(cache: Cache) -> None:
    first, second = Operation("a", 320, 0), Operation("b", 320, 0)
    cache.answer(first, second)
    assert cache.take() == ["a"]
    del cache.ongoing_prefetch[first.handle]
    assert cache.take() == ["b"]
    assert cache.asked_again == []
    assert [*cache.ongoing_prefetch] == [second.handle]


def test_a_waiting_request_holds_its_prompt_until_it_waits_no_more(cache: Cache) -> None:
    looked_up: list[str] = []
    request = waiting_request("a", 64, cached_tokens_storage=256)
    request.init_next_round_input = lambda cache, cow_mamba: looked_up.append("a")
    cache.scheduler.waiting_queue = [request]
    operation = Operation("a", 320, 0)
    cache.answer(operation)
    waiting.hold_new(cache.scheduler, cache.prefetches, request)
    assert cache.held["a"].tokens == 64
    cache.looked_at()
    assert looked_up == []
    del cache.ongoing_prefetch[operation.handle]
    operation.completed_tokens, request.last_host_node, request.host_hit_length = 320, 2, 384
    waiting.release_departed(cache.prefetches)
    cache.looked_at()
    assert looked_up == ["a"]
    assert cache.unlocked == [1]
    held = cache.held["a"]
    assert (held.tokens, held.read) == (384, 320)
    waiting.count_used([request], cache.prefetches)
    assert held.read == 0
    cache.scheduler.waiting_queue = []
    waiting.release_departed(cache.prefetches)
    assert cache.unlocked == [1, 2]
    assert cache.held == {}


def test_a_retracted_request_holds_its_prompt_again_an_aborted_one_nothing(cache: Cache) -> None:
    request = waiting_request("a", 64)
    for _ in range(2):  # it comes, and is retracted later
        cache.scheduler.waiting_queue = [request]
        waiting.hold_new(cache.scheduler, cache.prefetches, request)
        waiting.release_departed(cache.prefetches)
        assert cache.held["a"].tokens == 64
        cache.scheduler.waiting_queue = []  # it was admitted, or aborted
        waiting.release_departed(cache.prefetches)
        assert cache.held == {}
    assert cache.unlocked == [1, 1]


def test_a_request_that_is_aborted_while_its_answer_waits_is_passed_over(cache: Cache) -> None:
    cache.free -= 640
    first, aborted, last = (Operation(name, 640, 1000 * n) for n, name in enumerate("abc"))
    cache.answer(first, aborted, last)
    assert cache.take() == ["a"]
    assert cache.take() == []
    del cache.ongoing_prefetch[aborted.handle], cache.ongoing_prefetch[first.handle]
    cache.free += 640
    assert cache.take() == ["b", "c"], "HiCache drops the answer of the aborted one"


def test_nothing_is_let_go_of_in_a_tree_that_was_emptied(cache: Cache) -> None:
    waiting.hold_new(cache.scheduler, cache.prefetches, waiting_request("a", 9))
    cache.storage_prefetch_retries = SimpleNamespace()  # as a flush leaves it
    waiting.release_departed(cache.prefetches)
    assert cache.unlocked == []
    assert cache.held == {}


def test_new_prompts_are_held_only_if_no_hit_waits_for_room(cache: Cache) -> None:
    cache.scheduler.waiting_queue = [large := waiting_request("large", HOST // 2)]
    waiting.hold_new(cache.scheduler, cache.prefetches, large)
    cache.answer(Operation("a", 320, 0))
    assert cache.take() == []
    waiting.hold_new(cache.scheduler, cache.prefetches, waiting_request("b", 9))
    assert cache.held["b"].tokens == 0


def test_a_stage_waits_for_the_answers_that_the_first_one_had(cache: Cache) -> None:
    first, other, late = (Operation(str(n), 320, 1000 * n) for n in range(3))
    cache.answer(first)
    comes = Timer(0.1, cache.answer, (other, late))
    comes.start()
    assert waiting.admit_answers(cache, cache.prefetches, 2) == 2
    assert list(cache.cache_controller.prefetch_hit_queue.queue)[:2] == [first, other]
    comes.join()
    assert waiting.admit_answers(cache, cache.prefetches, None) is None
