"""The shared tier: its calls, SGLang's file backend in a folder of several machines, and hangs."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName

from hcache_backend import HCacheStorage
from hcache_backend.config import ConfigError
from hcache_backend.format.units import Shard
from hcache_backend.prefetch.prefetch import Prefetch
from hcache_backend.sglang.runtime import Runtime, Weights
from hcache_backend.tiers import tier as shared_tier
from hcache_backend.tiers.tier import Pages
from tests.engine.in_process.pools.test_own_pages import Server, indices
from tests.engine.in_process.shared.machines import (
    PAGE,
    SECONDS,
    Machine,
    counted,
    held,
    until,
    value_of,
    values,
    wait_for_values,
)
from tests.engine.in_process.storage_config import storage_config
from tests.engine.in_process.test_storage import KEYS, HostPool

# ---- two machines ----


def test_another_machine_finds_reads_and_keeps_what_one_wrote(
    machine: Callable[..., Machine], shared: Path
) -> None:
    first, second = machine("first"), machine("second")
    given = first.share(0, 1, 2)
    assert second.storage.batch_exists(KEYS[:5]) == 3
    assert second.read(0, 1, 2, 3) == [True, True, True, False]
    assert torch.equal(second.pool.data[:, :3], given)
    until(lambda: second.stored() == 3, "pages to be kept")
    for path in values(shared):
        path.unlink()
    second.pool.data.zero_()
    assert second.read(0, 1, 2) == [True] * 3
    assert torch.equal(second.pool.data[:, :3], given)


def test_pages_that_both_stores_have_are_one_sequence(machine: Callable[..., Machine]) -> None:
    """The front of a conversation is here, then what another machine added, then both."""
    first, second = machine("first"), machine("second")
    given = first.share(0, 1, 2, 3)
    second.read(0, 1, 3)
    until(lambda: second.stored() == 3, "pages to be kept")
    assert second.storage.batch_exists(KEYS[:6]) == 4
    assert second.storage.take_found_shared() == 2, "from the first one on that is only shared"
    assert second.read(0, 1, 2, 3) == [True] * 4
    assert torch.equal(second.pool.data[:, :4], given)


def test_what_is_kept_is_bounded_by_the_quota(machine: Callable[..., Machine]) -> None:
    first = machine("first")
    first.share(*range(8))
    bound = 4 * max(path.stat().st_size for path in first.folder.glob("pages/??/*.page"))
    second = machine("second", quota_bytes=bound)
    for page in range(8):
        before = counted("kept")
        assert second.read(page) == [True]
        until(lambda before=before: counted("kept") > before, "a page to be kept")
    second.storage.close()
    sizes = [path.stat().st_size for path in second.folder.glob("pages/??/*.page")]
    assert 0 < sum(sizes) <= bound


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "bit":
        data[5] ^= 1
    elif how == "proof":
        data[-1] ^= 1
    elif how == "short":
        del data[-1:]
    elif how == "empty":
        data.clear()
    elif how == "swapped":
        data[:] = next(p for p in values(path.parent) if p != path).read_bytes()
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["bit", "proof", "short", "empty", "swapped"])
def test_a_damaged_value_is_a_miss_and_is_not_kept(
    how: str, machine: Callable[..., Machine], shared: Path
) -> None:
    first, second = machine("first"), machine("second")
    given = first.share(0, 1, 2)
    damaged(value_of(shared, 1), how)
    assert second.read(0, 1, 2) == [True, False, True]
    assert torch.equal(second.pool.data[:, [0, 2]], given[:, [0, 2]])
    until(lambda: second.stored() == 2, "two pages to be kept")
    assert second.read(1) == [False]


def test_a_page_that_this_machines_disk_damaged_comes_from_the_shared_tier(
    machine: Callable[..., Machine],
) -> None:
    first = machine("first")
    given = first.share(0)
    [page] = first.folder.glob("pages/??/*.page")
    data = bytearray(page.read_bytes())
    data[4096 + 3] ^= 1
    page.write_bytes(data)
    assert first.read(0) == [True]
    assert torch.equal(first.pool.data[:, :1], given)


def test_other_weights_find_nothing_shared(
    machine: Callable[..., Machine], runtime: Runtime
) -> None:
    first = machine("first")
    first.share(0)
    runtime.weights = Weights(b"v" * 16)
    assert first.storage.batch_exists(KEYS[:1]) == 0
    assert first.read(0) == [False]


def test_what_is_kept_after_a_weight_update_is_not_taken_for_pages_of_the_new_weights(
    machine: Callable[..., Machine], shared: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine("first"), machine("second")
    first.share(0)
    begun, go_on = held(monkeypatch, second.storage._tier.local, "put")
    assert second.read(0) == [True]
    assert begun.wait(SECONDS)
    earlier, runtime.weights = runtime.weights, Weights(b"v" * 16)
    go_on.set()
    until(lambda: second.stored() == 1, "the page to be kept")
    value_of(shared, 0).unlink()
    assert second.storage.batch_exists(KEYS[:1]) == 0
    runtime.weights = earlier
    assert second.storage.batch_exists(KEYS[:1]) == 1


def test_while_l3_is_suspended_nothing_is_shared(
    machine: Callable[..., Machine], shared: Path, runtime: Runtime
) -> None:
    first = machine("first")
    runtime.begin_weight_update()
    first.write(0)
    runtime.caches_were_flushed()
    first.share(1)
    assert KEYS[1] in values(shared)[0].name


def test_what_this_machines_disk_lost_is_not_counted_as_brought_by_the_shared_tier(
    machine: Callable[..., Machine], shared: Path, runtime: Runtime
) -> None:
    """A page that no store has ends the hit: what comes after it is worth nothing."""
    first, second = machine("first"), machine("second")
    first.share(0, 1, 2)
    value_of(shared, 0).unlink()
    runtime.judge(None, "test", 1.0)
    gate, prefetch = runtime.hit_gate, Prefetch("a")
    assert gate is not None
    assert gate.takes(prefetch, 3 * PAGE, 3 * PAGE, 2 * PAGE) == 3 * PAGE
    gate.read_begins(prefetch, 3 * PAGE, PAGE)
    assert second.read(0, 1, 2) == [False, True, True]
    assert gate.l3.reading is not None
    assert gate.l3.reading.from_shared == 0


@pytest.mark.parametrize("switch", ["disaggregation_mode", "enable_pd_role_switch"])
def test_a_decode_server_promises_no_hit_and_writes(
    switch: str, machine: Callable[..., Machine], runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang fails a request whose hit is lost; neither store may promise one."""
    first = machine("first")
    setattr(runtime.runner.server_args, switch, "decode")
    second = machine("second")
    first.share(0)
    second.share(1)
    assert second.storage.batch_exists(KEYS[:2]) == second.storage.batch_exists(KEYS[1:2]) == 0
    assert caplog.text.count("a decode server only writes L3") == 1


