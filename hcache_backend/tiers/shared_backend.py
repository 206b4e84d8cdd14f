"""SGLang's storage backends as values by name, read into and written from rows of memory of ours:
an abandoned call that comes back late cannot write to a page in use."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

from hcache_backend.config import ConfigError, SharedOption
from hcache_backend.format.page import Bytes
from hcache_backend.format.units import Parts
from hcache_backend.metrics import logger

START_SECONDS = 60.0  # longest time to make a backend, and to give it memory: the server waits
# environment variables with the folder of a backend; SGLang's default is in /tmp
_FOLDERS = {
    "file": "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "nixl": "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR",
}
_BLOCK = 4096


class RowPool:
    """Rows of memory (uint8 ``[rows, length]``) that SGLang's backends take for a host pool with
    pages of one token; row ``i`` is the page of host index ``i``."""

    layout = "page_first"
    page_size = 1
    dtype = torch.uint8
    pin_memory = False

    def __init__(self, rows: int, length: int, pieces: int) -> None:
        self._pieces = pieces
        memory = mmap.mmap(-1, rows * length)
        self.kv_buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, length)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        length, pieces = self.kv_buffer.shape[1] // self._pieces, range(self._pieces)
        starts = [self.kv_buffer[row].data_ptr() for row in indices.tolist()]
        addresses = [start + piece * length for start in starts for piece in pieces]
        return addresses, [length] * len(addresses)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer]

    def get_ksize_per_token(self) -> int:
        return int(self.kv_buffer.shape[1])

    def is_stride_page_aligned(self, page_size_bytes: int = _BLOCK) -> bool:
        return bool(self.kv_buffer.shape[1] % page_size_bytes == 0)


class SharedBackend:
    """Values of one length by name in one of SGLang's storage backends, and in rows of
    :attr:`memory`. Every call but ``close`` may raise or hang."""

    def __init__(self, backend: HiCacheStorage, option: SharedOption) -> None:
        self.option = option
        self._backend = backend
        self._in_place = type(backend).batch_get_v1 is not HiCacheStorage.batch_get_v1

    def use_memory(self, most_bytes: int, value_bytes: int, pieces: int) -> None:
        """Make memory of ``most_bytes``, an even number of rows of a value each. A value has
        ``pieces`` pieces of equal length; direct I/O needs whole blocks."""
        length = -(-value_bytes // (pieces * _BLOCK)) * pieces * _BLOCK
        pool = RowPool(2 * max(1, most_bytes // 2 // length), length, pieces)
        self.memory = pool.kv_buffer
        self._backend.register_mem_pool_host(pool)

    def count_leading(self, names: Sequence[str]) -> int:
        """Number of ``names``, from the first one on, that are there."""
        return min(len(names), int(self._backend.batch_exists(list(names))))

    def get(self, names: Sequence[str], rows: Sequence[int]) -> list[bool]:
        """Read values into ``rows`` of the memory. False is a miss, with any bytes in its row."""
        if self._in_place:
            arrived = list(self._backend.batch_get_v1(list(names), torch.tensor(rows)))
        else:
            arrived = []
            for name, row in zip(names, rows, strict=True):
                try:
                    arrived.append(self._backend.get(name, self.memory[row]) is not None)
                except OSError:  # a file that was cut short costs no other value
                    arrived.append(False)
        if len(arrived) != len(names):
            raise RuntimeError(f"it was asked for {len(names)} values and gave {len(arrived)}")
        return arrived

    def set(self, names: Sequence[str], rows: Sequence[int]) -> list[bool]:
        """Store values from ``rows``; False: not stored. A value that exists is the same."""
        if not self._in_place:
            values = zip(names, rows, strict=True)
            return [self._backend.set(name, self.memory[row]) for name, row in values]
        stored = list(self._backend.batch_set_v1(list(names), torch.tensor(rows)))
        pieces = len(stored) // len(names)  # NIXL returns a flag for each piece of a value
        return [all(stored[i : i + pieces]) for i in range(0, len(stored), pieces)]

    def close(self) -> None:
        """Close the backend. A call that takes too long is given up; an error is logged."""
        close = getattr(self._backend, "close", None)
        try:
            if close is not None:
                bounded("hcache-shared-close", close, CLOSE_SECONDS)
        except Exception:
            logger.exception("hcache: the shared L3 (%s) could not be closed", self.option.backend)


def make_backend(option: SharedOption, config: HiCacheStorageConfig) -> SharedBackend:
    """The backend that ``option`` names, made by SGLang for the rank of ``config``. Raises
    ConfigError if that fails or takes a minute; no value of an option is in its message."""
    backend_options = option.config.get_secret_value()
    shown = {"backend": option.backend, "config": sorted(backend_options)}
    prefix = f"hcache: option 'shared' is {shown}: "
    variable = _FOLDERS.get(option.backend, "")
    folder = os.environ.get(variable)
    if variable and not folder:
        wanted = "must be the folder that the machines share, such as /mnt/shared/hcache"
        raise ConfigError(f"{prefix}the environment variable {variable} {wanted}")
    rank_config = replace(
        config,
        model_name=None,  # values are named by content, and it may be a path of this machine
        extra_config=dict(backend_options),
        enable_storage_metrics=False,
        is_page_first_layout=True,
        tp_lcm_size=None,
        should_split_heads=False,
    )
    given_up = threading.Event()

    def create() -> SharedBackend:
        if option.backend == "file" and folder:  # SGLang's code fails if two ranks make it at once
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            if Path(folder).stat().st_mode & 0o007:  # files have the modes that SGLang gives them
                open_to_all = "other users can enter %s, and read what users wrote: chmod o= it"
                logger.warning(f"hcache: the shared L3: {open_to_all}", folder)
        backend = StorageBackendFactory.create_backend(option.backend, rank_config, None)
        shared = SharedBackend(backend, option)
        if given_up.is_set():  # nobody waits for it any more
            shared.close()
        return shared

    try:
        return bounded("hcache-shared-start", create, START_SECONDS)
    except GivenUp as error:
        given_up.set()
        raise ConfigError(f"{prefix}it {error}") from None
    except Exception as error:  # its message may quote the value of an option
        message = f"{type(error).__name__}: {error}"
        for value in backend_options.values():
            message = message.replace(value, "***") if value and isinstance(value, str) else message
        raise ConfigError(f"{prefix}{message}") from None


_Result = TypeVar("_Result")

CLOSE_SECONDS = 5.0  # longest wait for queued work, or for a close, when a tier ends


class GivenUp(Exception):
    """A call took too long and was abandoned."""


def bounded(name: str, work: Callable[[], _Result], seconds: float) -> _Result:
    """The result of ``work()`` in a thread of its own; raises as :meth:`BoundedCalls.call`."""
    calls = BoundedCalls(name)
    try:
        return calls.call(work, seconds)
    finally:
        calls.end(time.monotonic())


class BoundedCalls:
    """A thread that makes one call after the other. Nothing waits for it at exit."""

    def __init__(self, name: str) -> None:
        self._given_up: Future[Any] | None = None
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def hangs(self) -> bool:
        """True if the thread is still in an abandoned call."""
        return self._given_up is not None and not self._given_up.done()

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._calls.put((future, work))
        return future

    def call(self, work: Callable[[], _Result], seconds: float) -> _Result:
        """The result of ``work()``; raises its exception, or GivenUp after ``seconds``."""
        future = self.submit(work)
        if not wait([future], seconds).done:
            if not future.cancel():
                self._given_up = future
            raise GivenUp(f"did not answer within {seconds:g} s")
        return future.result()

    def end(self, deadline: float) -> bool:
        """Returns True if all calls were made before ``deadline`` (monotonic seconds)."""
        self._calls.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            del call, future, work  # they may hold the memory of pages


def copy_page(row: Bytes, page: Parts) -> Parts:
    """Copy a page to the beginning of a row (uint8, at least as long); returns the copy's parts."""
    *copies, _ = np.split(row, list(accumulate(part.nbytes for part in page)))
    for copy, part in zip(copies, page, strict=True):
        copy[:] = np.frombuffer(part, np.uint8)
    return [copy.data for copy in copies]
