"""Machines with page stores of their own and one folder as their shared tier."""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from hcache_backend import HCacheStorage, metrics
from tests.engine.in_process.storage_config import KEYS, PAGE, storage_config

SECONDS = 30.0
"""For what takes a moment, on a machine that is busy with something else."""


class Machine:
    """A server's L3: its own page store, and the shared folder unless ``shared`` is None."""

    def __init__(self, folder: Path, pool: Any, **options: Any) -> None:
        rank = {name: options.pop(name) for name in ("tp_rank", "tp_size") if name in options}
        hcache = {"min_free_bytes": 0, **options}
        if (given := options.get("shared", {})) is not None:
            hcache["shared"] = {"backend": "file", "read_seconds": SECONDS, **given}
        self.folder, self.pool = folder, pool
        self.storage = HCacheStorage(storage_config(folder, hcache, **rank))
        self.storage.register_mem_pool_host(pool)
        self.storage.register_mem_host_pool_v2(pool, PoolName.KV)

    def write(self, *pages: int) -> torch.Tensor:
        """Random bytes as pages of these numbers; returns them, ``[2, pages, bytes]``."""
        for page in pages:
            self.storage.batch_set_v1([KEYS[page]], self.pool.fill(range(page, page + 1)))
        return self.pool.data[:, list(pages)].clone()

    def put(self, count: int) -> torch.Tensor:
        """Random bytes as the first so many pages, in one batch; returns their host indices."""
        indices = self.pool.fill(range(count))
        self.storage.batch_set_v1(KEYS[:count], indices)
        return indices

    def hit(self, count: int) -> int:
        """How many of the first so many pages a look-up finds."""
        return self.storage.batch_exists(KEYS[:count])

    def read(self, *pages: int) -> list[bool]:
        return self.storage.batch_get_v1([KEYS[page] for page in pages], slots(pages))

    def files(self) -> set[Path]:
        return set(self.folder.glob("pages/??/*.page"))

    def stored(self) -> int:
        return len(self.files())


MakeMachine = Callable[..., Machine]
"""The fixture ``machine``: the machine of a name, with options of its L3."""


def slots(pages: tuple[int, ...]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def held(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, of: str = ""
) -> tuple[threading.Event, threading.Event]:
    """Whoever calls ``owner.name`` waits, with a page ``of`` this key alone if there is one: what
    says that somebody does, and what ends it."""
    begun, go_on, work = threading.Event(), threading.Event(), getattr(owner, name)

    def wait(*args: Any, **options: Any) -> Any:
        if of in str(args):
            begun.set()
            assert go_on.wait(SECONDS)
        return work(*args, **options)

    monkeypatch.setattr(owner, name, wait)
    return begun, go_on


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def values() -> list[Path]:
    """Those in the shared folder."""
    folder = Path(os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"])
    return sorted(folder.glob("*.bin"))


def value_of(page: int) -> Path:
    [path] = [path for path in values() if KEYS[page] in path.name]
    return path


def counted(event: str) -> float:
    for metric in metrics.SHARED_PAGES.counters:
        if (found := re.fullmatch(metric.events, event)) is not None:
            labels = found.groups()
            return (metric.family.labels(*labels) if labels else metric.family)._value.get()
    raise LookupError(event)
