"""Own pages of K and V in host memory: how many there are, and the check in service."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hcache_backend.engine.host_pool import HostPages, OwnPagesPool
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.engine.service_check import KVChecks
from hcache_backend.engine.startup.page_plan import PagePlan, plan_host_pages
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE
from hcache_backend.partition.costs import Partition
from hcache_backend.partition.restore import Restore
from tests.engine.in_process.pools.host_pools import kv_cache_of_llama_3_8b
from tests.engine.in_process.pools.test_host_pool import LAYERS, PAGE, kv_pool


@pytest.mark.parametrize("page_size", [16, 64])
def test_host_memory_holds_as_many_tokens_as_sglangs_own_pool_would(page_size: int) -> None:
    """With Llama-3-8B: 32 layers, 8 heads of 128 values, bfloat16. SGLang's has no headers."""
    kvcache = kv_cache_of_llama_3_8b(page_size)
    slots = kvcache.size
    plan = PagePlan(kvcache, Restore(None, None, Partition(0, 0, 32), chunk_tokens=8192), WHOLE, 1)
    pages = plan_host_pages(kvcache, plan.layout, 0, 2.0, 1e12, with_shadows=False)
    assert pages.shadows == 0
    assert 0.99 * 2 * slots <= pages.host * page_size <= 2 * slots


class Checked:
    """A host pool of six pages over a device's of eight, checked in service."""

    def __init__(self, every: int) -> None:
        self.device = kv_pool(8)
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
        kv = KVSegments(self.device, range(LAYERS), PAGE, WHOLE, 1)
        self.layout = PageLayout(PAGE, tuple(map(kv.stored_layer, range(LAYERS))))
        self.pool = OwnPagesPool(
            self.device,
            PAGE,
            "page_first",
            page_layout=self.layout,
            pages=HostPages(6, 0),
            kv=kv,
            pin_memory=False,
            allocator_type="default",
        )
        self.lost: list[str] = []
        runtime = SimpleNamespace(
            config=SimpleNamespace(check_every_pages=every), lose_trust=self.lost.append
        )
        self.checks = KVChecks(runtime, self.pool, kv, None)  # type: ignore[arg-type]
        self.pool.on_freed.append(self.checks.freed)
        self.pool.on_backed_up.append(self.checks.transferred)

    def back_up(self, *pages: int) -> torch.Tensor:
        """Back device pages up; where in the host pool."""
        host = self.pool.alloc(PAGE * len(pages))
        assert host is not None
        slots = torch.cat([torch.arange(PAGE) + PAGE * page for page in pages])
        self.pool.backup_from_device_all_layer(self.device, host, slots, "kernel")
        return host

    def compare(self) -> None:
        """Let there be as many turns as the checks take."""
        while self.checks._copied:
            self.checks.run()

    def spoil(self, host_page: int) -> None:
        self.pool.kv_buffer[host_page, -1] += 1


def test_pages_that_are_what_the_pool_held_pass() -> None:
    checked = Checked(every=1)
    checked.back_up(3, 1)
    checked.device.k_buffer[0].zero_()  # whoever has the slots now
    checked.compare()
    assert not checked.checks.failed
    assert checked.lost == []


def test_one_byte_in_a_page_that_is_not_the_pools_ends_all_trust() -> None:
    checked = Checked(every=1)
    host = checked.back_up(3, 1)
    checked.spoil(int(host[0]) // PAGE)
    checked.compare()
    assert checked.checks.failed
    assert checked.lost == [
        "the self-check in service failed: K and V of layer 1 in a page are not the pool's"
    ]


def test_a_page_that_was_freed_is_somebody_elses() -> None:
    checked = Checked(every=1)
    host = checked.back_up(3)
    checked.pool.free(host)
    checked.spoil(int(host[0]) // PAGE)
    checked.compare()
    assert not checked.checks.failed


@pytest.mark.parametrize(("every", "found"), [(0, []), (1, [0, 2, 4]), (3, [0, 3]), (5, [0, 5])])
def test_one_page_in_so_many_is_looked_at(every: int, found: list[int]) -> None:
    """At most one in a transfer; here there are three, of two pages each."""
    checked = Checked(every)
    hosts = [checked.back_up(page, page + 1) for page in (0, 2, 4)]
    pages = [int(index) // PAGE for host in hosts for index in host[::PAGE]]
    looked_at = [pages.index(copied.host_page) for copied in checked.checks._copied]
    assert looked_at == found
