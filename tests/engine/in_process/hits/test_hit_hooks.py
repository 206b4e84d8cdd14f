"""What decisions about L3 hits do to HiCache's queues and threads."""

import math
import threading
import time
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolTransferResult
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    CacheRequestHandle,
    HybridCacheController,
    PrefetchOperation,
)

from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.ranks import Turn
from hcache_backend.sglang import radix_cache, scheduler, storage_threads
from hcache_backend.sglang.runtime import Runtime
from tests.kit.turns import alone

PAGES, SIZE = 8, 16
TOKENS = PAGES * SIZE


class Operation:
    """A prefetch; ``host_indices`` are None until pages are to be read."""

    host_indices: Any = None
    request_id = "request"


@pytest.fixture
def gate(runtime: Runtime) -> HitGate:
    runtime.judge(None, "test", 1.0)
    assert runtime.hit_gate is not None
    return runtime.hit_gate


@pytest.fixture
def controller() -> Iterator[Any]:
    """Its threads are alive and do nothing."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    names = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread")
    queues = {"prefetch_hit_queue": Queue[Any](), "ack_prefetch_queue": Queue[Any]()}
    yield SimpleNamespace(**dict.fromkeys(names, thread), **queues)
    stop.set()
    thread.join()


def cache_of(controller: Any) -> Any:
    return SimpleNamespace(
        enable_storage=True,
        pp_size=1,
        cache_controller=controller,
        ongoing_prefetch={},
        page_size=SIZE,
    )


def report(operation: Operation) -> Any:
    return SimpleNamespace(operation=operation, completed_req=True)


def test_prefetches_are_unfinished_until_refused_or_read(gate: HitGate, controller: Any) -> None:
    refused, found, read = Operation(), Operation(), Operation()
    gate.prefetches.unfinished = {refused, found, read}
    controller.prefetch_hit_queue.put(refused)
    controller.prefetch_hit_queue.put(found)
    controller.ack_prefetch_queue.put(report(read))

    def drain(*_: Any) -> None:
        found.host_indices = [1]

    radix_cache.around_drain(drain, cache_of(controller), 2, 1, 0)
    assert gate.prefetches.unfinished == {found}


@pytest.mark.parametrize(
    ("pages", "sides", "ended", "asks"),
    [
        (PAGES, 1, False, False),
        (PAGES, 0, False, True),  # a damaged side
        (PAGES - 1, 0, False, True),  # a damaged page before it
        (PAGES - 1, 0, True, False),  # it was not read to its end
    ],
)
def test_l3_is_asked_again_if_a_hit_of_a_hybrid_model_was_damaged(
    pages: int, sides: int, ended: bool, asks: bool, gate: HitGate, controller: Any
) -> None:
    side = SimpleNamespace(name="mamba", keys=["key"], indices_from_pool=None)
    found = PoolTransferResult(PAGES, {"mamba": sides})
    operation: Any = Operation()
    vars(operation).update(
        handle=CacheRequestHandle("request", 0),
        pool_transfers=[side],
        pool_storage_result=found,
        hash_value=["key"] * PAGES,
        completed_tokens=pages * SIZE,
        is_terminated=lambda: ended,
    )
    cache, asked = cache_of(controller), list[str]()
    cache.ongoing_prefetch = {1: SimpleNamespace(operation=operation)}
    cache.storage_prefetch_retries = SimpleNamespace(refetch=asked.append)
    controller.ack_prefetch_queue.put(report(operation))
    radix_cache.around_drain(lambda *_: None, cache, 0, 1, 0)
    assert asked == ["request"] * asks


def test_threads_end_what_they_were_asked_before_they_stop(gate: HitGate, controller: Any) -> None:
    answered, read = Operation(), Operation()
    gate.prefetches.unfinished = {answered, read}

    def work() -> None:
        time.sleep(0.1)
        controller.prefetch_hit_queue.put(answered)
        controller.ack_prefetch_queue.put(report(read))

    worker = threading.Thread(target=work)
    worker.start()
    stopped = storage_threads.around_stop(lambda c: len(c.ack_prefetch_queue.queue), controller)
    worker.join()
    assert stopped == 1
    assert gate.prefetches.unfinished == set()


def test_nobody_waits_for_threads_that_died(gate: HitGate, controller: Any) -> None:
    dead = threading.Thread(target=int)
    dead.start()
    dead.join()
    controller.prefetch_io_aux_thread = dead
    gate.prefetches.unfinished = {Operation()}
    begin = time.monotonic()
    assert storage_threads.around_stop(lambda c: "stopped", controller) == "stopped"
    assert time.monotonic() - begin < storage_threads._STOP_SECONDS / 2
    assert gate.prefetches.unfinished == set()


# ---- look-ups ----


def became_slow(gate: HitGate) -> None:
    for _ in range(3):
        gate.batch_ended(TOKENS, 0, 0, 1.0)
        gate.estimates.read.add_time(TOKENS, 0, 10.0)


@pytest.fixture
def slow_l3(gate: HitGate) -> HitGate:
    """Computing a hit takes a second and reading it ten, as was measured just now."""
    became_slow(gate)
    for trials in gate._trials:
        trials.last_read = math.inf  # however busy the machine is, none is due
    return gate


def asking(behind: int = 0) -> Any:
    """A controller whose L3 has all pages, so many of them behind the page store."""
    storage = SimpleNamespace(
        batch_exists=lambda keys, info: len(keys),
        batch_exists_v2=lambda keys, pools, info: PoolTransferResult(len(keys), {}),
        take_found_shared=lambda: behind,
    )
    return SimpleNamespace(enable_storage=True, page_size=SIZE, storage_backend=storage)


def prefetch(name: str = "a", **kinds: Any) -> PrefetchOperation:
    operation = PrefetchOperation(CacheRequestHandle(name, 0), list(range(TOKENS)), **kinds)
    operation.hash_value = ["key"] * PAGES
    return operation


def look_up(controller: Any, name: str = "a", **kinds: Any) -> tuple[list[str], int]:
    """SGLang's own look-up, judged."""
    query, operation = HybridCacheController._storage_hit_query, prefetch(name, **kinds)
    found: tuple[list[str], int] = storage_threads.around_look_up(query, controller, operation)
    return found


