"""SGLang's own assembly of pools, with our host pool and controller in the place of its own.

Hybrid models have a second pool, of windows or of states, whose host pool, transfers and evictions
are SGLang's. A hit counts up to a page at which both pools have their part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_memory

from hcache_backend.projection.paged_pool import full_attention

_HYBRID: dict[type, type[assembler.StackStrategy]] = {
    SWAKVPool: assembler._SwaStrategy,
    HybridLinearKVPool: assembler._MambaStrategy,
}


def strategy_of(kvcache: Any, *, own_pages: bool = False) -> assembler.StackStrategy:
    """SGLang's strategy that builds host pools for ``kvcache``, of a class that can have own pages.
    ``own_pages``: these hold the keys of an indexer (DSA), too; otherwise a side pool does."""
    if type(kvcache) is DSATokenToKVPool and not own_pages:
        return assembler._DsaStrategy()
    return _HYBRID.get(type(kvcache), assembler._PlainKvStrategy)()


def share_of_size(kvcache: Any, params: Any) -> float:
    """Share of ``--hicache-size`` for layers that attend to all tokens, as in SGLang; 1.0: all."""
    if type(kvcache) not in _HYBRID or get_memory().hicache_size <= 0:
        return 1.0
    windows = type(kvcache) is SWAKVPool
    side = kvcache.swa_kv_pool if windows else params.req_to_token_pool.mamba_pool
    return float(assembler._split_hicache_size(1, (full_attention(kvcache), side))[0])


@contextmanager
def with_our_pool(
    device_pool: Any, host_pool: Any, controller: Callable[..., Any]
) -> Iterator[None]:
    """Within the block SGLang's strategies take ``host_pool`` for ``device_pool``, and get their
    controller from ``controller``. They build side pools as ever."""
    original = assembler.build_kv_host_pool, assembler.HybridCacheController

    def build(*, kv_pool: Any, **others: Any) -> Any:
        return host_pool if kv_pool is device_pool else original[0](kv_pool=kv_pool, **others)

    assembler.build_kv_host_pool, assembler.HybridCacheController = build, controller
    try:
        yield
    finally:
        assembler.build_kv_host_pool, assembler.HybridCacheController = original
