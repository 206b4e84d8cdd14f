"""Several processes and containers on one store, and processes that are killed."""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import subprocess
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
    FILE,
    NAMESPACE,
    assert_right_or_miss,
    assert_sound,
    content,
    get,
    hcache_commands,
    key,
    names,
    open_quiet,
    page_files,
    put,
)
from store_worker import PAGES, Task

from hcache_backend.store.file_ops import try_lock

pytestmark = pytest.mark.slow

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


def test_a_stopped_process_that_keeps_the_lock_costs_others_writes_and_makes_no_page_wrong(
    memory_path: Path,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A debugger, a frozen container: the process does not die, so nobody takes its lock. If it was
    stopped in the middle of a commit, others cannot look up either."""
    folder = memory_path / "a"
    monkeypatch.setattr("hcache_backend.store.page_store.WRITE_SECONDS", 0.5)
    store = open_quiet(folder)
    task = Task("writer", [folder], 5, 3600, 0, "none", memory_path / "log")
    workers[:] = [start(task)]
    while len(whole_lines(task)) < 50:
        time.sleep(0.01)
    stop_with_the_lock(workers[0], folder)
    numbers = [int(line) for line in whole_lines(task) if line.isdigit()]
    assert_right_or_miss(store, *numbers[:20])
    assert put(store, PAGES) == [False]
    assert store.stats.pages_dropped_late + store.stats.pages_dropped_offline == 1
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


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

STORE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store_testing import NAMESPACE, content, get, key, open_quiet, put
store = open_quiet(Path(sys.argv[2]), writer=sys.argv[3].encode())
print(os.getpid(), flush=True)
for line in sys.stdin:
    what, first, last = line.split()
    numbers = range(int(first), int(last))
    if what == "put":
        print(put(store, *numbers).count(True), flush=True)
    else:
        print(sum(get(store, n) == content(key(n)) for n in numbers), flush=True)
store.close()
"""


class Container:
    """A store that is open in a container of its own."""

    def __init__(self, folder: Path, writer: str) -> None:
        here = str(Path(__file__).parent)
        self.process = subprocess.Popen(
            [*CONTAINER, sys.executable, "-c", STORE, here, str(folder), writer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._answer()

    def ask(self, what: str, numbers: range) -> int:
        print(what, numbers.start, numbers.stop, file=self.process.stdin, flush=True)
        return self._answer()

    def kill(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        self.process.wait()

    def close(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode

    def _answer(self) -> int:
        return int(self.process.stdout.readline())


def test_containers_share_a_folder(tmp_path: Path) -> None:
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here")
    folder = tmp_path / "store"
    first, second = (Container(folder, f"writer-{n}") for n in (1, 2))
    assert first.pid == second.pid == 1
    for start in (0, 20):
        assert first.ask("put", range(start, start + 10)) == 10
        assert second.ask("put", range(start + 10, start + 20)) == 10
        assert first.ask("get", range(start + 20)) == start + 20
        assert second.ask("get", range(start + 20)) == start + 20
        second.kill()  # the other one goes on, and the next one finds everything
        assert first.ask("get", range(start + 20)) == start + 20
        second = Container(folder, "writer-2")
    assert second.close() == 0

    commands = ("stats", "ls", "verify", "verify --repair", "gc", "doctor", "clear --yes")
    pid, results = hcache_commands(CONTAINER, folder, *commands)
    assert pid == first.pid
    assert [status for status, _ in results] == [0] * len(commands), results
    assert json.loads(results[0][1])["folders"][0]["pages"] == 40
    assert json.loads(results[-1][1])["pages"] == 40
    assert first.ask("get", range(10)) == 0
    assert first.ask("put", range(10)) == first.ask("get", range(10)) == 10
    assert first.close() == 0
    store = open_quiet(folder)
    assert_sound(store)
    assert names(folder / "sessions") == [store.disks[0]._folder.session.token]
