"""The shared tier: its calls, SGLang's file backend in a folder of several machines, and hangs."""

import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName

from hcache_backend import HCacheStorage
from hcache_backend.config import ConfigError
from hcache_backend.fingerprint import Weights
from hcache_backend.format.units import Shard
from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.hit import Prefetch
from hcache_backend.sglang import runtime as runtime_module
from hcache_backend.sglang import weights as weights_module
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start import attach
from hcache_backend.tiers import tier as shared_tier
from tests.engine.in_process.pools.test_own_pages import Server, indices
from tests.engine.in_process.shared.machines import (
    PAGE,
    SECONDS,
    Machine,
    MakeMachine,
    counted,
    held,
    until,
    value_of,
    values,
)
from tests.engine.in_process.storage_config import (
    KEYS,
    HostPool,
    storage_config,
    unconfigured_runtime,
)

# ---- two machines ----


def test_another_machine_finds_and_keeps_what_one_wrote(first: Machine, second: Machine) -> None:
    given = first.write(0, 1, 2)
    assert second.hit(5) == 3
    assert second.read(0, 1, 2, 3) == [True, True, True, False]
    assert torch.equal(second.pool.data[:, :3], given)
    until(lambda: second.stored() == 3, "pages to be kept")
    for path in values():
        path.unlink()
    second.pool.data.zero_()
    assert second.read(0, 1, 2) == [True] * 3
    assert torch.equal(second.pool.data[:, :3], given)


def test_pages_that_both_stores_have_are_one_sequence(first: Machine, second: Machine) -> None:
    """The front of a conversation is here, then what another machine added, then both."""
    given = first.write(0, 1, 2, 3)
    second.read(0, 1, 3)
    until(lambda: second.stored() == 3, "pages to be kept")
    assert second.hit(6) == 4
    assert second.storage.take_found_shared() == 2, "from the first one on that is only shared"
    assert second.read(0, 1, 2, 3) == [True] * 4
    assert torch.equal(second.pool.data[:, :4], given)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "bit": lambda data, other: data[:5] + bytes([data[5] ^ 1]) + data[6:],
    "proof": lambda data, other: data[:-1] + bytes([data[-1] ^ 1]),
    "short": lambda data, other: data[:-1],
    "empty": lambda data, other: b"",
    "swapped": lambda data, other: other,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_value_is_a_miss_and_not_kept(how: str, first: Machine, second: Machine) -> None:
    given = first.write(0, 1, 2)
    path, other = value_of(1), value_of(2)
    path.write_bytes(DAMAGE[how](path.read_bytes(), other.read_bytes()))
    assert second.read(0, 1, 2) == [True, False, True]
    assert torch.equal(second.pool.data[:, [0, 2]], given[:, [0, 2]])
    until(lambda: second.stored() == 2, "two pages to be kept")
    assert second.read(1) == [False]


def test_a_page_that_this_machines_disk_damaged_comes_from_the_shared_tier(first: Machine) -> None:
    given = first.write(0)
    [page] = first.folder.glob("pages/??/*.page")
    data = bytearray(page.read_bytes())
    data[4096 + 3] ^= 1
    page.write_bytes(data)
    assert first.read(0) == [True]
    assert torch.equal(first.pool.data[:, :1], given)


def test_what_is_kept_after_a_weight_update_is_not_taken_for_pages_of_the_new_weights(
    first: Machine, second: Machine, runtime: Runtime, monkeypatch: MonkeyPatch
) -> None:
    first.write(0)
    begun, go_on = held(monkeypatch, second.storage._tier.local, "put")
    assert second.read(0) == [True]
    assert begun.wait(SECONDS)
    earlier, runtime.weights.present = runtime.weights.present, Weights(b"v" * 16)
    go_on.set()
    until(lambda: second.stored() == 1, "the page to be kept")
    value_of(0).unlink()
    assert second.hit(1) == 0
    runtime.weights.present = earlier
    assert second.hit(1) == 1


def test_while_l3_is_suspended_nothing_is_shared(first: Machine, runtime: Runtime) -> None:
    runtime.weights.begin_update()
    first.write(0)
    runtime.weights.caches_were_flushed()
    first.write(1)
    assert KEYS[1] in values()[0].name


def taken(runtime: Runtime, pages: int, far: int) -> HitGate:
    """The gate of hits, which takes one of so many pages, ``far`` of them of the shared tier."""
    runtime.judge(None, "test", 1.0)
    gate, prefetch, tokens = runtime.hit_gate, Prefetch("a"), pages * PAGE
    assert gate is not None
    assert gate.tokens_to_read(prefetch, tokens, tokens, far * PAGE) == tokens
    gate.read_begins(prefetch, tokens, PAGE)
    return gate