def test_reads_tell_how_fast_each_store_is(
    machine: Callable[..., Machine], runtime: Runtime
) -> None:
    first, second = machine("first"), machine("second")
    first.share(0, 1)
    runtime.judge(None, "test", 1.0)
    gate, prefetch = runtime.hit_gate, Prefetch("a")
    assert gate is not None
    second.storage.batch_exists(KEYS[:2])
    far = second.storage.take_found_shared() * PAGE
    assert gate.takes(prefetch, 2 * PAGE, 2 * PAGE, far) == 2 * PAGE
    gate.read_begins(prefetch, 2 * PAGE, PAGE)
    assert second.read(0, 1) == [True, True]
    gate.l3.arrived(2 * PAGE)
    gate.read_ends()
    assert gate.estimates.rates().keys() == {"shared_read"}


# ---- whose pages ----


def test_each_rank_has_its_share_there(
    tmp_path: Path, shared: Path, runtime: Runtime, machine: Callable[..., Machine]
) -> None:
    runtime.own_pages = True
    for name in ("first", "second"):
        for rank in range(2):
            server = Server(Shard(rank, 2), 2, hidden=True)
            runtime.page_fields = {"any_ranks": True, "layout": server.page_layout.form}
            storage = machine(f"{name}-{rank}", server, tp_rank=rank, tp_size=2).storage
            namespace = runtime.page_namespace()
            if name == "first":
                server.compute([0, 1], namespace)
                storage.batch_set_v1(KEYS[:2], indices([0, 1]))
                wait_for_values(shared, 2 * (rank + 1))
            else:
                assert storage.batch_exists(KEYS[:2]) == 2
                assert storage.batch_get_v1(KEYS[:2], indices([0, 1])) == [True, True]
                server.assert_restored([0, 1], namespace)


