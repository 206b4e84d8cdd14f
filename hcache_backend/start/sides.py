"""Pools beside that of the full-attention layers: the windows, or the states, of hybrid models.

They are SGLang's own host pools, filled and loaded by SGLang. Our pages hold the full-attention
layers, and a hit counts up to a page at which all pools have their part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackStrategy,
    _evict_mamba_for_device_alloc,
    _evict_swa_for_device_alloc,
    _MambaStrategy,
    _split_hicache_size,
    _stage_local_layer_mapping,
    _swa_layer_mappings,
    _SwaStrategy,
    build_kv_host_pool,
    build_pool_entry,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.pool_host import PoolEntry
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from hcache_backend.projection.paged_pool import full_attention

HYBRID: dict[type, StackStrategy] = {
    SWAKVPool: _SwaStrategy(),
    HybridLinearKVPool: _MambaStrategy(),
}
"""SGLang's pools of hybrid models, and how SGLang builds their plain pages."""


@dataclass(frozen=True)
class SidePool:
    """The pool beside that of the full-attention layers.

    Attributes:
        component: SGLang's name of its layers in the radix tree.
        layer_ids: Number of all layers of the model.
        full: Number of each full-attention layer in its own pool.
        device_pool: SGLang's pool on the device.
        share: Part of ``--hicache-size`` that the full-attention layers get.
        make: Allocates its host memory; raises ValueError without room.
    """

    component: ComponentType
    layer_ids: int
    full: dict[int, int]
    device_pool: Any
    share: float
    make: Callable[[], PoolEntry]

    @property
    def of_requests(self) -> bool:
        """True if forward passes wait for its layers by way of SGLang's table of requests."""
        return self.component == ComponentType.MAMBA


def side_pool(cache: Any, kvcache: Any, params: Any) -> SidePool | None:
    """The side pool of SGLang's ``kvcache``; None if all layers attend to all tokens."""
    if type(kvcache) is SWAKVPool:
        return _windows(cache, kvcache, params)
    return _states(cache, kvcache, params) if type(kvcache) is HybridLinearKVPool else None


def _windows(cache: Any, kvcache: Any, params: Any) -> SidePool:
    full, windows = _swa_layer_mappings(kvcache)
    layer_ids, pool = max(full.keys() | windows.keys()) + 1, kvcache.swa_kv_pool
    share = _share(kvcache, pool)

    def make() -> PoolEntry:
        allocator = params.token_to_kv_pool_allocator.swa_attn_allocator
        host_pool = build_kv_host_pool(
            kv_pool=pool,
            page_size=params.page_size,
            use_mla=False,
            host_size=_rest(share),
            pool_label="swa",
        )
        return build_pool_entry(
            name=PoolName.SWA,
            host_pool=host_pool,
            device_pool=pool,
            layer_mapping=windows,
            transfer_layer_id_max=layer_ids,
            host_evict_fn=lambda n: cache.evict_host(n, ComponentType.SWA),
            device_evict_fn=lambda n: _evict_swa_for_device_alloc(cache, n),
            device_alloc_fn=allocator.alloc,
            device_free_fn=allocator.free,
        )

    return SidePool(ComponentType.SWA, layer_ids, full, pool, share, make)


def _states(cache: Any, kvcache: Any, params: Any) -> SidePool:
    table, first = params.req_to_token_pool, kvcache.start_layer
    full = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, first)
    states = _stage_local_layer_mapping(table.mamba_map, first)
    layer_ids, pool = max(full.keys() | states.keys()) + 1, table.mamba_pool
    share = _share(kvcache, pool)

    def make() -> PoolEntry:
        memory, allocator = get_memory(), table.mamba_allocator
        host_pool = MambaPoolHost(
            pool,
            memory.hicache_ratio,
            _rest(share),
            allocator_type=get_allocator_type(),
            layout=memory.hicache_mem_layout,
        )
        return build_pool_entry(
            name=PoolName.MAMBA,
            host_pool=host_pool,
            device_pool=pool,
            layer_mapping=states,
            transfer_layer_id_max=layer_ids,
            host_evict_fn=lambda n: cache.evict_host(n, ComponentType.MAMBA),
            device_evict_fn=lambda n: _evict_mamba_for_device_alloc(cache, n),
            device_alloc_fn=allocator.alloc,
            device_free_fn=allocator.free,
        )

    return SidePool(ComponentType.MAMBA, layer_ids, full, pool, share, make)


def _share(kvcache: Any, side: Any) -> float:
    """The part of a size of host memory that goes to the full-attention layers, as in SGLang."""
    if get_memory().hicache_size <= 0:
        return 1.0
    return float(_split_hicache_size(1.0, (full_attention(kvcache), side))[0])


def _rest(share: float) -> float:
    return float(get_memory().hicache_size) * (1 - share)
