"""Processes that use a store while others do, and while they are killed."""

import io
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from store_testing import NAMESPACE, PAGE, config, content, key, memory

from hcache_backend.store import PageStore

PAGES = 400
"""Page numbers in use, so that processes meet."""
LENGTH = 10
"""Pages of a sequence; those of the first one are 0 to 9."""


@dataclass(frozen=True)
class Task:
    """What a process does.

    Attributes:
        role: ``writer``, ``reader`` or ``mixed`` (four threads that do everything).
        folders: Of the store.
        seed: Decides what it does; one that fails can be repeated.
        seconds: How long.
        quota: Bytes a folder, 0 for none.
        durability: As in the options.
        log: A line when it begins, for every acknowledged page its number, ``WRONG`` for a page
            with wrong bytes. It is written unbuffered, so a kill loses nothing that was said.
    """

    role: str
    folders: list[Path]
    seed: int
    seconds: float
    quota: int
    durability: str
    log: Path


def sequence_to(last: int) -> list[bytes]:
    return [key(number) for number in range(last // LENGTH * LENGTH, last + 1)]


def write(store: PageStore, chance: random.Random, log: TextIO | None) -> None:
    sequence = sequence_to(last := chance.randrange(PAGES))
    names = sequence[-chance.randrange(1, 6) :]
    numbers = range(last + 1 - len(names), last + 1)
    views = [memory(content(name), shift=chance.choice((0, 0, 0, 64))) for name in names]
    prefix = sequence[: -len(names)]
    stored = store.put(NAMESPACE, names, [[view] for view in views], prefix=prefix)
    for view in views:
        view[:] = b"\xff" * PAGE  # HiCache reuses the page at once
    if log is not None:
        log.write("".join(f"{n}\n" for n, ok in zip(numbers, stored, strict=True) if ok))


def read(store: PageStore, chance: random.Random, log: TextIO) -> None:
    names = sequence_to(chance.randrange(PAGES))
    store.use(NAMESPACE, names)
    views = [memory(PAGE) for _ in names]
    found = store.get(NAMESPACE, names, [[view] for view in views])
    for name, view, ok in zip(names, views, found, strict=True):
        if ok and bytes(view) != content(name):
            log.write("WRONG\n")
    store.exists(NAMESPACE, names)


def work(store: PageStore, role: str, seed: str, deadline: float, log: TextIO) -> None:
    chance = random.Random(seed)
    while time.monotonic() < deadline:
        if role == "writer":
            write(store, chance, log)
        elif role == "reader":
            read(store, chance, log)
            if chance.random() < 0.1:
                store.flush()
        elif chance.random() < 0.4:
            write(store, chance, None)
        elif chance.random() < 0.95:
            read(store, chance, log)
        elif chance.random() < 0.6:
            store.flush()
        else:
            store.drop_writer(b"writer-%d" % chance.randrange(8))


def run(task: Task) -> None:
    """The life of a process; it exits with 1 when a thread raised."""
    options: dict[str, object] = {"durability": task.durability, "io_threads": 2}
    if task.quota:
        options["quota_bytes"] = task.quota
    store = PageStore(config(*task.folders, **options), b"writer-%d" % (task.seed % 8))
    deadline = time.monotonic() + task.seconds
    raised: list[threading.ExceptHookArgs] = []
    plain_hook = threading.excepthook
    threading.excepthook = lambda args: (raised.append(args), plain_hook(args))[1]
    with io.TextIOWrapper(task.log.open("wb", buffering=0), write_through=True) as log:
        log.write("begun\n")
        threads = [
            threading.Thread(
                target=work, args=(store, task.role, f"{task.seed}-{n}", deadline, log)
            )
            for n in range(4 if task.role == "mixed" else 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store.close()
    if raised:
        sys.exit(1)
