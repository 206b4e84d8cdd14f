"""Eager loads in SGLang's own allocator on modelled streams: no wrong order, and none without its
edges (see tests/order)."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hcache_backend.capture.staging import Capture
from hcache_backend.host.loads import QueuedLoad
from hcache_backend.prefetch.eager_loads import EagerLoads
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.sglang.allocator import ReservablePages
from hcache_backend.sglang.controller import OwnPagesController
from tests.kit.prefetch import Operation
from tests.kit.turns import turn_of
from tests.order import edges
from tests.order.checker import Checker
from tests.order.reports import IN_PROCESS
from tests.order.scenario_loads import Loading
from tests.order.scenario_restore import GPU, PAGES, SIZE
from tests.order.scenarios import run


def eager(checker: Checker) -> None:
    """Pages arrive of two prefetches, one at the root and one behind six pages on the device.

    Forward passes were launched over the device pages that are reserved, and over those before the
    second prefetch, which go to somebody else next. A load gets what was restored of the first
    prefetch and is refused, because another pool has no room; these pages go to somebody else, too.
    """
    loading = Loading(checker)
    engine = loading.engine
    allocator = PagedTokenToKVPoolAllocator(
        (PAGES - 1) * SIZE, SIZE, torch.float32, GPU, SimpleNamespace(), need_sort=False
    )
    pages = ReservablePages(allocator, Capture(loading.arena))
    pool = SimpleNamespace(
        page_size=SIZE,
        arena=loading.arena,
        page_layout=loading.pool.layout,
        page_ids=lambda indices: indices[::SIZE].numpy() // SIZE,
        on_freed=[],
        mark_arrived=lambda: None,
    )
    budget = SliceBudget(1.0, 4 * SIZE, lambda tokens, prefix: 0.01 * tokens, in_seconds=True)
    process = L3Progress(), Operation.prefetches
    eager = EagerLoads(pages, pool, loading.pipeline, loading.queue, PAGES, budget, *process)  # type: ignore[arg-type]
    controller = SimpleNamespace(
        device=GPU,
        tp_group=None,
        load_fence_stream=engine.forward_stream,
        l2_transfer_engine=SimpleNamespace(host_to_device_stream=engine.loading),
    )
    controller.after_forwards = partial(OwnPagesController.after_forwards, controller)
    checker.begin()
    with checker.on(engine.schedule):
        before, others = pages.take(6), pages.take(12)
        engine.forward(others)
        pages.give(others)
        at_root = Operation(6, SIZE, node="root")
        behind = Operation(6, SIZE, first=6, node="node")
        pages.cache = SimpleNamespace(
            cache_controller=controller,
            ongoing_prefetch={0: at_root, 1: behind},
            tree_core=SimpleNamespace(
                empty_match_result=SimpleNamespace(last_device_node="root"),
                is_full_device_evicted=lambda node: False,
                collect_full_device_indices=lambda node, root: before[
                    : 0 if node == root else None
                ],
            ),
        )
        at_root.completed_tokens = 2 * SIZE
        turn_of(eager, pages.cache)
        engine.forward(before)
        behind.completed_tokens = 2 * SIZE
        turn_of(eager, pages.cache)
        pages.give(before)
        engine.forward(pages.take(6))
        eager.load(QueuedLoad(pool.page_ids(at_root.host_indices)[:2]), partial(refused, allocator))
        engine.forward(pages.take(2))


def refused(allocator: PagedTokenToKVPoolAllocator) -> None:
    allocator.free(allocator.alloc(2 * SIZE))


def test_eager_loads_wait_for_forward_passes_and_those_for_them() -> None:
    checker = Checker()
    run(eager, checker)
    assert not checker.findings, checker.report()


@pytest.mark.parametrize("edge", IN_PROCESS)
def test_every_edge_of_eager_loads_is_missed(edge: str) -> None:
    checker = Checker()
    with edges.without(edge):
        run(eager, checker)
    assert IN_PROCESS[edge].what in {finding.what for finding in checker.findings}
