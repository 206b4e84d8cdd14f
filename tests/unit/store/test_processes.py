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


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
ORDINARY = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")

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

COMMANDS = """
import json, os, sys
from typer.testing import CliRunner
from hcache_backend.cli.main import app
results = []
for command in sys.argv[2:]:
    result = CliRunner().invoke(app, [*command.split(), "-d", sys.argv[1], "--json"])
    results.append([result.exit_code, result.output])
print(json.dumps([os.getpid(), results]))
"""


@pytest.fixture(params=["root", "an ordinary user"])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """What runs a container's process; it may use ``tmp_path``."""
    command = ORDINARY if request.param != "root" else ()
    inside = (*CONTAINER, *command)
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here, or no other user")
    if command:
        os.chown(tmp_path, 1000, 1000)
        for folder in tmp_path.parents:
            if not subprocess.run([*command, "test", "-x", folder], check=False).returncode:
                continue
            folder.chmod(folder.stat().st_mode | 0o011)
        readable = [*command, "test", "-r", str(Path(__file__)), "-a", "-x", sys.executable]
        if subprocess.run(readable, check=False).returncode:
            pytest.skip("an ordinary user cannot read this checkout or its Python")
    return inside


class Container:
    """A store that is open in a container of its own."""

    def __init__(self, inside: tuple[str, ...], folder: Path, writer: str) -> None:
        here = str(Path(__file__).parent)
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", STORE, here, str(folder), writer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._answer()

    def ask(self, what: str, numbers: range) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {numbers.start} {numbers.stop}\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for container in started:
        if container.process.poll() is None:
            container.process.communicate(timeout=60)


def test_two_containers_share_a_folder(
    user: tuple[str, ...], tmp_path: Path, containers: list[Container]
) -> None:
    folder = tmp_path / "store"
    first, second = (Container(user, folder, f"writer-{n}") for n in (1, 2))
    containers += [first, second]
    assert first.pid == second.pid == 1
    for round_number in range(3):
        start = 20 * round_number
        assert first.ask("put", range(start, start + 10)) == 10
        assert second.ask("put", range(start + 10, start + 20)) == 10
        assert first.ask("get", range(start + 20)) == start + 20
        assert second.ask("get", range(start + 20)) == start + 20
        second.kill()  # the other one goes on, and the next one finds everything
        assert first.ask("get", range(start + 20)) == start + 20
        second = Container(user, folder, "writer-2")
        containers.append(second)
    for container in (first, second):
        container.process.communicate(timeout=60)
        assert container.process.returncode == 0
    store = open_quiet(folder)
    assert_sound(store)
    assert names(folder / "sessions") == [store.disks[0]._folder.session.token]


def test_commands_run_in_another_container(
    user: tuple[str, ...], tmp_path: Path, containers: list[Container]
) -> None:
    folder = tmp_path / "store"
    server = Container(user, folder, "writer-1")
    containers.append(server)
    assert server.ask("put", range(10)) == 10
    commands = ("stats", "ls", "verify", "verify --repair", "gc", "doctor", "clear --yes")
    done = subprocess.run(
        [*user, sys.executable, "-c", COMMANDS, str(folder), *commands],
        capture_output=True,
        text=True,
        check=True,
    )
    pid, results = json.loads(done.stdout.splitlines()[-1])
    assert pid == server.pid
    assert [status for status, _ in results] == [0] * len(commands), results
    assert json.loads(results[0][1])["folders"][0]["pages"] == 10
    assert json.loads(results[-1][1])["pages"] == 10
    assert server.ask("get", range(10)) == 0
    assert server.ask("put", range(10)) == 10
    assert server.ask("get", range(10)) == 10
