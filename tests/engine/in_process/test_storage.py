"""HCacheStorage as HiCache calls it: v1, v2, and trouble."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.utils import hash_str_to_int64

from hcache_backend.fingerprint import Weights
from hcache_backend.format.envelope import key_bytes, parse_name
from hcache_backend.sglang.model_runner import WEIGHTS
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start import attach
from hcache_backend.tiers import events
from tests.engine.harness.ours import flip_bit
from tests.engine.in_process.shared.machines import Machine, MakeMachine, held
from tests.engine.in_process.storage_config import KEYS, PAGE, HostPool


@pytest.fixture
def l3(machine: MakeMachine) -> Machine:
    return machine("l3", shared=None)


def with_side(l3: Machine, name: PoolName) -> HostPool:
    """Another host pool of the model."""
    side = HostPool(8)
    l3.storage.register_mem_host_pool_v2(side, name)
    return side


def put_side(l3: Machine, name: PoolName, side: HostPool, page: int, before: Any = None) -> None:
    """Random bytes as a page of a side."""
    given = PoolTransfer(name, side.fill(range(page, page + 1)), keys=KEYS[page : page + 1])
    l3.storage.batch_set_v2([given], before)


def window(name: PoolName, pages: int = 1) -> PoolTransfer:
    """A look-up of so many last pages of a side."""
    return PoolTransfer(name, keys=KEYS[:pages], hit_policy=PoolHitPolicy.TRAILING_PAGES)


def test_pools_do_not_share_pages_and_policies_decide_the_usable_prefix(l3: Machine) -> None:
    side = with_side(l3, PoolName.SWA)
    l3.put(6)
    transfer = PoolTransfer(PoolName.SWA, host_indices=side.fill(range(2, 4)), keys=KEYS[2:4])
    assert l3.storage.batch_set_v2([transfer]) == {PoolName.SWA: [True, True]}

    every = PoolTransfer(PoolName.SWA, keys=KEYS[:1], hit_policy=PoolHitPolicy.ALL_PAGES)
    assert l3.storage.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    result = l3.storage.batch_exists_v2(KEYS, [window(PoolName.SWA, 2)])
    assert result.kv_hit_pages == 4
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 4}
    assert l3.storage.batch_exists_v2(KEYS).kv_hit_pages == 6

    given = side.data[:, 2:4].clone()
    side.data.zero_()
    into = PoolTransfer(PoolName.SWA, host_indices=torch.arange(8, 20), keys=KEYS[2:5])
    assert l3.storage.batch_get_v2([into]) == {PoolName.SWA: [True, True, False]}
    assert torch.equal(side.data[:, 2:4], given)


def test_a_state_close_behind_another_one_of_its_sequence_is_not_written(
    machine: MakeMachine,
) -> None:
    """`state_tokens` of three pages. A state behind other pages is another sequence's."""
    l3 = machine("l3", shared=None, state_tokens=3 * PAGE)
    side = with_side(l3, PoolName.MAMBA)

    def stored(keys: list[str]) -> bool:
        """Write a state at the end of these pages; is it there?"""
        page = PoolTransfer(PoolName.MAMBA, host_indices=side.fill(range(1)), keys=keys[-1:])
        before = HiCacheStorageExtraInfo(prefix_keys=keys[:-1])
        assert l3.storage.batch_set_v2([page], before) == {PoolName.MAMBA: [True]}
        return l3.storage.batch_get_v2([page]) == {PoolName.MAMBA: [True]}

    found = [pages for pages in (1, 2, 3, 4, 6, 7) if stored(KEYS[:pages])]
    assert found == [1, 4, 7]
    assert stored([f"{i:064x}" for i in range(50, 53)])


