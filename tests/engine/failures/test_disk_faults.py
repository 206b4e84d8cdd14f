"""Disks that fail under a server that goes on serving: no request notices, and L3 comes back."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)

pytestmark = pytest.mark.engine

STORE = {"min_free_bytes": 0}  # else it would stop long before the disk is full
DISK_BYTES = 64 << 20
PAGE_FILE_BYTES = {"hidden": 266_240, "kv": 528_384}
LONG = pytest.mark.long


@pytest.fixture(scope="module", params=["hidden", "kv"])
def mode(request: pytest.FixtureRequest) -> str:
    """What the host pool and the store hold."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def disk(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of its own, where this user may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    yield folder
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def trigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trigger") / "trigger"


@pytest.fixture(scope="module")
def server(
    mode: str, model: Path, disk: Path, trigger: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    env = ours.faulty("disk", trigger)
    # What is recomputed at the front of a hit counts as L3's: in one mode all of a hit is read.
    recompute = "never" if mode == "kv" else "auto"
    hcache = {**STORE, "mode": mode, "recompute": recompute}
    options = ours.our_server(model, disk, log=log, hcache=hcache, extra_env=env)
    with Server(options) as server:
        yield server
        if mode == "hidden":
            ours.assert_hidden_mode(server)
        ours.assert_nothing_went_wrong(server)


Fault = Callable[[Path, Path], AbstractContextManager[None]]


@contextmanager
def read_only(disk: Path, trigger: Path) -> Iterator[None]:
    """Nothing can be made, changed or deleted. Modes do not stop root; this does."""
    as_root = os.geteuid() == 0
    forbid, allow = (["chattr", "-R", sign] for sign in ("+i", "-i"))
    if not as_root:
        forbid, allow = (["chmod", "-R", sign] for sign in ("a-w", "u+w"))
    if shutil.which(forbid[0]) is None:
        pytest.skip(f"needs {forbid[0]}")
    subprocess.run([*forbid, str(disk / "l3")], check=True)
    try:
        yield
    finally:
        subprocess.run([*allow, str(disk / "l3")], check=True)


@contextmanager
def full(disk: Path, trigger: Path) -> Iterator[None]:
    """Somebody else takes every byte, those too that the store frees for itself."""
    if not disk.is_mount():
        pytest.skip("needs the right to mount a file system")
    filler, over = disk / "filler", threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while not over.is_set():
                for size in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(size)) and not over.is_set():
                            pass
                time.sleep(0.001)

    thread = threading.Thread(target=fill)
    thread.start()
    while shutil.disk_usage(disk).free:
        time.sleep(0.01)
    yield
    over.set()
    thread.join()
    filler.unlink()


@contextmanager
def removed(disk: Path, trigger: Path) -> Iterator[None]:
    while (disk / "l3").exists():  # the server still writes into it
        shutil.rmtree(disk / "l3", ignore_errors=True)
    yield


@contextmanager
def index_deleted(disk: Path, trigger: Path) -> Iterator[None]:
    index = disk / "l3" / "index" / "index.sqlite"
    index.unlink()
    yield
    deadline = time.monotonic() + 240
    while not index.exists():  # else no other server would find these pages
        assert time.monotonic() < deadline
        time.sleep(0.05)


def injected(name: str) -> Fault:
    """What the server does to itself while the trigger says so."""

    @contextmanager
    def fault(disk: Path, trigger: Path) -> Iterator[None]:
        trigger.write_text(name.replace("_", " "))
        yield
        trigger.unlink()

    fault.__name__ = name
    return fault


slow_reads, failing_writes, held_reads = map(
    injected, ("slow_reads", "failing_writes", "held_reads")
)
FAULTS: list[Fault] = [slow_reads, failing_writes, read_only, full, index_deleted, removed]


@pytest.mark.parametrize("mode", ["hidden", pytest.param("kv", marks=LONG)], indirect=True)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_requests_go_on_without_notice_and_l3_is_back_when_the_fault_is_over(
    fault: Fault, mode: str, server: Server, model: Path, disk: Path, trigger: Path
) -> None:
    old, new = make_conversations(2, turns=2, tokens=200, seed=200 + FAULTS.index(fault))
    converse(server, [old])
    ours.assert_restored_from_l3([old], 64)
    before = set(ours.stored_pages(disk))
    old.questions.append(random_tokens(100, seed=FAULTS.index(fault)))
    with fault(disk, trigger):
        begin = time.monotonic()
        converse(server, [old, new], concurrent=True)
        took = time.monotonic() - begin
        written = set(ours.stored_pages(disk)) - before
        if fault is full:  # it takes anew what an eviction made free
            server.until(
                lambda: shutil.disk_usage(disk).free < PAGE_FILE_BYTES[mode], "a full disk"
            )
    # The fault was one.
    if fault is slow_reads:
        assert took > 2
        assert old.turns[2].cached.storage > 0
    elif fault in (failing_writes, read_only):
        assert written == set()
    after = wait_for_l3(server, seed=300 + FAULTS.index(fault))
    ours.assert_no_cache_output(model, [old, new, after])


def wait_for_l3(server: Server, seed: int) -> Conversation:
    """The first conversation that is restored from L3, out of as many as it takes."""
    deadline = time.monotonic() + 240  # a folder that kept failing rests for 5 s
    while True:
        (conversation,) = make_conversations(1, turns=2, tokens=200, seed=seed)
        converse(server, [conversation])
        if conversation.turns[1].cached.storage >= 192:
            return conversation
        assert time.monotonic() < deadline
        seed += 1000


@pytest.mark.parametrize("mode", ["kv"], indirect=True)
def test_a_prefetch_waits_as_long_as_its_options_say(
    server: Server, model: Path, disk: Path, trigger: Path
) -> None:
    """Policy `timeout`: prefetch_timeout_base + prefetch_timeout_per_ki_token a 1024 tokens."""
    (conversation,) = ask(server, [random_tokens(512, seed=500)])

    def hits(fault: Fault, base: float, per_ki_token: float) -> int:
        server.detach_storage()
        config = ours.attach_config(disk, **STORE)
        config |= {"prefetch_timeout_base": base, "prefetch_timeout_per_ki_token": per_ki_token}
        ours.attach(server, config, hicache_storage_prefetch_policy="timeout")
        with fault(disk, trigger):
            (again,) = ask(server, [conversation.turns[0].prompt], flush=False)
        server.flush_cache()
        assert again.outputs == conversation.outputs
        return again.turns[0].cached.storage

    ours.assert_no_cache_output(model, [conversation])
    # 7 pages take 2 s. (With a base of 0 the time is over before SGLang knows how much to fetch.)
    assert hits(held_reads, 0.5, 0.1) == 0
    assert hits(slow_reads, 0.5, 240) == 448
    assert hits(slow_reads, 120, 0) == 448


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=LONG)])
def test_weights_may_change_while_pages_are_written(
    ranks: int, model: Path, tmp_path: Path
) -> None:
    """The first ones of a server: SGLang ends one that it cannot flush then."""
    trigger, prompt = tmp_path / "trigger", random_tokens(640, seed=9)
    env = ours.faulty("disk", trigger)
    options = ours.our_server(model, tmp_path, metrics=True, extra_env=env, tp=ranks)
    with Server(options) as server:
        trigger.write_text("slow writes")
        server.generate(prompt, 1)
        server.update_weights_from_disk(model)
        trigger.unlink()
        conversations = ask(server, [prompt, prompt])
        ours.assert_nothing_went_wrong(server)
    assert [c.turns[0].cached.device for c in conversations] == [0, 576]
    ours.assert_no_cache_output(model, conversations)