HYBRID = {"pool_transfers": [SimpleNamespace(name="swa")]}


@pytest.mark.parametrize("kind", [{}, HYBRID, {"assume_stored": True}])
def test_hits_of_a_slow_l3_are_and_stay_refused(kind: dict[str, Any], slow_l3: HitGate) -> None:
    assert look_up(asking(), **kind) == ([], 0)
    slow_l3.gpu.wanted = True  # else a reason to take it
    assert look_up(asking(), **kind) == ([], 0)
    keys, tokens = look_up(asking(), "b", **kind)
    assert (len(keys), tokens) == (PAGES, TOKENS)


@pytest.mark.parametrize(("kind", "taken"), [({}, 5 * SIZE), (HYBRID, 0)])
def test_of_a_hit_whose_end_is_slow_the_front_is_taken_if_parts_are_worth_something(
    kind: dict[str, Any], taken: int, slow_l3: HitGate
) -> None:
    for _ in range(3):
        slow_l3.estimates.read.add_time(TOKENS, 0, 0.1)
        slow_l3.estimates.shared.add_time(TOKENS, 0, 10.0)
    keys, tokens = look_up(asking(behind=3), **kind)
    assert (len(keys), tokens) == (taken // SIZE, taken)


def test_look_ups_on_behalf_of_nobody_are_not_judged(slow_l3: HitGate) -> None:
    for _ in range(2):
        assert look_up(asking(), "__storage_hit_query__")[1] == TOKENS
    assert not slow_l3.prefetches.add_request("__storage_hit_query__", 0, None).refused


@pytest.mark.parametrize("kind", [{}, HYBRID])
def test_a_slow_prefetch_ends_unless_that_would_discard_what_has_arrived(
    kind: dict[str, Any], gate: HitGate
) -> None:
    assert gate.may_ask("a", 0)
    look_up(asking(), **kind)
    operation = prefetch(**kind)
    became_slow(gate)
    turn = Turn(cache := cache_of(SimpleNamespace()))
    ongoing = {"a": SimpleNamespace(operation=operation)}
    cache.ongoing_prefetch = gate.prefetches.watch(ongoing)
    gate.propose_ends(turn)
    turn.agree(alone)
    gate.apply_ends()
    assert operation.is_terminated() is not bool(kind)


# ---- what is recomputed ----


@pytest.mark.parametrize(
    ("node", "pages", "recomputed"),
    [("root", 8, True), ("there", 8, True), ("evicted", 8, False), ("root", 4, False)],
)
def test_a_hit_has_a_front_only_behind_tokens_that_are_on_the_device(
    node: str, pages: int, recomputed: bool, gate: HitGate
) -> None:
    controller = SimpleNamespace(recomputing=lambda tokens, prefix: 1.0, eager=object())
    cache = cache_of(controller)
    cache.tree_core = SimpleNamespace(
        empty_match_result=SimpleNamespace(last_device_node="root"),
        is_full_device_evicted={"there": False, "evicted": True, "root": True}.__getitem__,
    )

    def ask(cache: Any, request: Any, last_host_node_id: str, new_input_tokens: Any) -> str:
        assert (gate.prefetches.waiting["a"].recomputing is not None) is recomputed
        return "asked"

    given = CacheRequestHandle("a", 0), node, list(range(pages * SIZE + SIZE - 1))
    assert radix_cache.around_prefetch(ask, cache, *given) == "asked"
    assert gate.prefetches.waiting == {}, "SGLang did not begin it"


@pytest.mark.parametrize(
    ("reachable", "front", "said"),
    [(None, 0, math.inf), (5, 2, 3 * SIZE), (0, 2, 0), (8, 0, 8 * SIZE)],
)
def test_the_gate_hears_how_far_slices_still_reach(
    reachable: int | None, front: int, said: float, runtime: Runtime
) -> None:
    running = runtime.prefetches.prefetch_of(prefetch())
    running.meeting = meeting = Meeting()
    meeting.set_pages(PAGES)
    meeting.front_launched(range(front))
    meeting.set_back(6, PAGES)
    meeting.reachable = reachable
    running.set_arrived(front * SIZE, SIZE)
    assert (running.reachable, running.lost) == (said, 2 * SIZE)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_prefill_behind_a_recomputation_is_not_measured(gate: HitGate, recomputed: bool) -> None:
    fronts = SimpleNamespace(take_recomputed=lambda: recomputed)
    cache = cache_of(SimpleNamespace(eager=SimpleNamespace(fronts=fronts)))
    sglang = SimpleNamespace(tree_cache=cache, waiting_queue=[])
    mode = SimpleNamespace(is_extend=lambda: True, is_mixed=lambda: False)
    batch = SimpleNamespace(
        forward_mode=mode, extend_lens=[100], prefix_lens=[0], hicache_consumer_index=-1
    )
    result = scheduler.around_batch(lambda *_: Operation(), sglang, batch)
    scheduler.after_batch(lambda *_: None, sglang, batch, result)
    assert (gate.estimates.prefill.seconds(100) is None) == recomputed
