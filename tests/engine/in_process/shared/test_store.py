"""The shared tier: SGLang's own file backend in a folder that machines share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from hcache_backend import HCacheStorage
from hcache_backend.config import ConfigError
from hcache_backend.format.units import Shard
from hcache_backend.prefetch.prefetch import Prefetch
from hcache_backend.sglang.runtime import Runtime, Weights
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
    machine: Callable[..., Machine],
    shared: Path,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
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
    switch: str,
    machine: Callable[..., Machine],
    runtime: Runtime,
    caplog: pytest.LogCaptureFixture,
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
