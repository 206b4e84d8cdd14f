"""Many requests that wait for L3: the real hooks, gate, list of waiting requests and eager loads.

python -m tests.engine.in_process.hits.crowd

prints the time of a turn of the scheduler, and of receiving a request, by the number of hits.
"""

from __future__ import annotations

import statistics
import time
from queue import Queue
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheRequestHandle

from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.sglang import radix_cache, scheduler
from hcache_backend.sglang import runtime as runtimes
from tests.engine.in_process.storage_config import unconfigured_runtime
from tests.kit.host import bare_controller
from tests.kit.prefetch import Operation, Restore, eager_over

PAGE, PAGES, TOKENS = 4, 8, 32
COUNTS = (32, 256, 1000, 4000)


class Info(NamedTuple):
    operation: Any
    host_indices: Any
    anchor_node_id: int = 0
    comp_xfers: Any = MappingProxyType({})


class Asked(Operation):
    """SGLang's operation of a request whose answer has not come."""

    storage_hit_count, pool_transfers, start_time = TOKENS, None, 0.0

    def __init__(self, number: int) -> None:
        super().__init__(PAGES, PAGE, first=number * PAGES)
        self.indices, self.host_indices = self.host_indices, None
        self.token_ids = SimpleNamespace(token_ids=[number] * TOKENS)  # type: ignore[assignment]
        self.request_id = str(number)
        self.handle = CacheRequestHandle(self.request_id, 0)
        self.storage_start = 0