def test_what_this_machines_disk_lost_is_not_counted_as_brought_by_the_shared_tier(
    first: Machine, second: Machine, runtime: Runtime
) -> None:
    """A page that no store has ends the hit: what comes after it is worth nothing."""
    first.write(0, 1, 2)
    value_of(0).unlink()
    gate = taken(runtime, 3, far=2)
    assert second.read(0, 1, 2) == [False, True, True]
    assert gate.l3.reading is not None
    assert gate.l3.reading.from_shared == 0


def test_reads_tell_how_fast_a_store_is(first: Machine, second: Machine, runtime: Runtime) -> None:
    first.write(0, 1)
    second.hit(2)
    gate = taken(runtime, 2, far=second.storage.take_found_shared())
    assert second.read(0, 1) == [True, True]
    gate.l3.part_arrived(2 * PAGE)
    gate.read_ends()
    assert gate.estimates.rates().keys() == {"shared_read"}


@pytest.mark.parametrize("switch", ["disaggregation_mode", "enable_pd_role_switch"])
def test_a_decode_server_promises_no_hit_and_writes(
    switch: str, machine: MakeMachine, runtime: Runtime, caplog: LogCaptureFixture
) -> None:
    """SGLang fails a request whose hit is lost; neither store may promise one."""
    first = machine("first")
    setattr(runtime.runner.server_args, switch, "decode")
    second = machine("second")
    first.write(0)
    second.write(1)
    assert second.hit(2) == second.storage.batch_exists(KEYS[1:2]) == 0
    assert caplog.text.count("a decode server only writes L3") == 1


def test_each_rank_has_its_share_there(runtime: Runtime, machine: MakeMachine) -> None:
    runtime.pages.kind = "kv"
    for name in ("first", "second"):
        for rank in range(2):
            server = Server(Shard(rank, 2), 2, hidden=True)
            runtime.weights.page_fields = {"any_ranks": True, "layout": server.page_layout.form}
            storage = machine(f"{name}-{rank}", server, tp_rank=rank, tp_size=2).storage
            namespace = runtime.weights.page_namespace()
            if name == "first":
                server.compute([0, 1], namespace)
                storage.batch_set_v1(KEYS[:2], indices([0, 1]))
                assert len(values()) == 2 * (rank + 1)
            else:
                assert storage.batch_exists(KEYS[:2]) == 2
                assert storage.batch_get_v1(KEYS[:2], indices([0, 1])) == [True, True]
                server.assert_restored([0, 1], namespace)


NIXL = {"backend": "nixl", "config": {"plugin": {"posix": {"active": True}}}}