def test_a_state_that_one_rank_has_lost_is_near_for_no_rank(
    machine: MakeMachine, runtime: Runtime
) -> None:
    """SGLang takes the shortest hit of the ranks: each of them must have a state there."""
    given = {"shared": None, "state_tokens": 5 * PAGE, "tp_size": 2}
    ranks = [machine("l3", tp_rank=rank, **given) for rank in range(2)]
    sides = [with_side(l3, PoolName.MAMBA) for l3 in ranks]

    def turn(pages: int) -> list[int]:
        """Each rank writes the K and V of a turn, and the state at its end; its hits then."""
        for l3, side in zip(ranks, sides, strict=True):
            l3.put(pages)
            before = HiCacheStorageExtraInfo(prefix_keys=KEYS[: pages - 1])
            put_side(l3, PoolName.MAMBA, side, pages - 1, before)
        asked = [window(PoolName.MAMBA)]
        looked_up = [l3.storage.batch_exists_v2(KEYS, asked) for l3 in ranks]
        return [found.kv_hit_pages for found in looked_up]

    assert turn(4) == [4, 4]
    assert turn(6) == [4, 4]
    assert runtime.weights.present is not None
    first = ranks[0].storage
    first._tier.drop([first._namespace(PoolName.MAMBA, 0, runtime.weights.present)])
    assert turn(8) == [8, 8]


def test_prefixes_that_all_pools_can_end_are_listed(l3: Machine) -> None:
    """Two pools with windows: the longest prefix of one may be none that the other can end."""
    l3.put(6)
    for name, stored in ((PoolName.SWA, [0, 1, 4, 5]), (PoolName.MAMBA, [1, 3])):
        side = with_side(l3, name)
        for page in stored:
            put_side(l3, name, side, page)
    asked = [window(PoolName.SWA, 2), window(PoolName.MAMBA)]
    result = l3.storage.batch_exists_v2(KEYS, asked)
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 6, PoolName.MAMBA: 4}
    assert result.restorable_prefix_pages == [2]
    assert result.kv_hit_pages == 2