class Crowd:
    """A server on which requests wait; none is admitted."""

    def __init__(self, hits: int = 0, *, early: bool = False) -> None:
        """``hits`` requests come; ``early`` ones wait for their decode servers first."""
        state = unconfigured_runtime()
        runtimes._runtime = state
        state.judge(None, "test", 1.0)
        assert state.hit_gate is not None
        self.gate, self.number = state.hit_gate, 0
        for _ in range(40):
            self.gate.batch_ended(TOKENS, 0, 0, 1.0)
            self.gate.estimates.read.add_time(TOKENS, 0, 0.3)
        pages = SimpleNamespace(
            device="cpu",
            count=lambda: 0,
            make_room=lambda pages: None,
            holds=lambda node: True,
        )
        budget = SliceBudget(1.0, TOKENS, lambda tokens, prefix: 1.0, in_seconds=True)
        of_loads, starts = {"recomputes_pages": False}, {"start": lambda *_, **__: Restore()}
        eager = eager_over(pages, PAGES, PAGE, budget, starts, loads=of_loads)
        eager._prefetches = eager.fronts._prefetches = state.prefetches
        host = SimpleNamespace(size=1 << 30, available_size=lambda: 1 << 30)
        self.controller = bare_controller(
            eager._pool,
            runtime=state,
            eager=eager,
            after_forwards=lambda stream: None,
            prefetch_hit_queue=Queue(),
            ack_prefetch_queue=Queue(),
            mem_pool_host=host,
        )
        self.cache = SimpleNamespace(
            enable_storage=True,
            pp_size=1,
            page_size=PAGE,
            prefetch_threshold=PAGE,
            prefetch_stop_policy="wait_complete",
            is_write_back=False,
            ongoing_prefetch={},
            cache_controller=self.controller,
            storage_prefetch_retries=SimpleNamespace(cancel=lambda rid: None),
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 1 << 30),
            tree_core=SimpleNamespace(is_full_device_evicted=lambda node: False),
            is_backuped=lambda node: True,
            inc_host_lock_ref=lambda node: SimpleNamespace(to_dec_params=lambda: node),
            dec_host_lock_ref=lambda node, receipt: None,
            evict_host=lambda tokens: None,
            _all_reduce_attn_groups=lambda numbers, operation: None,
            _storage_prefetch_wait={},
        )
        nothing = SimpleNamespace(reqs=[], is_empty=lambda: True)
        self.scheduler = SimpleNamespace(
            tree_cache=self.cache,
            waiting_queue=[],
            running_batch=nothing,
            last_batch=None,
            chunked_req=None,
        )
        self.comes_to = self.scheduler.waiting_queue
        if early:
            self.comes_to = []
            queue = SimpleNamespace(queue=self.comes_to)
            self.scheduler.disagg_prefill_bootstrap_queue = queue
        for _ in range(hits):
            self.receive()

    def receive(self) -> None:
        """A request comes."""
        operation, self.number = Asked(self.number), self.number + 1
        request = SimpleNamespace(
            rid=operation.request_id,
            cache_request_handle=operation.handle,
            storage_prefetch_retry_attempts=0,
            last_host_node=self.number,
            host_hit_length=PAGE,
            init_next_round_input=lambda cache, cow_mamba: None,
        )

        def ask(cache: Any, handle: Any, last_host_node_id: int, new_input_tokens: Any) -> None:
            cache.ongoing_prefetch[handle] = Info(operation, None)

        def prefetch(*_: Any) -> None:
            ids = operation.token_ids
            radix_cache.around_prefetch(ask, self.cache, operation.handle, self.number, ids)

        scheduler.around_received(prefetch, self.scheduler, request)
        self.comes_to.append(request)

    def answer(self, reads: int | None = None) -> None:
        """L3 has the hits of all that wait. HiCache reads ``reads`` of them (None: all), and has no
        room for others."""
        waiting = [info.operation for info in self.cache.ongoing_prefetch.values()]
        unread = [operation for operation in waiting if operation.host_indices is None]
        for place, operation in enumerate(unread):
            self.gate.gpu.wanted = True  # otherwise a hit far behind is computed
            assert (
                self.gate.tokens_to_read(
                    self.gate.prefetches.prefetch_of(operation), TOKENS, TOKENS
                )
                == TOKENS
            )
            if reads is None or place < reads:
                self.read(operation)
            else:
                self.controller.prefetch_hit_queue.put(operation)
        self.gate.gpu.wanted = False
        if reads is not None:
            self.controller.mem_pool_host.available_size = lambda: 0
            self.scheduler.running_batch.is_empty = lambda: False

    def read(self, operation: Asked) -> None:
        """HiCache gives a hit host pages."""
        operation.host_indices = operation.indices
        self.cache.ongoing_prefetch[operation.handle] = Info(operation, operation.indices)

    def ends(self) -> None:
        """The first prefetch is over, with all of its hit."""
        handle, info = next(iter(self.cache.ongoing_prefetch.items()))
        info.operation.completed_tokens = TOKENS
        del self.cache.ongoing_prefetch[handle]

    def arrived(self, pages: int) -> None:
        """So many pages of the first hit are there, on all ranks."""
        operation = next(iter(self.cache.ongoing_prefetch.values())).operation
        operation.completed_tokens = pages * PAGE
        ack = SimpleNamespace(operation=operation, completed_req=False)
        self.controller.ack_prefetch_queue.put(ack)

    def abort(self, place: int) -> None:
        """A waiting request is aborted."""
        request = self.comes_to.pop(place)
        del self.cache.ongoing_prefetch[request.cache_request_handle]

    def turn(self) -> None:
        def events(cache: Any) -> None:
            answered, acks = self.controller.prefetch_hit_queue, self.controller.ack_prefetch_queue
            counts = answered.qsize(), acks.qsize()
            radix_cache.around_drain(drain, cache, *counts, None)

        def drain(cache: Any, answers: int, reports: int, *_: Any) -> None:
            for _ in range(answers):
                self.read(self.controller.prefetch_hit_queue.get())
            self.controller.ack_prefetch_queue.queue.clear()

        radix_cache.around_turn(events, self.cache)


def microseconds(of: Any, times: int) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        of()
        found.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(found)


def main() -> None:
    print("| hits | a turn, while they are read | while they wait for room | a request comes |")
    print("|--:|--:|--:|--:|")
    torch.set_num_threads(1)
    for hits in COUNTS:
        times = max(10, 20_000 // hits)
        reading, waiting = Crowd(hits), Crowd()
        comes = microseconds(reading.receive, 30)
        runtimes._runtime = reading.controller._runtime
        reading.answer()
        for _ in range(3):
            reading.turn()
        turn = microseconds(reading.turn, times)
        waiting = Crowd(hits)
        waiting.answer(reads=0)
        waiting.turn()
        room = microseconds(waiting.turn, times)
        print(f"| {hits:,} | {turn:,.0f} | {room:,.0f} | {comes:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
