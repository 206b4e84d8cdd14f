"""Pages of SGLang's own host pools through the store: every kind, every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost

from hcache_backend import HCacheStorage
from hcache_backend.config import ConfigError
from hcache_backend.sglang.compat import is_first
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.attach import check_arguments
from hcache_backend.start.capabilities import OWN_PAGES, refusal
from tests.engine.in_process.pools.host_pools import (
    STATES,
    TOKENS,
    asymmetric,
    fp4,
    indexer,
    mamba,
    mha,
    mla,
    qsa_indexer,
)
from tests.engine.in_process.start.servers import server
from tests.engine.in_process.storage_config import PAGE, server_args, storage_config

KEYS = [f"{i:064x}" for i in range(4)]
PLE = (torch.zeros(STATES, 5, 3, dtype=torch.bfloat16), torch.zeros(STATES, 1, dtype=torch.int64))

POOLS: list[tuple[str, Callable[[], Any], PoolName]] = [
    *(
        (f"mha-{layout}", lambda layout=layout: mha(layout), PoolName.KV)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    ),
    ("asymmetric", lambda: asymmetric("page_first"), PoolName.KV),
    *(
        (f"mla-{layout}", lambda layout=layout: mla(layout), PoolName.KV)
        for layout in ("layer_first", "page_first", "page_first_direct")
    ),
    ("swa", lambda: mha("page_first", heads=2), PoolName.SWA),
    ("indexer", lambda: indexer("page_first"), PoolName.INDEXER),
    ("indexer-copied", lambda: indexer("layer_first"), PoolName.INDEXER),
    ("mamba", lambda: mamba("page_first"), PoolName.MAMBA),
    ("conv-only", lambda: mamba("page_first", temporal=0), PoolName.MAMBA),
]
if not is_first():  # with which a server of Qwen4 does not start
    POOLS.append(("qsa-indexer", lambda: qsa_indexer("page_first"), PoolName.INDEXER))
    POOLS.append(("ple", lambda: mamba("page_first", beside=PLE), PoolName.MAMBA))


def buffers(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, MambaPoolHost):
        beside = getattr(pool, "slot_state_buffers", ())  # from 0.5.22 on
        return [pool.temporal_buffer, *pool.conv_buffer, *beside]
    if isinstance(pool, DSAIndexerPoolHost):
        return [pool.index_k_with_scale_buffer]
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        return [pool.k_buffer, pool.v_buffer]
    return [pool.kv_buffer]


def fill(pool: Any) -> None:
    for buffer in buffers(pool):
        if buffer.numel():
            buffer.view(torch.uint8).random_(0, 100)


def pages(pool: Any, first: int, count: int) -> torch.Tensor:
    """Host indices of ``count`` pages from page ``first`` on."""
    return torch.arange(first * pool.page_size, (first + count) * pool.page_size)


def content(pool: Any, first: int, count: int) -> list[torch.Tensor]:
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):  # has no flat pages
        span = slice(first * pool.page_size, (first + count) * pool.page_size)
        return [pool.k_buffer[span].clone(), pool.v_buffer[span].clone()]
    starts = pages(pool, first, count)[:: pool.page_size].tolist()
    return [pool.get_data_page(start).clone() for start in starts]


@contextmanager
def opened(folder: Path, pool: Any, name: str, **rank: Any) -> Iterator[HCacheStorage]:
    storage = HCacheStorage(storage_config(folder, **rank))
    try:
        # Beside the pool of the model itself, if it is not that one.
        storage.register_mem_pool_host(pool if name == PoolName.KV else mla("page_first"))
        storage.register_mem_host_pool_v2(pool, name)
        yield storage
    finally:
        storage.close()


@pytest.mark.parametrize(
    ("build", "name"), [(b, n) for _, b, n in POOLS], ids=[p[0] for p in POOLS]
)
def test_pages_come_back_byte_for_byte_through_both_interfaces(
    build: Callable[[], Any], name: str, tmp_path: Path, runtime: Runtime
) -> None:
    pool = build()
    fill(pool)
    with opened(tmp_path, pool, name) as storage:
        wrote = [PoolTransfer(PoolName(name), host_indices=pages(pool, 1, 3), keys=KEYS[:3])]
        if name == PoolName.KV:
            storage.batch_set_v1(KEYS[:3], pages(pool, 1, 3))
        else:
            storage.batch_set_v2(wrote)
        given = content(pool, 1, 3)
        fill(pool)
        asked = PoolTransfer(PoolName(name), host_indices=pages(pool, 4, 4), keys=KEYS)
        assert storage.batch_get_v2([asked]) == {name: [True, True, True, False]}
        assert all(map(torch.equal, content(pool, 4, 3), given))
        if name == PoolName.KV:
            fill(pool)
            assert [storage.exists(key) for key in KEYS] == [True, True, True, False]
            assert storage.batch_get_v1(KEYS, pages(pool, 3, 4)) == [True, True, True, False]
            assert all(map(torch.equal, content(pool, 3, 3), given))


def test_two_ranks_read_halves_of_what_one_rank_wrote(tmp_path: Path, runtime: Runtime) -> None:
    whole = mha("page_head")
    fill(whole)
    lcm = {"tp_lcm_size": 2}
    with opened(tmp_path, whole, PoolName.KV, **lcm) as storage:
        storage.batch_set_v1(KEYS[:2], pages(whole, 1, 2))
        assert storage.batch_exists(KEYS) == 2
    halves = []
    for rank in range(2):
        half = mha("page_head", heads=2)
        with opened(tmp_path, half, PoolName.KV, tp_rank=rank, tp_size=2, **lcm) as storage:
            assert storage.batch_get_v1(KEYS[:3], pages(half, 0, 3)) == [True, True, False]
            storage.batch_set_v1(KEYS[2:], pages(half, 2, 2))
        halves.append(half.kv_buffer[:, :2])
    assert torch.equal(torch.cat(halves, dim=2), whole.kv_buffer[:, 1:3])
    with opened(tmp_path, whole, PoolName.KV, **lcm) as storage:
        assert storage.batch_exists(KEYS) == 4
        for page in (tmp_path).glob("**/*.page"):
            page.unlink()
            break  # one half of one page
        found = storage.batch_get_v1(KEYS, pages(whole, 4, 4))
        assert sorted(found) == [False, True, True, True]


def test_heads_that_do_not_divide_are_refused(tmp_path: Path, runtime: Runtime) -> None:
    with (
        pytest.raises(ConfigError, match=r"'tp_lcm_size' is 3; .* it can be 1, 2, 4"),
        opened(tmp_path, mha("page_head"), PoolName.KV, tp_lcm_size=3),
    ):
        pass


def test_a_pool_that_offers_no_pages_is_named_once_and_never_a_hit(
    tmp_path: Path,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MXFP8 pools on a GPU refuse like this; they are no part of the oldest version."""

    def refuse(*args: Any) -> Any:
        raise NotImplementedError("no flat storage (L3) pages yet")

    pool = mha("page_first")
    for name in ("get_page_buffer_meta", "get_dummy_flat_data_page", "get_data_page"):
        monkeypatch.setattr(pool, name, refuse)
    with opened(tmp_path, pool, PoolName.KV) as storage:
        for _ in range(2):
            storage.batch_set_v1(KEYS, pages(pool, 0, 4))
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_get_v1(KEYS, pages(pool, 0, 4)) == [False] * 4
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    [line] = [line for line in told if "cannot be stored" in line]
    assert "pages of pool kv cannot be stored: no flat storage" in line
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_fp4_without_its_scales_is_in_no_page() -> None:
    """Of ours, by its type. SGLang has no host pool of it, or one without scales: then an L3 is
    refused at the start."""
    pool, make_host_pool = fp4()
    assert refusal(OWN_PAGES, replace(server(), kvcache=pool)) == f"KV quantised as {pool.dtype}"
    with pytest.raises((ValueError, ConfigError), match="scale"):
        make_host_pool()
        check_arguments(server_args(kv_cache_dtype="fp4_mx_block16"))


