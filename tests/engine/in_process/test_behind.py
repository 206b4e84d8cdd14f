"""A second L3 behind the page store: SGLang's own file backend in a folder that machines share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName

from hcache_backend import HCacheStorage
from hcache_backend.config import ConfigError
from hcache_backend.engine import metrics
from hcache_backend.engine.behind import store as store_behind
from hcache_backend.engine.hits.gate import HitGate
from hcache_backend.engine.runtime import Runtime, Weights
from hcache_backend.units import Share
from tests.engine.in_process.storage_config import PAGE, storage_config
from tests.engine.in_process.test_own_pages import Server, indices
from tests.engine.in_process.test_storage import KEYS, HostPool

FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
SECONDS = 30.0
"""For what takes a moment, on a machine that is busy with something else."""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that all machines see."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "shared"))
    return tmp_path / "shared"


class Machine:
    """A server's L3: its own page store, and the shared folder behind it."""

    def __init__(self, folder: Path, pool: Any, **options: Any) -> None:
        behind = {"backend": "file", **options.pop("behind", {})}
        rank = {name: options.pop(name) for name in ("tp_rank", "tp_size") if name in options}
        hcache = {"behind": behind, "min_free_bytes": 0, **options}
        self.folder, self.pool = folder, pool
        self.storage = HCacheStorage(storage_config(folder, hcache, **rank))
        self.storage.register_mem_pool_host(pool)
        self.storage.register_mem_host_pool_v2(pool, PoolName.KV)

    def write(self, *pages: int) -> torch.Tensor:
        """Random bytes as pages of these numbers; returns them, ``[2, pages, bytes]``."""
        for page in pages:
            self.storage.batch_set_v1([KEYS[page]], self.pool.fill(range(page, page + 1)))
        return self.pool.data[:, list(pages)].clone()

    def read(self, *pages: int) -> list[bool]:
        return self.storage.batch_get_v1([KEYS[page] for page in pages], slots(pages))

    def stored(self) -> int:
        return len(list(self.folder.glob("pages/??/*.page")))