def test_another_machine_finds_what_nixl_has_and_nothing_that_is_damaged(
    machine: MakeMachine, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Its POSIX plugin, in a folder that machines share."""
    pytest.importorskip("nixl", reason="no NIXL: see requirements/peers.txt")
    shared = tmp_path / "nixl"
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(shared))
    before = counted("written")
    given = machine("first", shared=NIXL).write(0, 1, 2)
    assert counted("written") == before + 3
    second = machine("second", shared=NIXL)
    assert second.hit(5) == 3
    for path in shared.rglob("*"):
        if path.is_file() and KEYS[1] in path.name:
            path.write_bytes(path.read_bytes()[::-1])
    assert second.read(0, 1, 2) == [True, False, True]
    assert torch.equal(second.pool.data[:, [0, 2]], given[:, [0, 2]])
    until(lambda: second.stored() == 2, "pages to be kept")


# ---- servers that are not alike ----


@pytest.mark.parametrize(
    ("differs", "value", "pages"),
    [
        ("runner.device", "cuda", 3),
        ("runner.gpu_id", 3, 3),
        ("runner.model_config.model_path", "a path on another machine", 3),
        ("runner.dtype", torch.float16, 0),
        ("runner.kv_cache_dtype", torch.float8_e4m3fn, 0),
        ("runner.server_args.page_size", 2 * PAGE, 0),
        ("runner.model_config.hf_config.to_dict", lambda: {"hidden_size": 8, "rope_theta": 1}, 0),
        ("weights.present", Weights(b"v" * 16), 0),
    ],
)
def test_equal_pages_are_shared_and_no_other_one_is_read(
    differs: str, value: Any, pages: int, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    given, other = machine("first").write(0, 1, 2), unconfigured_runtime()
    monkeypatch.setattr(runtime_module, "_runtime", other)
    owner, _, name = f"other.{differs}".rpartition(".")
    found = attrgetter(owner)(SimpleNamespace(other=other))
    monkeypatch.setattr(found, name, value, raising=False)
    monkeypatch.setattr(attach, "records_whole_prefills", lambda: False)
    second = machine("second")
    assert second.hit(3) == pages
    assert second.read(0, 1, 2) == [bool(pages)] * 3
    assert torch.equal(second.pool.data[:, :3], given) == bool(pages)


def test_other_formats_are_not_read(
    first: Machine, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    first.write(0)
    monkeypatch.setattr(weights_module, "FORMAT_VERSION", weights_module.FORMAT_VERSION + 1)
    monkeypatch.setattr(runtime_module, "_runtime", unconfigured_runtime())
    second = machine("second")
    assert (second.hit(1), second.read(0)) == (0, [False])


# ---- wrong options ----


def test_a_model_of_several_host_pools_goes_without(
    first: Machine, caplog: LogCaptureFixture
) -> None:
    first.storage.register_mem_host_pool_v2(HostPool(8), PoolName.SWA)
    assert "option 'shared' is not used: the model has several host pools" in caplog.text
    first.write(0)
    assert first.read(0) == [True]
    first.storage.close()
    assert values() == []


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("file", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR must be the folder that the machines"),
        ("nixl", "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR must be the folder that the machines"),
        ("mooncake", "(MOONCAKE_MASTER|mooncake)"),
    ],
)
def test_a_backend_that_cannot_be_made_is_named(
    backend: str, message: str, tmp_path: Path, runtime: Runtime, monkeypatch: MonkeyPatch
) -> None:
    folders = [f"SGLANG_HICACHE_{name}_BACKEND_STORAGE_DIR" for name in ("FILE", "NIXL")]
    for name in (*folders, "MOONCAKE_MASTER", "MOONCAKE_CLIENT"):
        monkeypatch.delenv(name, raising=False)
    said = f"option 'shared' is .*'backend': '{backend}'.*{message}"
    with pytest.raises(ConfigError, match=said):
        HCacheStorage(storage_config(tmp_path, {"shared": {"backend": backend}}))
    HCacheStorage(storage_config(tmp_path)).close()


# ---- hangs, failures and too much at a time ----


def test_a_read_that_hangs_is_a_miss_and_goes_nowhere_and_the_backend_is_left_alone(
    first: Machine, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    """Without a bound the read would never return; when it does, the memory of its page has been
    given to another one."""
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 0.0)
    second = machine("second", shared={"read_seconds": 0.2})
    given = first.write(0, 1)
    _, go_on = held(monkeypatch, HiCacheFile, "get")
    assert second.read(0) == [False]
    before = counted("not_asked")
    assert second.read(1) == [False], "it is still at the first one"
    assert second.hit(2) == 0
    assert counted("not_asked") == before + 3
    mine = second.pool.data.clone()
    go_on.set()
    until(lambda: second.hit(2) == 2, "the late read to end")
    assert torch.equal(second.pool.data, mine)
    assert second.read(0, 1) == [True, True]
    assert torch.equal(second.pool.data[:, :2], given)


def test_a_backend_that_hangs_is_closed_all_the_same(
    first: Machine, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "CLOSE_SECONDS", 0.2)
    second = machine("second", shared={"read_seconds": 0.2})
    first.write(0)
    _, go_on = held(monkeypatch, HiCacheFile, "get")
    assert second.read(0) == [False]
    tier = second.storage._tier._shared
    second.storage.close()
    assert tier._reading.hangs
    go_on.set()


def test_after_a_failure_the_backend_is_left_alone_for_a_while(
    first: Machine, second: Machine, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 1e6)
    first.write(0)

    def fail(*args: Any) -> Any:
        raise OSError("stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(HiCacheFile, "batch_exists", fail)
        assert second.hit(1) == 0
    assert second.hit(1) == 0
    second.storage._tier._shared._rest_until["reads"] = 0.0
    assert second.hit(1) == 1


@pytest.mark.parametrize("trouble", ["slow", "fails"])
def test_a_look_up_of_which_a_part_comes_late_or_fails(
    trouble: str, first: Machine, second: Machine, monkeypatch: MonkeyPatch
) -> None:
    """What was found in time is read; nothing is promised after a failure."""
    monkeypatch.setattr(shared_tier, "_LOOK_UP_PAGES", 1)
    first.write(0, 1)
    asked, exists = list[str](), HiCacheFile.batch_exists
    now, clock = [0.0], time.monotonic

    def in_trouble(backend: Any, names: Any, *args: Any) -> Any:
        asked.append(names[0])
        now[0] += 0.7 * SECONDS * (trouble == "slow")
        if trouble == "fails" and KEYS[1] in names[0]:
            raise OSError("stale file handle")
        return exists(backend, names, *args)

    monkeypatch.setattr(HiCacheFile, "batch_exists", in_trouble)
    monkeypatch.setattr(shared_tier.time, "monotonic", lambda: clock() + now[0])
    found = second.hit(2)
    assert (found, len(asked)) == {"slow": (1, 1), "fails": (0, 2)}[trouble]
    if trouble == "slow":
        assert second.read(0) == [True]


def test_a_read_is_divided_into_parts_that_have_their_own_time(
    first: Machine, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    """A row takes 8192 bytes here. What came before the part that hangs counts."""
    monkeypatch.setattr(shared_tier, "_PART_BYTES", 2 * 8192)
    second = machine("second", shared={"read_seconds": 3.0})
    given = first.write(*range(6))
    _, go_on = held(monkeypatch, HiCacheFile, "get", of=KEYS[4])
    assert second.read(*range(6)) == [True] * 4 + [False] * 2
    go_on.set()
    assert torch.equal(second.pool.data[:, :4], given[:, :4])


def test_a_write_that_hangs_keeps_what_the_pages_were_and_the_others_are_not_written(
    machine: MakeMachine, second: Machine, monkeypatch: MonkeyPatch
) -> None:
    """The memory of the pages has been given to other ones when it goes on."""
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 0.0)
    _, go_on = held(monkeypatch, HiCacheFile, "set")
    first = machine("first", shared={"read_seconds": 0.2, "buffer_bytes": 3 * 2 * 8192})
    before = counted("not_written")
    first.put(5)  # parts have two pages
    given = first.pool.data[:, :2].clone()
    first.write(5)
    assert counted("not_written") == before + 6
    assert first.stored() == 6
    go_on.set()
    until(lambda: len(values()) == 2, "the late write to end")
    assert second.read(*range(6)) == [True] * 2 + [False] * 4
    assert torch.equal(second.pool.data[:, :2], given)
    until(lambda: not first.storage._tier._shared._is_left_alone("writes"), "writes to go on")
    first.write(6)
    assert len(values()) == 3


@pytest.mark.parametrize(("seconds", "written"), [(0.0, 8), (14.0, 4)], ids=["fast", "slow"])
def test_a_batch_larger_than_the_room_is_written_as_far_as_there_is_time(
    seconds: float, written: int, machine: MakeMachine, second: Machine, monkeypatch: MonkeyPatch
) -> None:
    """There are 30 s, as for a batch of the page store, and the one that began is ended."""
    now, clock, store = [0.0], time.monotonic, HiCacheFile.set

    def slow(*args: Any) -> bool:
        now[0] += seconds
        return store(*args)

    monkeypatch.setattr(HiCacheFile, "set", slow)
    monkeypatch.setattr(shared_tier.time, "monotonic", lambda: clock() + now[0])
    first = machine("first", shared={"buffer_bytes": 3 * 2 * 8192})  # parts of two pages
    before = counted("written")
    first.put(8)
    assert counted("written") - before == len(values()) == written
    assert second.read(*range(8)) == [True] * written + [False] * (8 - written)
    assert torch.equal(second.pool.data[:, :written], first.pool.data[:, :written])


# ---- lost trust ----


def test_what_is_distrusted_while_it_is_stored_is_not_shared(
    first: Machine, runtime: Runtime, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    tier = first.storage._tier.local
    put = tier.put

    def distrusted(*args: Any, **options: Any) -> Any:
        stored = put(*args, **options)
        runtime.weights.begin_quarantine("K and V differ")
        until(lambda: "that this server wrote were deleted" in caplog.text, "pages to be deleted")
        return stored

    monkeypatch.setattr(tier, "put", distrusted)
    first.write(0)
    first.storage.close()
    assert values() == []
    assert "Delete the values there whose names begin with hcache-" in caplog.text


def test_in_quarantine_no_tier_takes_pages_and_the_shared_ones_stay(
    first: Machine, second: Machine, runtime: Runtime
) -> None:
    first.write(0)
    tier = first.storage._tier
    [pages] = first.storage._pages(PoolName.KV, KEYS[1:2])
    indices_of_page = first.pool.fill(range(1, 2))
    memory = first.storage._pools[PoolName.KV].memory(indices_of_page, 1, read=True).parts[0]
    tier.quarantine([pages.namespace])
    for one in (tier, tier.local, tier._shared):
        assert one.put(pages, memory) == [False]
    assert (first.stored(), len(values())) == (0, 1)
    assert second.read(0) == [True]