@pytest.mark.parametrize(
    ("build", "name", "number", "is_mla", "shared"),
    [
        (mha, PoolName.KV, "tp", False, False),
        (mla, PoolName.KV, "tp", True, True),
        # Divided over the ranks beside MLA pages, which are not.
        (mamba, PoolName.MAMBA, "tp", True, False),
        (mha, PoolName.DRAFT, "tp", True, False),
        # Data-parallel attention: the ranks of a group are counted from 0 in each of them.
        (mha, PoolName.KV, "dp", False, True),
        (mla, PoolName.KV, "attn_cp", True, False),
        (mha, PoolName.KV, "pp", False, False),
    ],
    ids=["tp", "tp-mla", "tp-mla-mamba", "tp-mla-draft", "dp", "cp", "pp"],
)
def test_ranks_share_pages_only_where_they_hold_the_same(
    build: Callable[[str], Any],
    name: str,
    number: str,
    is_mla: bool,
    shared: bool,
    tmp_path: Path,
    runtime: Runtime,
) -> None:
    pool = build("page_first")
    transfer = PoolTransfer(PoolName(name), host_indices=pages(pool, 0, 2), keys=KEYS[:2])
    first, second = (
        {f"{number}_rank": rank, f"{number}_size": 2, "is_mla_model": is_mla} for rank in range(2)
    )
    with opened(tmp_path, pool, name, **first) as storage:
        storage.batch_set_v2([transfer])
    with opened(tmp_path, pool, name, **second) as storage:
        assert storage.batch_get_v2([transfer]) == {name: [shared, shared]}


def test_states_of_another_type_are_other_pages(tmp_path: Path, runtime: Runtime) -> None:
    """As many bytes, other numbers: options of SGLang choose the type of states."""
    for dtype, found in ((torch.bfloat16, True), (torch.float16, False)):
        pool = mamba("page_first", dtype=dtype)
        fill(pool)
        transfer = PoolTransfer(PoolName.MAMBA, host_indices=pages(pool, 0, 2), keys=KEYS[:2])
        with opened(tmp_path, pool, PoolName.MAMBA) as storage:
            if found:
                storage.batch_set_v2([transfer])
            assert storage.batch_get_v2([transfer]) == {PoolName.MAMBA: [found, found]}


def test_an_anchor_that_only_counts_tokens_is_a_hit(tmp_path: Path, runtime: Runtime) -> None:
    """DeepSeek V4: all data is in pools beside it."""
    anchor = LogicalHostPool(TOKENS, PAGE)
    side = indexer("page_first")
    fill(side)
    with opened(tmp_path, anchor, PoolName.KV) as storage:
        storage.register_mem_host_pool_v2(side, PoolName.INDEXER)
        transfer = PoolTransfer(PoolName.INDEXER, host_indices=pages(side, 0, 2), keys=KEYS[:2])
        storage.batch_set_v2([transfer])
        assert storage.batch_set_v1(KEYS[:2], torch.arange(2 * PAGE)) == [True, True]
        wanted = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
        assert storage.batch_exists_v2(KEYS, [wanted]).kv_hit_pages == 2
        assert storage.batch_get_v1(KEYS[:2], torch.arange(2 * PAGE)) == [True, True]
        storage.clear()
        assert storage.batch_exists_v2(KEYS, [wanted]).kv_hit_pages == 0
