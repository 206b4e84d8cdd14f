"""Several processes on one store, and processes that are killed."""

import fcntl
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import store_worker
from store_testing import (
    NAMESPACE,
    PAGE,
    assert_right_or_miss,
    assert_sound,
    content,
    get,
    key,
    names,
    open_quiet,
    page_files,
    put,
)
from store_worker import PAGES, Task

from hcache_backend.store.file_ops import try_lock

FILE = PAGE + 4096

Workers = list[ForkServerProcess]


@pytest.fixture
def workers() -> Iterator[Workers]:
    """The processes of a test; none survives it."""
    started: Workers = []
    yield started
    for process in started:
        process.kill()
        process.join()


def start(task: Task) -> ForkServerProcess:
    """Start a process, quickly: what it needs is imported already in the one that it forks from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["store_worker"])
    process = context.Process(target=store_worker.run, args=(task,))
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    # The main module here is pytest's; the processes have no use for it.
    main = {"__main__": ModuleType("__main__")}
    with mock.patch.dict(os.environ, path), mock.patch.dict(sys.modules, main):
        forkserver.ensure_running()
        process.start()
    return process


def wait_for_life(task: Task) -> None:
    """Until the process has said something."""
    deadline = time.monotonic() + 240
    while not task.log.exists():
        assert time.monotonic() < deadline, "the process did not start"
        time.sleep(0.002)


def whole_lines(task: Task) -> list[str]:
    """What the process said; a line that was cut by the kill does not count."""
    text = task.log.read_text() if task.log.exists() else ""
    return [line.strip() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kill_loop(
    memory_path: Path, workers: Workers, rounds: int, seed: int, durability: str, quota: int
) -> None:
    """Kill a writer and two readers ``rounds`` times and look at what they leave."""
    folders = [memory_path / "a", memory_path / "b"]
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    for round_number in range(rounds):
        tasks = [
            Task(
                role=role,
                folders=folders,
                seed=seed * 100_000 + round_number * 3 + number,
                seconds=60,
                quota=quota,
                durability=durability,
                log=memory_path / f"log-{round_number}-{number}",
            )
            for number, role in enumerate(("writer", "reader", "reader"))
        ]
        workers[:] = [start(task) for task in tasks]
        for task in tasks:
            wait_for_life(task)
        time.sleep(chance.random() ** 2 * 0.3)
        for process in chance.sample(workers, 3):
            process.kill()
        for process in workers:
            process.join()
        said = [line for task in tasks for line in whole_lines(task)]
        assert "WRONG" not in said, f"round {round_number} of seed {seed}"
        acknowledged.update(int(line) for line in said if line.isdigit())
        store = open_quiet(*folders, **({"quota_bytes": quota} if quota else {}))
        try:
            for folder in folders:
                sessions = names(folder / "sessions")
                assert len(sessions) == 1, "what the killed processes left is removed at opening"
            sample = range(PAGES) if round_number % 10 == 0 else chance.sample(range(PAGES), 40)
            assert_right_or_miss(store, *sample)
            assert_sound(store)
            if quota:
                for disk in store.disks:
                    with disk.use() as folder:
                        assert folder.index.totals().bytes <= quota
            else:
                lost = [n for n in acknowledged if not store.exists(NAMESPACE, [key(n)])[0]]
                assert not lost, f"lost {lost} in round {round_number} of seed {seed}"
        finally:
            store.close()
    assert acknowledged, "the writers did nothing"
    if not quota:
        store = open_quiet(*folders)
        for number in acknowledged:
            assert get(store, number) == content(key(number)), f"page {number} was acknowledged"
        store.close()
    for folder in folders:
        on_disk = sum(path.stat().st_size for path in page_files(folder))
        assert not quota or on_disk <= quota


def crowd(memory_path: Path, workers: Workers, seconds: float) -> None:
    """8 processes of 4 threads each write, read, evict and delete on one store."""
    folders = [memory_path / "a", memory_path / "b"]
    quota = PAGES // 3 * FILE
    tasks = [
        Task("mixed", folders, number, seconds, quota, "batch", memory_path / f"log-{number}")
        for number in range(8)
    ]
    workers[:] = [start(task) for task in tasks]
    deadline = time.monotonic() + seconds + 480
    for process, task in zip(workers, tasks, strict=True):
        process.join(max(deadline - time.monotonic(), 0))
        assert process.exitcode == 0, f"{process.exitcode} (None: it hangs): {whole_lines(task)}"
        assert "WRONG" not in whole_lines(task)
    store = open_quiet(*folders, quota_bytes=quota)
    hits = assert_right_or_miss(store, *range(PAGES))
    assert hits > PAGES // 4, "the processes did not do much"
    assert_sound(store)
    for disk in store.disks:
        with disk.use() as folder:
            entries = list(folder.index.entries())
            assert len(entries) == len(page_files(folder.path)), "index and files agree"
            assert folder.index.totals().bytes <= quota
    store.close()


def stop_with_the_lock(process: ForkServerProcess, folder: Path) -> None:
    """Stop (SIGSTOP) a process that writes while it holds the lock of ``folder``."""
    assert process.pid is not None
    lock = os.open(folder / "lock", os.O_RDWR)
    try:
        while True:
            os.kill(process.pid, signal.SIGSTOP)
            while "State:\tT" not in Path(f"/proc/{process.pid}/status").read_text():
                time.sleep(0.001)
            if not try_lock(lock):
                return
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(random.random() * 0.01)
    finally:
        os.close(lock)


def test_a_stopped_process_that_keeps_the_lock_costs_others_writes_and_no_reads(
    memory_path: Path,
    workers: Workers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A debugger, a frozen container: the process does not die, so nobody takes its lock."""
    folder = memory_path / "a"
    monkeypatch.setattr("hcache_backend.store.page_store.WRITE_SECONDS", 0.5)
    store = open_quiet(folder)
    task = Task("writer", [folder], 5, 3600, 0, "none", memory_path / "log")
    workers[:] = [start(task)]
    while len(whole_lines(task)) < 50:
        time.sleep(0.01)
    stop_with_the_lock(workers[0], folder)
    numbers = [int(line) for line in whole_lines(task) if line.isdigit()]
    for number in {*numbers}:
        assert get(store, number) == content(key(number))
    assert put(store, PAGES) == [False]
    assert "another user of the folder keeps its lock" in caplog.text
    assert workers[0].pid is not None
    os.kill(workers[0].pid, signal.SIGCONT)
    while put(store, PAGES) != [True]:
        time.sleep(0.1)
    workers[0].kill()
    workers[0].join()
    assert_right_or_miss(store, *range(PAGES))
    assert_sound(store)


LONG = (pytest.mark.long, pytest.mark.timeout(7200))


@pytest.mark.parametrize(("rounds", "seed"), [(25, 1), pytest.param(300, 3, marks=LONG)])
def test_acknowledged_pages_survive_kills(
    memory_path: Path, workers: Workers, rounds: int, seed: int
) -> None:
    kill_loop(memory_path, workers, rounds, seed, durability="always", quota=0)


@pytest.mark.parametrize(("rounds", "seed"), [(25, 2), pytest.param(300, 4, marks=LONG)])
def test_the_quota_survives_kills(
    memory_path: Path, workers: Workers, rounds: int, seed: int
) -> None:
    kill_loop(memory_path, workers, rounds, seed, durability="batch", quota=PAGES // 4 * FILE)


@pytest.mark.parametrize("seconds", [8, pytest.param(180, marks=LONG)])
def test_many_processes_share_a_store(memory_path: Path, workers: Workers, seconds: int) -> None:
    crowd(memory_path, workers, seconds)
