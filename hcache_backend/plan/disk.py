"""Read speed of the folders of L3, by the store's own file operations, all folders at once."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import round_up
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.store import FileOps, best_file_ops
from hcache_backend.store.file_ops import FOLDER, PageIO, probe_alignment

_FILE_BYTES = 512 << 20
_LEAST_PIECES = 8
_PAGE_TOKENS = 64
_MOST_PIECE_BYTES = 16 << 20


class ReadRate(NamedTuple):
    """Bytes per second of all folders; ``direct``: every one was read past the page cache."""

    per_second: float
    direct: bool


class _Probe(NamedTuple):
    fd: int
    pieces: int
    io: PageIO


def read_rate(
    config: HCacheConfig, model: ModelShape, seconds: float, ops: FileOps | None = None
) -> ReadRate:
    """Write a file beside every folder's pages, then read all of them for ``seconds``.

    Writing takes at most as long. A read is a page of hidden states, at most 16 MiB. The nearest
    parent replaces a missing folder. Raises OSError if a folder cannot be used or is too full.
    """
    ops = ops or best_file_ops(config)
    piece = round_up(min(_PAGE_TOKENS * model.layers * model.hidden_bytes, _MOST_PIECE_BYTES))
    with ExitStack() as stack:
        probes = [
            stack.enter_context(_written(ops, path, piece, seconds, config.min_free_bytes))
            for path in config.dirs
        ]
        return ReadRate(
            _read(probes, piece, config.io_threads, seconds),
            all(probe.io.alignment.flags for probe in probes),
        )


@contextmanager
def _written(
    ops: FileOps, path: Path, piece: int, seconds: float, min_free_bytes: int
) -> Iterator[_Probe]:
    place = path
    while not place.exists():
        place = place.parent
    with tempfile.TemporaryDirectory(prefix=".hcache-profile-", dir=place) as folder:
        dir_fd = os.open(folder, FOLDER)
        try:
            free = ops.free_bytes(dir_fd) - min_free_bytes
            pieces = min(_FILE_BYTES, free) // piece
            if pieces < _LEAST_PIECES:
                raise OSError(
                    f"{path}: {max(free, 0)} bytes may still be written above 'min_free_bytes' "
                    f"({min_free_bytes}); measuring needs {_LEAST_PIECES * piece}"
                )
            alignment = probe_alignment(ops, dir_fd, "alignment")
            fd = ops.open("pages", os.O_RDWR | os.O_CREAT | alignment.flags, dir_fd)
            try:
                written = _write(ops, fd, piece, pieces, seconds)
                yield _Probe(fd, written, PageIO(ops, alignment, round_up(min(piece, 4 << 20))))
            finally:
                ops.close(fd)
        finally:
            ops.close(dir_fd)


def _write(ops: FileOps, fd: int, piece: int, pieces: int, seconds: float) -> int:
    """Write up to ``pieces`` pages within ``seconds``; returns how many there are."""
    room = memoryview(mmap.mmap(-1, piece))
    room[:] = os.urandom(piece)
    until = time.perf_counter() + seconds
    for number in range(pieces):
        done = 0
        while done < piece:
            done += ops.write(fd, [room[done:]], number * piece + done)
        if number + 1 >= _LEAST_PIECES and time.perf_counter() > until:
            pieces = number + 1
            break
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return pieces


def _read(probes: Sequence[_Probe], piece: int, threads: int, seconds: float) -> float:
    until = time.perf_counter() + seconds

    def work(probe: _Probe, numbers: Iterator[int]) -> int:
        room, done = memoryview(mmap.mmap(-1, piece)), 0
        for number in numbers:
            probe.io.read(probe.fd, number * piece, [room])
            done += piece
            if time.perf_counter() > until:
                break
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(threads * len(probes)) as pool:
        readers = []
        for probe in probes:
            # A random order defeats read-ahead; taking the next number is atomic.
            numbers = cycle(random.sample(range(probe.pieces), probe.pieces))
            readers += [pool.submit(work, probe, numbers) for _ in range(threads)]
        read = sum(reader.result() for reader in readers)
    return read / (time.perf_counter() - start)
