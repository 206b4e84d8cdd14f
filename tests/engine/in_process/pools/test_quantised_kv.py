"""K and V in fp8: their bits, and the scales beside them. Served ones: `modes/test_fp8.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start import page_plan
from hcache_backend.start.page_plan import PagePlan
from tests.engine.in_process.pools.host_pools import mha
from tests.engine.in_process.pools.test_pool_pages import KEYS, opened, pages

LAYERS, PAGE = 2, 16


@pytest.fixture
def kvcache() -> MHATokenToKVPool:
    """SGLang's pool of 8 pages, fp8, with random bytes in it."""
    pool = MHATokenToKVPool(
        8 * PAGE, PAGE, torch.float8_e4m3fn, 4, 8, LAYERS, "cpu", enable_memory_saver=False
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(torch.uint8).random_(0, 255)
    return pool


def test_pages_hold_the_bits_of_the_pool(kvcache: MHATokenToKVPool) -> None:
    kv = KVSegments(kvcache, range(LAYERS), PAGE, WHOLE, 1)
    layout = PageLayout(PAGE, tuple(map(kv.stored_layer, range(LAYERS))))
    assert sum(layout.segment_bytes) == LAYERS * 2 * PAGE * 4 * 8
    memory = torch.zeros((3, layout.page_bytes), dtype=torch.uint8)
    slots, others = torch.arange(PAGE, 3 * PAGE), torch.arange(5 * PAGE, 7 * PAGE)
    on_host = torch.tensor([2, 0])
    kv.save(layout, memory, on_host, slots)
    for layer in range(LAYERS):
        copy = kv.restored_layer(layer).copy
        assert copy is not None
        copy([layer], memory, on_host, [layout.segment_offsets[layer]], others)
    for buffer in (*kvcache.k_buffer, *kvcache.v_buffer):
        bits = buffer.view(torch.uint8)
        assert torch.equal(bits[others], bits[slots])


def test_scales_tell_own_and_plain_pages_apart(
    kvcache: MHATokenToKVPool, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set as SGLang's models set those of ``--quantization-param-path``: as numbers, which are not
    among the weights."""
    monkeypatch.setattr(
        page_plan, "attention_ranks", lambda: SimpleNamespace(world_size=1, rank_in_group=0)
    )
    attention = runtime.runner.model.attention = RadixAttention(4, 8, 1.0, 4, layer_id=0)
    plan = PagePlan(
        kvcache, Restore(None, None, Partition(0, 0, LAYERS), chunk_tokens=64), WHOLE, 1
    )
    plain, own = mha("page_first"), set()
    for scale, found in ((None, 0), (1.5, 0), (2.0, 0), (1.5, 1), (None, 1)):
        attention.k_scale = attention.v_scale = scale
        own.add(runtime.namespace_of(runtime.weights, **plan.fields(runtime.runner)))
        with opened(tmp_path, plain, PoolName.KV) as storage:
            assert storage.batch_exists(KEYS[:1]) == found
            storage.batch_set_v1(KEYS[:1], pages(plain, 0, 1))
    assert len(own) == 3
