"""HCacheStorage as HiCache calls it: v1, v2, and trouble."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.utils import hash_str_to_int64
from sglang.srt.observability.metrics_collector import StorageMetrics

from hcache_backend import HCacheStorage
from hcache_backend.format.envelope import key_bytes, parse_name
from hcache_backend.sglang.runtime import Runtime, Weights
from hcache_backend.start import attach
from tests.engine.harness.ours import flip_bit
from tests.engine.in_process.storage_config import PAGE, storage_config

KEYS = [f"{i:064x}" for i in range(8)]


class HostPool:
    """Two pieces of memory a page, as SGLang's page_first pools have."""

    layout = "page_first"
    size = 64 * PAGE
    conv_dtype = temporal_dtype = torch.uint8  # those of states

    def __init__(self, bytes_per_token: int) -> None:
        self.size_per_token = 2 * bytes_per_token
        self.page_size = PAGE
        self.data = torch.zeros((2, 64, PAGE * bytes_per_token), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[::PAGE] // PAGE).tolist()
        parts = [self.data[half, page] for page in pages for half in (0, 1)]
        return [part.data_ptr() for part in parts], [part.numel() for part in parts]

    def fill(self, pages: range) -> torch.Tensor:
        """Random bytes in ``pages``; returns their host indices."""
        self.data[:, pages.start : pages.stop].random_(0, 255)
        return torch.arange(pages.start * PAGE, pages.stop * PAGE)


@pytest.fixture
def pool() -> HostPool:
    return HostPool(32)


@pytest.fixture
def storage(tmp_path: Path, runtime: Runtime, pool: HostPool) -> Iterator[HCacheStorage]:
    storage = HCacheStorage(storage_config(tmp_path), {})
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    yield storage
    storage.close()


def test_pools_do_not_share_pages_and_policies_decide_the_usable_prefix(
    storage: HCacheStorage, pool: HostPool
) -> None:
    side = HostPool(8)
    storage.register_mem_host_pool_v2(side, PoolName.SWA)
    storage.batch_set_v1(KEYS[:6], pool.fill(range(0, 6)))
    transfer = PoolTransfer(PoolName.SWA, host_indices=side.fill(range(2, 4)), keys=KEYS[2:4])
    assert storage.batch_set_v2([transfer]) == {PoolName.SWA: [True, True]}

    every = PoolTransfer(PoolName.SWA, keys=KEYS[:1], hit_policy=PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    last = PoolTransfer(PoolName.SWA, keys=KEYS[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = storage.batch_exists_v2(KEYS, [last])
    assert result.kv_hit_pages == 4
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 4}
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == 6

    given = side.data[:, 2:4].clone()
    side.data.zero_()
    into = PoolTransfer(PoolName.SWA, host_indices=torch.arange(8, 20), keys=KEYS[2:5])
    assert storage.batch_get_v2([into]) == {PoolName.SWA: [True, True, False]}
    assert torch.equal(side.data[:, 2:4], given)


def test_a_state_close_behind_another_one_of_its_sequence_is_not_written(
    tmp_path: Path, runtime: Runtime, pool: HostPool
) -> None:
    """`state_tokens` of three pages. A state behind other pages is another sequence's."""
    config = storage_config(tmp_path, {"state_tokens": 3 * PAGE})
    storage, side = HCacheStorage(config, {}), HostPool(8)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(side, PoolName.MAMBA)

    def stored(keys: list[str]) -> bool:
        """Write a state at the end of these pages; is it there?"""
        page = PoolTransfer(PoolName.MAMBA, host_indices=side.fill(range(1)), keys=keys[-1:])
        before = HiCacheStorageExtraInfo(prefix_keys=keys[:-1])
        assert storage.batch_set_v2([page], before) == {PoolName.MAMBA: [True]}
        return storage.batch_get_v2([page]) == {PoolName.MAMBA: [True]}

    assert stored(KEYS[:1])
    assert not stored(KEYS[:2])
    assert not stored(KEYS[:3])
    assert stored(KEYS[:4])
    assert not stored(KEYS[:6])
    assert stored(KEYS[:7])
    assert stored([f"{i:064x}" for i in range(50, 53)])
    storage.close()


def test_a_state_that_one_rank_has_lost_is_near_for_no_rank(
    tmp_path: Path, runtime: Runtime, pool: HostPool
) -> None:
    """SGLang takes the shortest hit of the ranks: each of them must have a state there."""
    side = HostPool(8)
    ranks = []
    for rank in range(2):
        config = storage_config(tmp_path, {"state_tokens": 5 * PAGE}, tp_rank=rank, tp_size=2)
        ranks.append(HCacheStorage(config, {}))
        ranks[-1].register_mem_pool_host(pool)
        ranks[-1].register_mem_host_pool_v2(side, PoolName.MAMBA)
    trailing = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def turn(pages: int) -> list[int]:
        """Each rank writes the K and V of a turn, and the state at its end; its hits then."""
        for storage in ranks:
            storage.batch_set_v1(KEYS[:pages], pool.fill(range(pages)))
            end = PoolTransfer(PoolName.MAMBA, side.fill(range(1)), keys=KEYS[pages - 1 : pages])
            storage.batch_set_v2([end], HiCacheStorageExtraInfo(prefix_keys=KEYS[: pages - 1]))
        return [storage.batch_exists_v2(KEYS, [trailing]).kv_hit_pages for storage in ranks]

    assert turn(4) == [4, 4]
    assert turn(6) == [4, 4]
    assert runtime.weights is not None
    ranks[0]._tier.drop([ranks[0]._namespace(PoolName.MAMBA, 0, runtime.weights)])
    assert turn(8) == [8, 8]
    for storage in ranks:
        storage.close()


def test_prefixes_that_every_pool_can_end_are_listed(
    storage: HCacheStorage, pool: HostPool
) -> None:
    """Two pools with windows: the longest prefix of one may be none that the other can end."""
    sides = {PoolName.SWA: (2, [0, 1, 4, 5]), PoolName.MAMBA: (1, [1, 3])}
    storage.batch_set_v1(KEYS[:6], pool.fill(range(0, 6)))
    transfers = []
    for name, (window, stored) in sides.items():
        side = HostPool(8)
        storage.register_mem_host_pool_v2(side, name)
        for page in stored:
            indices = side.fill(range(page, page + 1))
            storage.batch_set_v2([PoolTransfer(name, host_indices=indices, keys=[KEYS[page]])])
        policy = PoolHitPolicy.TRAILING_PAGES
        transfers.append(PoolTransfer(name, keys=KEYS[:window], hit_policy=policy))
    result = storage.batch_exists_v2(KEYS, transfers)
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 6, PoolName.MAMBA: 4}
    assert result.restorable_prefix_pages == [2]
    assert result.kv_hit_pages == 2


def test_evicted_pages_of_other_pools_have_no_event(
    tmp_path: Path, runtime: Runtime, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the keys of pages of K and V, which stay."""
    monkeypatch.setattr(attach, "publishes_events", lambda: True)
    storage, side = HCacheStorage(storage_config(tmp_path, {"events": True}), {}), HostPool(8)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(side, PoolName.MAMBA)
    store = storage._tier.local.store

    def files() -> set[Path]:
        return set(tmp_path.glob("**/*.page"))

    def evict(pages: set[Path]) -> list[list[int]]:
        """The store says that it has evicted these; blocks that were removed."""
        store.stats.on_evicted([name for page in pages if (name := parse_name(page.name))])
        assert storage.events is not None
        return [event.block_hashes for event in storage.events.take()]

    storage.batch_set_v1(KEYS[:1], pool.fill(range(1)))
    kv = files()
    storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, side.fill(range(1)), keys=KEYS[:1])])
    assert (len(kv), len(files())) == (1, 2)
    assert evict(files() - kv) == []
    assert evict(kv) == [[hash_str_to_int64(KEYS[0])]]
    storage.close()


@pytest.mark.parametrize(
    ("name", "window", "damaged", "rest"),
    [
        (PoolName.MAMBA, 1, [5], 4),
        (PoolName.MAMBA, 1, [5, 3], 2),
        (PoolName.MAMBA, 1, [5, 3, 1], 0),
        (PoolName.SWA, 2, [5], 5),
        (PoolName.SWA, 2, [4, 5, 2], 2),
    ],
)
def test_behind_a_damaged_side_the_next_hit_ends_at_the_last_whole_one(
    name: PoolName,
    window: int,
    damaged: list[int],
    rest: int,
    storage: HCacheStorage,
    pool: HostPool,
    tmp_path: Path,
) -> None:
    """All that is damaged is found at once, and what is whole stays."""
    side = HostPool(8)
    storage.register_mem_host_pool_v2(side, name)
    storage.batch_set_v1(KEYS[:6], pool.fill(range(0, 6)))
    for page in range(1, 6, 2) if window == 1 else range(6):
        indices = side.fill(range(page, page + 1))
        before = set(tmp_path.glob("**/*.page"))
        storage.batch_set_v2([PoolTransfer(name, host_indices=indices, keys=[KEYS[page]])])
        if page in damaged:
            [file] = set(tmp_path.glob("**/*.page")) - before
            flip_bit(file, file.stat().st_size // 2)
    policy = PoolHitPolicy.TRAILING_PAGES
    asked = PoolTransfer(name, keys=KEYS[:window], hit_policy=policy)
    assert storage.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 6
    last = PoolTransfer(
        name, keys=KEYS[6 - window : 6], host_indices=torch.arange(window * PAGE), hit_policy=policy
    )
    info = HiCacheStorageExtraInfo(prefix_keys=KEYS[: 6 - window])
    assert not all(storage.batch_get_v2([last], info)[name])
    assert storage.batch_exists_v2(KEYS, [asked]).kv_hit_pages == rest


def test_a_hit_uses_all_its_pages_and_the_window_at_its_end(
    storage: HCacheStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = HostPool(8)
    storage.register_mem_host_pool_v2(side, PoolName.SWA)
    storage.batch_set_v1(KEYS[:6], pool.fill(range(0, 6)))
    how = {"keys": KEYS[:6], "hit_policy": PoolHitPolicy.TRAILING_PAGES}
    stored: list[bool] = []
    store = storage._tier.local.store
    put = store.put

    def note(*given: Any, alone: bool, **named: Any) -> list[bool]:
        stored.append(alone)
        return put(*given, alone=alone, **named)

    monkeypatch.setattr(store, "put", note)
    storage.batch_set_v1(KEYS[:6], pool.fill(range(0, 6)))
    storage.batch_set_v2([PoolTransfer(PoolName.SWA, host_indices=side.fill(range(0, 6)), **how)])
    assert stored == [False, True]
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(store, "use", lambda _, keys, first: used.append((len(keys), first)))
    storage.batch_exists_v2(KEYS, [PoolTransfer(PoolName.SWA, **how | {"keys": KEYS[:2]})])
    assert used == [(6, 0), (6, 4)]


def test_clear_deletes_the_pages_of_this_model_only(
    storage: HCacheStorage, pool: HostPool, runtime: Runtime
) -> None:
    storage.batch_set_v1(KEYS[:2], pool.fill(range(0, 2)))
    mine = runtime.weights
    runtime.weights = Weights(b"v" * 16)
    assert storage.batch_exists(KEYS[:2]) == 0
    storage.batch_set_v1(KEYS[:1], pool.fill(range(0, 1)))
    storage.clear()
    assert storage.batch_exists(KEYS[:2]) == 0
    runtime.weights = mine
    assert storage.batch_exists(KEYS[:2]) == 2


def test_stats_are_sglangs_and_are_taken_once(storage: HCacheStorage, pool: HostPool) -> None:
    indices = pool.fill(range(0, 2))
    storage.batch_set_v1(KEYS[:2], indices)
    storage.batch_get_v1(KEYS[:3], torch.arange(0, 3 * PAGE))
    stats = storage.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats() == StorageMetrics()


def test_while_suspended_everything_is_a_miss_and_nothing_is_stored(
    storage: HCacheStorage, pool: HostPool, runtime: Runtime
) -> None:
    indices = pool.fill(range(0, 2))
    storage.batch_set_v1(KEYS[:1], indices[:PAGE])
    runtime.begin_weight_update()
    assert storage.batch_set_v1(KEYS[1:2], indices[PAGE:]) == [True]  # dropped, and said so
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_get_v1(KEYS[:2], indices) == [False, False]
    runtime.caches_were_flushed()
    assert storage.batch_exists(KEYS[:2]) == 1


def test_nothing_raises_into_hicaches_threads(
    storage: HCacheStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no")

    indices = pool.fill(range(0, 2))
    for name in ("put", "get", "exists", "use", "drop"):
        monkeypatch.setattr(storage._tier.local.store, name, fail)
    assert storage.batch_set_v1(KEYS[:2], indices) == [True, True]
    assert storage.batch_get_v1(KEYS[:2], indices) == [False, False]
    assert storage.batch_exists(KEYS[:2]) == 0
    transfer = PoolTransfer(PoolName.KV, host_indices=indices, keys=KEYS[:2])
    assert storage.batch_get_v2([transfer]) == {PoolName.KV: [False, False]}
    assert storage.batch_set_v2([transfer]) == {PoolName.KV: [True, True]}
    storage.use(KEYS[:2])
    storage.clear()


def test_a_prefix_of_thousands_of_pages_costs_the_scheduler_no_time(
    storage: HCacheStorage, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are converted when a use is saved, and not where the last page's use is known."""
    long = [f"{i:064x}" for i in range(2000)]
    storage.batch_set_v1(long[:1], pool.fill(range(1)))
    storage.batch_set_v1(long[-1:], pool.fill(range(1)), HiCacheStorageExtraInfo(long[:-1]))
    converted = []

    def count(key: str) -> bytes:
        converted.append(key)
        return key_bytes(key)

    monkeypatch.setattr("hcache_backend.format.envelope.key_bytes", count)
    storage.use(long)
    assert converted == long[-1:] * len(converted)
    assert 0 < len(converted) <= 4


def test_lost_trust_deletes_what_this_server_wrote(
    storage: HCacheStorage, pool: HostPool, runtime: Runtime, tmp_path: Path
) -> None:
    """What it wrote with earlier weights, too: its projection was no better then."""
    for weights in (b"earlier", b"present"):
        runtime.weights = Weights(weights, whole=weights)
        storage.batch_set_v1(KEYS[:2], pool.fill(range(0, 2)))
    assert len(list(tmp_path.glob("**/*.page"))) == 4
    storage._drop_own_pages()
    assert list(tmp_path.glob("**/*.page")) == []
    runtime.begin_quarantine("test")
    runtime.caches_were_flushed()
    assert storage.batch_exists(KEYS[:2]) == 0


def test_l3_is_not_asked_for_pages_that_cannot_be_restored_and_keeps_them(
    storage: HCacheStorage, pool: HostPool, runtime: Runtime, tmp_path: Path
) -> None:
    storage.batch_set_v1(KEYS[:2], pool.fill(range(0, 2)))
    runtime.cannot_restore("test")
    runtime.caches_were_flushed()
    assert storage.batch_exists(KEYS[:2]) == 0
    assert len(list(tmp_path.glob("**/*.page"))) == 2


def test_lost_trust_deletes_what_is_being_written_meanwhile(
    storage: HCacheStorage,
    pool: HostPool,
    runtime: Runtime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was asked whether L3 serves before trust was lost, and is named after."""
    store, begun, go_on = storage._tier.local.store, threading.Event(), threading.Event()
    put = store.put

    def held(*args: Any, **options: Any) -> list[bool]:
        begun.set()
        assert go_on.wait(30)
        return put(*args, **options)

    monkeypatch.setattr(store, "put", held)
    indices = pool.fill(range(0, 2))
    writing = threading.Thread(target=storage.batch_set_v1, args=(KEYS[:2], indices))
    writing.start()
    assert begun.wait(30)
    before = set(threading.enumerate())
    runtime.begin_quarantine("test")
    [dropping] = set(threading.enumerate()) - before
    dropping.join(0.3)  # time enough to delete what is there
    go_on.set()
    writing.join()
    dropping.join()
    assert list(tmp_path.glob("**/*.page")) == []


def test_a_plain_server_that_is_attached_to_runs_in_kv_mode(
    storage: HCacheStorage, runtime: Runtime
) -> None:
    assert runtime.mode == "kv"
    assert runtime.reason == "the server was started without HCACHE_ENABLE=1"


def test_weights_that_cannot_be_read_end_l3_for_good(
    storage: HCacheStorage, pool: HostPool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any) -> Any:
        raise MemoryError("no")

    monkeypatch.setattr("hcache_backend.sglang.runtime._digest_model", fail)
    alone = SimpleNamespace(all_gather_object=lambda own: [own])
    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: alone)
    runtime.runner.model = None
    indices = pool.fill(range(0, 1))
    storage.batch_set_v1(KEYS[:1], indices)
    runtime.begin_weight_update()
    runtime.end_weight_update()
    runtime.caches_were_flushed()
    assert storage.batch_exists(KEYS[:1]) == 0
    assert runtime.quarantine == "hcache: the weights could not be read"


class SlowStages:
    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def say(self, own: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


def test_after_a_weight_update_l3_waits_for_the_weights_of_every_pipeline_stage(
    storage: HCacheStorage, pool: HostPool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stage computes depends on the weights of the stages before it."""
    stages = SlowStages()
    monkeypatch.setattr(runtime, "_stages", stages)
    monkeypatch.setattr("hcache_backend.sglang.runtime._stage_weights", lambda model: None)
    runtime.runner.model = None
    indices = pool.fill(range(0, 2))

    def update() -> None:
        runtime.begin_weight_update()
        runtime.end_weight_update()
        runtime.caches_were_flushed()

    def told(update: int, other: bytes) -> None:
        stages.futures[update].set_result(
            [Weights(stage, whole=stage) for stage in (b"own", other)]
        )

    update()
    storage.batch_set_v1(KEYS[:1], indices[:PAGE])
    assert storage.batch_exists(KEYS[:1]) == 0
    told(0, b"first")
    storage.batch_set_v1(KEYS[:1], indices[:PAGE])
    assert storage.batch_exists(KEYS[:1]) == 1
    update()
    update()
    told(1, b"first")  # of an update that is over
    assert storage.batch_exists(KEYS[:1]) == 0
    told(2, b"second")
    assert storage.batch_exists(KEYS[:1]) == 0  # the same here, another stage before it
    storage.batch_set_v1(KEYS[1:2], indices[PAGE:])
    assert storage.batch_exists(KEYS[1:2]) == 1


def test_a_pipeline_stage_that_cannot_read_its_weights_ends_l3_on_all(
    storage: HCacheStorage, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = SlowStages()
    monkeypatch.setattr(runtime, "_stages", stages)
    monkeypatch.setattr("hcache_backend.sglang.runtime._stage_weights", lambda model: None)
    runtime.runner.model = None
    runtime.begin_weight_update()
    runtime.end_weight_update()
    runtime.caches_were_flushed()
    stages.futures[0].set_result([Weights(b"own", whole=b"own"), None])
    assert runtime.quarantine == "hcache: the weights could not be read"


def test_keys_never_become_paths() -> None:
    assert key_bytes("ab" * 32) == bytes.fromhex("ab" * 32)
    for text in ("", "../../etc/passwd", "AB" * 32, "ab" * 31, "\0"):
        assert len(key_bytes(text)) == 32
    assert key_bytes("a") != key_bytes("b")