def test_evicted_pages_of_other_pools_have_no_event(
    machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    """They have the keys of pages of K and V, which stay."""
    monkeypatch.setattr(attach, "publishes_events", lambda: True)
    l3 = machine("l3", shared=None, events=True)
    side = with_side(l3, PoolName.MAMBA)

    def evict(pages: set[Path]) -> list[list[int]]:
        """The store says that it has evicted these; blocks that were removed."""
        names = [name for page in pages if (name := parse_name(page.name))]
        l3.storage._tier.local.store.stats.on_evicted(names)
        assert l3.storage.events is not None
        return [event.block_hashes for event in l3.storage.events.take_events()]

    l3.put(1)
    kv = l3.files()
    put_side(l3, PoolName.MAMBA, side, 0)
    assert (len(kv), l3.stored()) == (1, 2)
    assert evict(l3.files() - kv) == []
    assert evict(kv) == [[hash_str_to_int64(KEYS[0])]]


@pytest.mark.parametrize(
    ("name", "pages", "damaged", "rest"),
    [
        (PoolName.MAMBA, 1, [5], 4),
        (PoolName.MAMBA, 1, [5, 3], 2),
        (PoolName.MAMBA, 1, [5, 3, 1], 0),
        (PoolName.SWA, 2, [5], 5),
        (PoolName.SWA, 2, [4, 5, 2], 2),
    ],
)
def test_behind_a_damaged_side_the_next_hit_ends_at_the_last_whole_one(
    name: PoolName, pages: int, damaged: list[int], rest: int, l3: Machine
) -> None:
    """All that is damaged is found at once, and what is whole stays."""
    side = with_side(l3, name)
    l3.put(6)
    for page in range(1, 6, 2) if pages == 1 else range(6):
        before = l3.files()
        put_side(l3, name, side, page)
        if page in damaged:
            [file] = l3.files() - before
            flip_bit(file, file.stat().st_size // 2)
    assert l3.storage.batch_exists_v2(KEYS, [window(name, pages)]).kv_hit_pages == 6
    last = replace(window(name), keys=KEYS[6 - pages : 6], host_indices=torch.arange(pages * PAGE))
    info = HiCacheStorageExtraInfo(prefix_keys=KEYS[: 6 - pages])
    assert not all(l3.storage.batch_get_v2([last], info)[name])
    assert l3.storage.batch_exists_v2(KEYS, [window(name, pages)]).kv_hit_pages == rest


def test_a_hit_uses_all_its_pages_and_the_window_at_its_end(
    l3: Machine, monkeypatch: MonkeyPatch
) -> None:
    side = with_side(l3, PoolName.SWA)
    l3.put(6)
    stored, used = list[bool](), list[tuple[int, int]]()
    store = l3.storage._tier.local.store
    put = store.put

    def note(*given: Any, alone: bool, **named: Any) -> list[bool]:
        stored.append(alone)
        return put(*given, alone=alone, **named)

    monkeypatch.setattr(store, "put", note)
    l3.put(6)
    indices = side.fill(range(0, 6))
    l3.storage.batch_set_v2([replace(window(PoolName.SWA, 6), host_indices=indices)])
    assert stored == [False, True]
    monkeypatch.setattr(store, "use", lambda _, keys, first: used.append((len(keys), first)))
    l3.storage.batch_exists_v2(KEYS, [window(PoolName.SWA, 2)])
    assert used == [(6, 0), (6, 4)]


def test_clear_deletes_the_pages_of_this_model_only(l3: Machine, runtime: Runtime) -> None:
    l3.put(2)
    mine = runtime.weights.present
    runtime.weights.present = Weights(b"v" * 16)
    assert l3.hit(2) == 0
    l3.put(1)
    l3.storage.clear()
    assert l3.hit(2) == 0
    runtime.weights.present = mine
    assert l3.hit(2) == 2


def test_while_suspended_everything_is_a_miss_and_nothing_is_stored(
    l3: Machine, runtime: Runtime
) -> None:
    indices = l3.pool.fill(range(0, 2))
    l3.storage.batch_set_v1(KEYS[:1], indices[:PAGE])
    runtime.weights.begin_update()
    assert l3.storage.batch_set_v1(KEYS[1:2], indices[PAGE:]) == [True]  # dropped, and said so
    assert l3.hit(2) == 0
    assert l3.storage.batch_get_v1(KEYS[:2], indices) == [False, False]
    runtime.weights.caches_were_flushed()
    assert l3.hit(2) == 1


def test_l3_is_not_asked_for_pages_that_cannot_be_restored_and_keeps_them(
    l3: Machine, runtime: Runtime
) -> None:
    l3.put(2)
    runtime.weights.cannot_restore("test")
    runtime.weights.caches_were_flushed()
    assert (l3.hit(2), l3.stored()) == (0, 2)


def test_nothing_raises_into_hicaches_threads(l3: Machine, monkeypatch: MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no")

    indices = l3.pool.fill(range(0, 2))
    for name in ("put", "get", "exists", "use", "drop"):
        monkeypatch.setattr(l3.storage._tier.local.store, name, fail)
    assert l3.storage.batch_set_v1(KEYS[:2], indices) == [True, True]
    assert l3.storage.batch_get_v1(KEYS[:2], indices) == [False, False]
    assert l3.hit(2) == 0
    transfer = PoolTransfer(PoolName.KV, host_indices=indices, keys=KEYS[:2])
    assert l3.storage.batch_get_v2([transfer]) == {PoolName.KV: [False, False]}
    assert l3.storage.batch_set_v2([transfer]) == {PoolName.KV: [True, True]}
    l3.storage.use(KEYS[:2])
    l3.storage.clear()


def test_a_prefix_of_thousands_of_pages_costs_the_scheduler_no_time(
    l3: Machine, monkeypatch: MonkeyPatch
) -> None:
    """Keys are converted when a use is saved, and not where the last page's use is known."""
    long = [f"{i:064x}" for i in range(2000)]
    l3.storage.batch_set_v1(long[:1], l3.pool.fill(range(1)))
    l3.storage.batch_set_v1(long[-1:], l3.pool.fill(range(1)), HiCacheStorageExtraInfo(long[:-1]))
    converted = []

    def count(key: str) -> bytes:
        converted.append(key)
        return key_bytes(key)

    monkeypatch.setattr("hcache_backend.format.envelope.key_bytes", count)
    l3.storage.use(long)
    assert converted == long[-1:] * len(converted)
    assert 0 < len(converted) <= 4


def test_lost_trust_deletes_what_this_server_wrote(l3: Machine, runtime: Runtime) -> None:
    """What it wrote with earlier weights, too: its projection was no better then."""
    for weights in (b"earlier", b"present"):
        runtime.weights.present = Weights(weights, any_ranks=weights)
        l3.put(2)
    assert l3.stored() == 4
    l3.storage._drop_own_pages()
    assert l3.files() == set()
    runtime.weights.begin_quarantine("test")
    runtime.weights.caches_were_flushed()
    assert l3.hit(2) == 0


def test_lost_trust_deletes_what_is_being_written_meanwhile(
    l3: Machine, runtime: Runtime, monkeypatch: MonkeyPatch
) -> None:
    """It was asked whether L3 serves before trust was lost, and is named after."""
    begun, go_on = held(monkeypatch, l3.storage._tier.local.store, "put")
    indices = l3.pool.fill(range(0, 2))
    writing = threading.Thread(target=l3.storage.batch_set_v1, args=(KEYS[:2], indices))
    writing.start()
    assert begun.wait(30)
    before = set(threading.enumerate())
    runtime.weights.begin_quarantine("test")
    [dropping] = set(threading.enumerate()) - before
    dropping.join(0.3)  # time enough to delete what is there
    go_on.set()
    writing.join()
    dropping.join()
    assert l3.files() == set()


# ---- weight updates ----


def updated(runtime: Runtime) -> None:
    runtime.weights.begin_update()
    runtime.weights.end_update()
    runtime.weights.caches_were_flushed()


def test_weights_that_cannot_be_read_end_l3_for_good(
    l3: Machine, runtime: Runtime, monkeypatch: MonkeyPatch
) -> None:
    def fail(model: Any) -> Any:
        raise MemoryError("no")

    monkeypatch.setattr("hcache_backend.sglang.weights._digest_model", fail)
    alone = SimpleNamespace(all_gather_object=lambda own: [own])
    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: alone)
    runtime.runner.model = None
    l3.put(1)
    updated(runtime)
    assert l3.hit(1) == 0
    assert runtime.weights.quarantine == "hcache: the weights could not be read"


@pytest.fixture
def futures(runtime: Runtime, monkeypatch: MonkeyPatch) -> list[Future[Any]]:
    """What the pipeline stages say of their weights after each update, once a test says it."""
    said = list[Future[Any]]()

    def gather(own: Any) -> Future[Any]:
        said.append(Future())
        return said[-1]

    monkeypatch.setattr(runtime.weights, "_stages", SimpleNamespace(gather=gather))
    monkeypatch.setattr("hcache_backend.sglang.weights._stage_weights", lambda model: None)
    runtime.runner.model = None
    return said


def of_stages(*weights: bytes) -> list[Weights]:
    return [Weights(stage, any_ranks=stage) for stage in weights]


def test_after_a_weight_update_l3_waits_for_the_weights_of_every_pipeline_stage(
    l3: Machine, runtime: Runtime, futures: list[Future[Any]]
) -> None:
    """What a stage computes depends on the weights of the stages before it."""
    indices = l3.pool.fill(range(0, 2))
    updated(runtime)
    l3.storage.batch_set_v1(KEYS[:1], indices[:PAGE])
    assert l3.hit(1) == 0
    futures[0].set_result(of_stages(b"own", b"first"))
    l3.storage.batch_set_v1(KEYS[:1], indices[:PAGE])
    assert l3.hit(1) == 1
    updated(runtime)
    updated(runtime)
    futures[1].set_result(of_stages(b"own", b"first"))  # of an update that is over
    assert l3.hit(1) == 0
    futures[2].set_result(of_stages(b"own", b"second"))
    assert l3.hit(1) == 0  # the same here, another stage before it
    l3.storage.batch_set_v1(KEYS[1:2], indices[PAGE:])
    assert l3.storage.batch_exists(KEYS[1:2]) == 1


def test_an_update_in_many_parts_reads_the_weights_once(
    l3: Machine, runtime: Runtime, futures: list[Future[Any]]
) -> None:
    """A digest reads the whole model. L3 stays off between the parts, whatever is flushed, and an
    earlier update's answer changes nothing."""
    updated(runtime)
    for name in ("load_weights_from_distributed", "update_weights_from_tensor") * 50:
        [hook] = [hook for hook in WEIGHTS if hook.target.endswith(f".{name}")]
        assert hook.function(lambda updater, part: "loaded", None, []) == "loaded"
        runtime.weights.caches_were_flushed()
    futures[0].set_result(of_stages(b"earlier"))
    assert len(futures) == 1
    assert runtime.weights.present is not None and runtime.weights.present.suspended is not None
    updated(runtime)
    assert len(futures) == 2
    futures[1].set_result(of_stages(b"new"))
    assert runtime.weights.present == Weights(b"new", any_ranks=b"new")


def test_a_pipeline_stage_that_cannot_read_its_weights_ends_l3_on_all(
    l3: Machine, runtime: Runtime, futures: list[Future[Any]]
) -> None:
    updated(runtime)
    futures[0].set_result([*of_stages(b"own"), None])
    assert runtime.weights.quarantine == "hcache: the weights could not be read"


# ---- events ----

HASHES = [hash_str_to_int64(key) for key in KEYS]


def stored_runs(taken: list[Any]) -> list[tuple[list[int], int | None, list[int]]]:
    return [(e.block_hashes, e.parent_block_hash, e.token_ids) for e in taken]


def test_pages_that_were_not_stored_have_no_event() -> None:
    told = events.L3Events(2)
    told.note_stored(KEYS[1:5], [True, False, True, True], KEYS[:1], range(8))
    taken = told.take_events()
    assert {type(event) for event in taken} == {BlockStored}
    assert stored_runs(taken) == [
        ([HASHES[1]], HASHES[0], [0, 1]),
        ([HASHES[3], HASHES[4]], HASHES[2], [4, 5, 6, 7]),
    ]
    told.note_stored(KEYS[:1], [True], [], range(2))
    assert stored_runs(told.take_events()) == [([HASHES[0]], None, [0, 1])]
    assert told.take_events() == []


def test_events_wait_up_to_a_bound(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_PAGES", 3)
    told = events.L3Events(2)
    told.note_evicted([])
    told.note_evicted([bytes.fromhex(key) for key in KEYS[:2]])
    told.note_stored(KEYS[:2], [True, True], [], range(4))
    told.note_evicted([bytes.fromhex(KEYS[4])])
    taken = told.take_events()
    assert [type(event) for event in taken] == [BlockRemoved, BlockRemoved]
    assert [event.block_hashes for event in taken] == [HASHES[:2], HASHES[4:5]]
    assert {event.medium for event in taken} == {"DISK"}


def test_keys_never_become_paths() -> None:
    assert key_bytes("ab" * 32) == bytes.fromhex("ab" * 32)
    for text in ("", "../../etc/passwd", "AB" * 32, "ab" * 31, "\0"):
        assert len(key_bytes(text)) == 32
    assert key_bytes("a") != key_bytes("b")