def test_a_server_with_several_host_pools_goes_without(
    machine: Callable[..., Machine], shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine("first")
    first.storage.register_mem_host_pool_v2(HostPool(8), PoolName.SWA)
    assert "option 'shared' is not used: the model has several host pools" in caplog.text
    first.write(0)
    assert first.read(0) == [True]
    first.storage.close()
    assert values(shared) == []


# ---- wrong options ----


def test_a_backend_that_cannot_be_made_is_named(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [f"SGLANG_HICACHE_{name}_BACKEND_STORAGE_DIR" for name in ("FILE", "NIXL")]
    for name in (*folders, "MOONCAKE_MASTER", "MOONCAKE_CLIENT"):
        monkeypatch.delenv(name, raising=False)
    wanted = {
        "file": f"'backend': 'file'.*{folders[0]} must be the folder that the machines share",
        "nixl": f"'backend': 'nixl'.*{folders[1]} must be the folder that the machines share",
        "mooncake": "'backend': 'mooncake'.*(MOONCAKE_MASTER|mooncake)",
    }
    for backend, message in wanted.items():
        config = storage_config(tmp_path, {"shared": {"backend": backend}})
        with pytest.raises(ConfigError, match=f"option 'shared' is .*{message}"):
            HCacheStorage(config)
    HCacheStorage(storage_config(tmp_path)).close()


TIERS: dict[str, Callable[[Machine], Any]] = {
    "local": lambda machine: machine.storage._tier.local,
    "shared": lambda machine: machine.storage._tier._shared,
    "both": lambda machine: machine.storage._tier,
}


def pages_of(machine: Machine, *numbers: int) -> tuple[Pages, list[list[memoryview]]]:
    """Names of pages, and their memory in the pool of the machine."""
    [pages] = machine.storage._pages(PoolName.KV, [KEYS[number] for number in numbers])
    pool = machine.storage._pools[PoolName.KV]
    memory = pool.memory(
        torch.cat([machine.pool.fill(range(n, n + 1)) for n in numbers]), len(numbers), read=True
    )
    return pages, memory.parts[0]


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_has_what_it_took_and_takes_nothing_in_quarantine(
    name: str, machine: Callable[..., Machine]
) -> None:
    first = machine("first")
    tier, before = TIERS[name](first), counted("written")
    pages, memory = pages_of(first, 0, 1, 3)
    given = first.pool.data.clone()
    assert tier.put(pages, memory) == [True] * 3
    if name != "local":
        until(lambda: counted("written") == before + 3, "pages to be written")
    first.pool.data.zero_()
    assert tier.get(pages, memory) == [True] * 3
    assert torch.equal(first.pool.data, given)
    asked, into = pages_of(first, 0, 2, 3)
    assert tier.exists(asked) == [True, False, name != "shared"], "it gives up at a missing page"
    assert tier.get(asked, into) == [True, False, True]
    tier.quarantine([pages.namespace])
    assert tier.put(asked, into) == [False] * 3
    assert tier.exists(asked) == [name != "local", False, False]


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Whoever opens ``path`` waits until the end of the block."""
    data = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    try:
        yield
    finally:
        writer = os.open(path, os.O_RDWR)  # whoever waits goes on, and reads less than it wants
        path.unlink()
        path.write_bytes(data)
        os.write(writer, b"x")
        os.close(writer)


def test_a_read_that_hangs_is_a_miss_and_the_backend_is_left_alone(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound the read would never return."""
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 0.0)
    first = machine("first")
    second = machine("second", shared={"read_seconds": 0.2})
    given = first.share(0, 1)
    with hanging(value_of(shared, 0)):
        assert second.read(0) == [False]
        before = counted("not_asked")
        assert second.read(1) == [False], "it is still at the first one"
        assert second.storage.batch_exists(KEYS[:2]) == 0
        assert counted("not_asked") == before + 3
    until(lambda: second.read(0, 1) == [True, True], "the backend to be asked again")
    assert torch.equal(second.pool.data[:, :2], given)


def test_what_arrives_late_goes_nowhere(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the page has been given to another one by then."""
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 0.0)
    first, second = machine("first"), machine("second", shared={"read_seconds": 0.2})
    first.share(0)
    late, read = threading.Event(), HiCacheFile.get

    def get(*args: Any) -> Any:
        assert late.wait(SECONDS)
        return read(*args)

    monkeypatch.setattr(HiCacheFile, "get", get)
    assert second.read(0) == [False]
    mine = second.pool.data.clone()
    late.set()
    until(lambda: second.storage.batch_exists(KEYS[:1]) == 1, "the late read to end")
    assert torch.equal(second.pool.data, mine)


def test_after_a_failure_the_backend_is_left_alone_for_a_while(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "REST_SECONDS", 1e6)
    first, second = machine("first"), machine("second")
    first.share(0)

    def fail(*args: Any) -> Any:
        raise OSError("stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(HiCacheFile, "batch_exists", fail)
        assert second.storage.batch_exists(KEYS[:1]) == 0
    assert second.storage.batch_exists(KEYS[:1]) == 0
    second.storage._tier._shared._rests_until = 0.0
    assert second.storage.batch_exists(KEYS[:1]) == 1


def test_writes_wait_in_bounded_memory_and_what_is_too_much_is_dropped(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, go_on = held(monkeypatch, HiCacheFile, "set")
    monkeypatch.setattr(shared_tier, "WRITE_SECONDS", 0.1)
    first = machine("first", shared={"buffer_bytes": 3 * 3 * 8192})  # three pages each
    before = counted("dropped_full")
    given = first.write(*range(8))
    assert counted("dropped_full") == before + 5
    first.pool.data.zero_()
    go_on.set()
    wait_for_values(shared, 3)
    second = machine("second")
    assert second.read(0, 1, 2) == [True] * 3, "what the pages were when they were written"
    assert torch.equal(second.pool.data[:, :3], given[:, :3])


def test_a_backend_that_hangs_is_closed_all_the_same(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "CLOSE_SECONDS", 0.2)
    first, second = machine("first"), machine("second", shared={"read_seconds": 0.2})
    first.share(0)
    with hanging(value_of(shared, 0)):
        assert second.read(0) == [False]
        tier = second.storage._tier._shared
        second.storage.close()
        assert tier._reading.hangs


def test_a_long_look_up_stops_in_time_and_what_it_found_is_read(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part would not come in time."""
    monkeypatch.setattr(shared_tier, "_LOOK_UP_PAGES", 1)
    first, second = machine("first"), machine("second")
    first.share(0, 1)
    asked, exists = [], HiCacheFile.batch_exists
    now, clock = [0.0], time.monotonic

    def slow(*args: Any) -> Any:
        asked.append(args)
        now[0] += 0.7 * SECONDS
        return exists(*args)

    monkeypatch.setattr(HiCacheFile, "batch_exists", slow)
    monkeypatch.setattr(shared_tier.time, "monotonic", lambda: clock() + now[0])
    assert second.storage.batch_exists(KEYS[:2]) == 1
    assert len(asked) == 1
    assert second.read(0) == [True]


def test_nothing_is_promised_after_a_look_up_that_failed(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine("first"), machine("second")
    first.share(0, 1)
    monkeypatch.setattr(shared_tier, "_LOOK_UP_PAGES", 1)
    exists = HiCacheFile.batch_exists

    def fail_second(backend: Any, names: Any, *args: Any) -> Any:
        if KEYS[1] in names[0]:
            raise OSError("stale file handle")
        return exists(backend, names, *args)

    monkeypatch.setattr(HiCacheFile, "batch_exists", fail_second)
    assert second.storage.batch_exists(KEYS[:2]) == 0


def test_a_read_is_divided_into_parts_that_have_their_own_time(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row takes 8192 bytes here. What came before the part that hangs counts."""
    monkeypatch.setattr(shared_tier, "_PART_BYTES", 2 * 8192)
    first, second = machine("first"), machine("second", shared={"read_seconds": 3.0})
    given = first.share(*range(6))
    with hanging(value_of(shared, 4)):
        assert second.read(*range(6)) == [True] * 4 + [False] * 2
    assert torch.equal(second.pool.data[:, :4], given[:, :4])


def test_a_batch_of_more_pages_than_there_is_room_for_is_written_whole(
    machine: Callable[..., Machine], shared: Path
) -> None:
    """As long as the backend takes them."""
    first = machine("first", shared={"buffer_bytes": 3 * 2 * 8192})  # two pages each
    before = counted("dropped_full")
    first.storage.batch_set_v1(KEYS, first.pool.fill(range(8)))
    wait_for_values(shared, 8)
    assert counted("dropped_full") == before
    second = machine("second")
    assert second.read(*range(8)) == [True] * 8
    assert torch.equal(second.pool.data[:, :8], first.pool.data[:, :8])


def test_what_is_distrusted_while_it_is_stored_is_not_shared(
    machine: Callable[..., Machine],
    shared: Path,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = machine("first")
    tier = first.storage._tier.local
    put = tier.put

    def distrusted(*args: Any, **options: Any) -> Any:
        stored = put(*args, **options)
        runtime.begin_quarantine("K and V differ")
        until(lambda: "that this server wrote were deleted" in caplog.text, "pages to be deleted")
        return stored

    monkeypatch.setattr(tier, "put", distrusted)
    first.write(0)
    first.storage.close()
    assert values(shared) == []
    assert "Delete the values there whose names begin with hcache-" in caplog.text
