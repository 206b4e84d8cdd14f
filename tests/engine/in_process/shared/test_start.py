"""A shared tier that does not start, takes no memory or no pages, or hangs."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from hcache_backend import metrics
from hcache_backend.config import ConfigError
from hcache_backend.start import attach
from hcache_backend.tiers import shared_backend, tier
from hcache_backend.tiers.shared_backend import BoundedCalls, GivenUp
from tests.engine.in_process.shared.machines import (
    SECONDS,
    Machine,
    MakeMachine,
    counted,
    held,
    until,
    values,
)
from tests.engine.in_process.storage_config import KEYS


@pytest.mark.parametrize("hanging", [(Path, "mkdir"), (HiCacheFile, "__init__")])
def test_a_backend_that_hangs_at_the_start_is_an_error_of_the_option(
    hanging: tuple[Any, str], machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    """SGLang's own threads, and the other ranks, wait for the start. What comes too late, is closed
    at once."""
    closed, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(shared_backend, "START_SECONDS", 0.2)
    monkeypatch.setattr(HiCacheFile, "close", lambda backend: closed.set(), raising=False)
    owner, name = hanging
    work = getattr(owner, name)

    def late(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "hcache-shared-start":
            go_on.wait(SECONDS)
        return work(*args, **options)

    monkeypatch.setattr(owner, name, late)
    with pytest.raises(ConfigError, match=r"'backend': 'file'.* did not answer within 0\.2 s"):
        machine("first")
    go_on.set()
    assert closed.wait(SECONDS)


def test_an_error_of_a_backend_has_no_secret(
    machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    def refuse(self: HiCacheFile, config: Any, *_: Any) -> None:
        raise ValueError(f"wrong key in {config.extra_config}")

    monkeypatch.setattr(HiCacheFile, "__init__", refuse)
    shared = {"backend": "file", "config": {"key": "s3cr3t", "empty": "", "number": 5}}
    with pytest.raises(
        ConfigError, match=r"'config': \['empty', 'key', 'number'\].*ValueError: wr"
    ) as e:
        machine("first", shared=shared)
    assert "s3cr3t" not in str(e.value) and e.value.__cause__ is None


@pytest.mark.parametrize(("mode", "open_to_all"), [(None, False), (0o770, False), (0o755, True)])
def test_the_folder_of_a_shared_file_tier_is_its_users_own(
    mode: int | None,
    open_to_all: bool,
    machine: MakeMachine,
    shared: Path,
    caplog: LogCaptureFixture,
) -> None:
    if mode is not None:
        shared.mkdir()
        shared.chmod(mode)
    machine("first")
    assert shared.stat().st_mode & 0o777 == (mode or 0o700)
    assert ("other users can enter" in caplog.text) == open_to_all


def test_a_rank_whose_backend_takes_no_memory_goes_without(
    machine: MakeMachine, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """The others serve; what one rank does not find is a miss on all."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("Failed to register buffer")

    monkeypatch.setattr(HiCacheFile, "register_mem_pool_host", refuse)
    first = machine("first")
    said = "option 'shared' is not used: file did not register the buffers: RuntimeError"
    assert said in caplog.text
    first.write(0)
    assert first.read(0) == [True]
    assert values() == []


def test_a_backend_is_closed_when_another_rank_could_not_join(
    machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    closed = list[HiCacheFile]()

    def close(backend: HiCacheFile) -> None:
        closed.append(backend)

    def disagree(*args: Any) -> None:
        raise ConfigError("on tensor-parallel rank 1")

    monkeypatch.setattr(HiCacheFile, "close", close, raising=False)
    monkeypatch.setattr(attach, "_agree", disagree)
    with pytest.raises(ConfigError, match="rank 1"):
        machine("first")
    assert len(closed) == 1


def test_a_close_that_hangs_is_not_waited_for(first: Machine, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(shared_backend, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(HiCacheFile, "close", lambda backend: None, raising=False)
    begun, go_on = held(monkeypatch, HiCacheFile, "close")
    first.storage.close()
    assert begun.is_set() and not go_on.is_set()
    go_on.set()


def test_reads_go_on_beside_a_hang(
    first: Machine, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    given, second = first.write(0), machine("second", shared={"read_seconds": 0.2})
    begun, go_on = held(monkeypatch, HiCacheFile, "set")
    second.write(1)
    assert begun.is_set()
    assert second.hit(1) == 1
    assert second.read(0) == [True]
    assert torch.equal(second.pool.data[:, :1], given)
    go_on.set()


def is_silent() -> bool:
    return bool(metrics.SHARED.family.labels("file", "silent")._value.get())


def test_a_backend_that_takes_no_page_counts_as_silent_until_it_takes_one(
    first: Machine, monkeypatch: MonkeyPatch
) -> None:
    """Mooncake's calls say no more than that when its master is gone."""
    monkeypatch.setattr(tier, "REST_SECONDS", 0.0)
    with monkeypatch.context() as gone:
        gone.setattr(HiCacheFile, "set", lambda *args: False)
        first.write(0)
        assert is_silent()
        assert first.storage.batch_exists(KEYS[1:2]) == 0  # an answer, which says nothing of writes
        assert is_silent()
    first.write(1)
    assert not is_silent()


def test_pages_that_wait_to_be_kept_do_not_come_back_after_a_clear(
    first: Machine, second: Machine, monkeypatch: MonkeyPatch
) -> None:
    first.write(0, 1)
    begun, go_on = held(monkeypatch, second.storage._tier.local, "put")
    assert second.read(0) == [True]
    assert begun.wait(SECONDS)
    assert second.read(1) == [True]
    second.storage.clear()
    go_on.set()
    second.storage.close()
    assert second.stored() == 1, "the one whose writing had begun"


def test_pages_wait_to_be_kept_in_bounded_memory(
    first: Machine, machine: MakeMachine, monkeypatch: MonkeyPatch
) -> None:
    given = first.write(*range(5))
    second = machine("second", shared={"buffer_bytes": 5 * 8192})  # two for reads and writes
    begun, go_on = held(monkeypatch, second.storage._tier.local, "put")
    kept, not_kept = counted("kept"), counted("not_kept")
    assert [second.read(page) for page in range(5)] == [[True]] * 5
    assert begun.wait(SECONDS)
    second.pool.data.zero_()
    go_on.set()
    until(lambda: counted("kept") == kept + 3, "three pages to be kept")
    assert counted("not_kept") == not_kept + 2
    assert second.read(3) == [True]
    until(lambda: second.stored() == 4, "a page to be kept")
    for path in values():
        path.unlink()
    assert second.read(0, 1, 2) == [True] * 3
    assert torch.equal(second.pool.data[:, :3], given[:, :3])


# ---- threads ----


def test_a_call_that_itself_times_out_has_failed_and_was_not_given_up() -> None:
    """As a file system does that is mounted softly."""
    calls = BoundedCalls("test")

    def fail() -> None:
        raise TimeoutError("Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        calls.call(fail, SECONDS)
    assert not calls.hangs
    done = threading.Event()
    with pytest.raises(GivenUp, match=r"did not answer within 0\.5 s"):
        calls.call(lambda: done.wait(SECONDS), 0.5)
    assert calls.hangs
    done.set()
    until(lambda: not calls.hangs, "the call to end")