def slots(pages: tuple[int, ...]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


@pytest.fixture
def machine(tmp_path: Path, shared: Path, runtime: Runtime) -> Iterator[Callable[..., Machine]]:
    with ExitStack() as open_machines:

        def made(name: str, pool: Any = None, **options: Any) -> Machine:
            found = Machine(tmp_path / name, pool or HostPool(32), **options)
            open_machines.callback(found.storage.close)
            return found

        yield made


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def values(shared: Path) -> list[Path]:
    return sorted(shared.glob("*.bin"))


def value_of(shared: Path, page: int) -> Path:
    [path] = [path for path in values(shared) if KEYS[page] in path.name]
    return path


def wait_for_values(shared: Path, count: int) -> None:
    until(lambda: len(values(shared)) == count, f"{count} values behind")


def counted(event: str) -> float:
    return metrics.BEHIND_PAGES.family.labels(event)._value.get()


# ---- what the issue of two machines promises ----


def test_another_machine_finds_reads_and_keeps_what_one_wrote(
    machine: Callable[..., Machine], shared: Path
) -> None:
    first, second = machine("first"), machine("second")
    given = first.write(0, 1, 2)
    wait_for_values(shared, 3)
    assert second.storage.batch_exists(KEYS[:5]) == 3
    assert second.read(0, 1, 2, 3) == [True, True, True, False]
    assert torch.equal(second.pool.data[:, :3], given)
    until(lambda: second.stored() == 3, "pages to be kept")
    for path in values(shared):
        path.unlink()
    second.pool.data.zero_()
    assert second.read(0, 1, 2) == [True] * 3
    assert torch.equal(second.pool.data[:, :3], given)


def test_pages_that_both_stores_have_are_one_sequence(
    machine: Callable[..., Machine], shared: Path
) -> None:
    """The front of a conversation is here, then what another machine added, then both."""
    first, second = machine("first"), machine("second")
    given = first.write(0, 1, 2, 3)
    wait_for_values(shared, 4)
    second.read(0, 1, 3)
    until(lambda: second.stored() == 3, "pages to be kept")
    assert second.storage.batch_exists(KEYS[:6]) == 4
    assert second.storage.take_found_behind() == 2, "from the first that is only behind on"
    assert second.read(0, 1, 2, 3) == [True] * 4
    assert torch.equal(second.pool.data[:, :4], given)


def test_what_is_kept_is_bounded_by_the_quota(
    machine: Callable[..., Machine], shared: Path
) -> None:
    first = machine("first")
    first.write(*range(8))
    wait_for_values(shared, 8)
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
    given = first.write(0, 1, 2)
    wait_for_values(shared, 3)
    damaged(value_of(shared, 1), how)
    assert second.read(0, 1, 2) == [True, False, True]
    assert torch.equal(second.pool.data[:, [0, 2]], given[:, [0, 2]])
    until(lambda: second.stored() == 2, "two pages to be kept")
    assert second.read(1) == [False]


def test_a_page_that_this_machines_disk_damaged_comes_from_behind(
    machine: Callable[..., Machine], shared: Path
) -> None:
    first = machine("first")
    given = first.write(0)
    wait_for_values(shared, 1)
    [page] = first.folder.glob("pages/??/*.page")
    data = bytearray(page.read_bytes())
    data[4096 + 3] ^= 1
    page.write_bytes(data)
    assert first.read(0) == [True]
    assert torch.equal(first.pool.data[:, :1], given)


def test_other_weights_find_nothing_behind(
    machine: Callable[..., Machine], shared: Path, runtime: Runtime
) -> None:
    first = machine("first")
    first.write(0)
    wait_for_values(shared, 1)
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
    first.write(0)
    wait_for_values(shared, 1)
    go_on, write = threading.Event(), second.storage._pools.write

    def held(*args: Any, **options: Any) -> Any:
        assert go_on.wait(SECONDS)
        return write(*args, **options)

    monkeypatch.setattr(second.storage._pools, "write", held)
    before = counted("kept")
    assert second.read(0) == [True]
    assert counted("kept") == before + 1
    runtime.weights = Weights(b"v" * 16)
    go_on.set()
    second.storage.close()
    assert second.stored() == 0


def test_while_l3_is_suspended_nothing_goes_behind(
    machine: Callable[..., Machine], shared: Path, runtime: Runtime
) -> None:
    first = machine("first")
    runtime.begin_weight_update()
    first.write(0)
    runtime.caches_were_flushed()
    first.write(1)
    wait_for_values(shared, 1)
    assert KEYS[1] in values(shared)[0].name


# ---- a backend that hangs or fails ----


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
    monkeypatch.setattr(store_behind, "REST_SECONDS", 0.0)
    first = machine("first")
    second = machine("second", behind={"read_seconds": 0.2})
    given = first.write(0, 1)
    wait_for_values(shared, 2)
    with hanging(value_of(shared, 0)):
        assert second.read(0) == [False]
        before = counted("not_asked")
        assert second.read(1) == [False], "it is still at the first one"
        assert second.storage.batch_exists(KEYS[:2]) == 0
        assert counted("not_asked") == before + 3
    until(lambda: second.read(0, 1) == [True, True], "the backend to be asked again")
    assert torch.equal(second.pool.data[:, :2], given)


def test_what_arrives_late_goes_nowhere(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the page has been given to another one by then."""
    monkeypatch.setattr(store_behind, "REST_SECONDS", 0.0)
    first, second = machine("first"), machine("second", behind={"read_seconds": 0.2})
    first.write(0)
    wait_for_values(shared, 1)
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
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_behind, "REST_SECONDS", 1e6)
    first, second = machine("first"), machine("second")
    first.write(0)
    wait_for_values(shared, 1)

    def fail(*args: Any) -> Any:
        raise OSError("stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(HiCacheFile, "batch_exists", fail)
        assert second.storage.batch_exists(KEYS[:1]) == 0
    assert second.storage.batch_exists(KEYS[:1]) == 0
    second.storage._pools._behind._rests_until = 0.0
    assert second.storage.batch_exists(KEYS[:1]) == 1


def test_writes_wait_in_bounded_memory_and_what_is_too_much_is_dropped(
    machine: Callable[..., Machine], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), HiCacheFile.set

    def set_later(*args: Any) -> Any:
        assert go_on.wait(SECONDS)
        return write(*args)

    monkeypatch.setattr(HiCacheFile, "set", set_later)
    first = machine("first", behind={"buffer_bytes": 3 * 3 * 8192})  # three pages each
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
    monkeypatch.setattr(store_behind, "_CLOSE_SECONDS", 0.2)
    first, second = machine("first"), machine("second", behind={"read_seconds": 0.2})
    first.write(0)
    wait_for_values(shared, 1)
    with hanging(value_of(shared, 0)):
        assert second.read(0) == [False]
        second.storage.close()


def test_reads_tell_how_fast_each_store_is(
    machine: Callable[..., Machine], shared: Path, runtime: Runtime
) -> None:
    first, second = machine("first"), machine("second")
    first.write(0, 1)
    wait_for_values(shared, 2)
    runtime.hit_gate = gate = HitGate(None, "test", 1.0)
    gate.may_ask("a", 0)
    second.storage.batch_exists(KEYS[:2])
    behind = second.storage.take_found_behind() * PAGE
    assert gate.takes("a", 2 * PAGE, 2 * PAGE, behind) == 2 * PAGE
    gate.read_begins("a", 2 * PAGE, PAGE)
    assert second.read(0, 1) == [True, True]
    gate.l3.arrived(2 * PAGE)
    gate.read_ends()
    assert gate.costs.rates().keys() == {"behind_read"}


# ---- whose pages ----


def test_each_rank_has_its_share_behind(
    tmp_path: Path, shared: Path, runtime: Runtime, machine: Callable[..., Machine]
) -> None:
    runtime.own_pages = True
    for name in ("first", "second"):
        for rank in range(2):
            server = Server(Share(rank, 2), 2, hidden=True)
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
    assert "option 'behind' does nothing: the model has several host pools" in caplog.text
    first.write(0)
    assert first.read(0) == [True]
    first.storage.close()
    assert values(shared) == []


# ---- wrong options ----


def test_a_backend_that_cannot_be_made_is_named(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    for name in ("MOONCAKE_MASTER", "MOONCAKE_CLIENT"):
        monkeypatch.delenv(name, raising=False)
    wanted = {
        "file": f"'backend': 'file'.*{FOLDER} must be the folder that the machines share",
        "mooncake": "'backend': 'mooncake'.*(MOONCAKE_MASTER|mooncake)",
    }
    for backend, message in wanted.items():
        config = storage_config(tmp_path, {"behind": {"backend": backend}})
        with pytest.raises(ConfigError, match=f"option 'behind' is .*{message}"):
            HCacheStorage(config)
    HCacheStorage(storage_config(tmp_path)).close()
