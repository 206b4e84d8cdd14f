"""What decisions about L3 hits do to HiCache's queues and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.engine.hits import hooks
from hcache_backend.engine.hits.gate import HitGate
from hcache_backend.engine.runtime import Runtime


class Operation:
    """A prefetch; ``host_indices`` are None until pages are to be read."""

    host_indices: Any = None


@pytest.fixture
def gate(runtime: Runtime) -> HitGate:
    runtime.hit_gate = HitGate(None, "test", 1.0)
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


def cache_of(controller: Any, stages: int = 1) -> Any:
    return SimpleNamespace(enable_storage=True, pp_size=stages, cache_controller=controller)


def report(operation: Operation) -> Any:
    return SimpleNamespace(operation=operation, completed_req=True)


def test_a_pipeline_stage_hears_of_answers_that_it_may_not_have_yet(
    gate: HitGate, controller: Any
) -> None:
    told: list[Any] = []
    cache = cache_of(controller, stages=2)
    hooks.around_drain(lambda *given: told.append(given), cache, 1, 2)
    assert told == [(cache, 1, 2)]


def test_prefetches_are_unfinished_until_they_are_refused_or_read(
    gate: HitGate, controller: Any
) -> None:
    refused, found, read = Operation(), Operation(), Operation()
    gate.unfinished = {refused, found, read}
    controller.prefetch_hit_queue.put(refused)
    controller.prefetch_hit_queue.put(found)
    controller.ack_prefetch_queue.put(report(read))

    def drain(*_: Any) -> None:
        found.host_indices = [1]

    hooks.around_drain(drain, cache_of(controller), 2, 1)
    assert gate.unfinished == {found}


def test_threads_end_what_they_were_asked_before_they_are_stopped(
    gate: HitGate, controller: Any
) -> None:
    answered, read = Operation(), Operation()
    gate.unfinished = {answered, read}

    def work() -> None:
        time.sleep(0.1)
        controller.prefetch_hit_queue.put(answered)
        controller.ack_prefetch_queue.put(report(read))

    worker = threading.Thread(target=work)
    worker.start()
    stopped = hooks.around_stop(lambda c: len(c.ack_prefetch_queue.queue), controller)
    worker.join()
    assert stopped == 1
    assert gate.unfinished == set()


def test_nobody_waits_for_threads_that_died(gate: HitGate, controller: Any) -> None:
    dead = threading.Thread(target=int)
    dead.start()
    dead.join()
    controller.prefetch_io_aux_thread = dead
    gate.unfinished = {Operation()}
    begin = time.monotonic()
    assert hooks.around_stop(lambda c: "stopped", controller) == "stopped"
    assert time.monotonic() - begin < hooks._STOP_SECONDS / 2
    assert gate.unfinished == set()


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_prefill_behind_a_recomputation_says_nothing_of_prefills(
    gate: HitGate, recomputed: bool
) -> None:
    eager = SimpleNamespace(take_recomputed=lambda: recomputed)
    cache = cache_of(SimpleNamespace(eager=eager))
    cache.ongoing_prefetch = {}
    scheduler = SimpleNamespace(tree_cache=cache, waiting_queue=[])
    mode = SimpleNamespace(is_extend=lambda: True, is_mixed=lambda: False)
    batch = SimpleNamespace(
        forward_mode=mode, extend_lens=[100], prefix_lens=[0], hicache_consumer_index=-1
    )
    result = hooks.around_batch(lambda *_: SimpleNamespace(), scheduler, batch)
    hooks.after_batch(lambda *_: None, scheduler, batch, result)
    assert (gate.costs.prefill.seconds(100) is None) == recomputed
