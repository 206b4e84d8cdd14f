"""Measures a profile on this machine: operations of one layer of the model's shape, with random
weights, for more and more tokens; and the folders of L3, by the store's own file operations."""

from __future__ import annotations

import logging
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import round_up
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import OPERATIONS, Profile, Rate, processor_name
from hcache_backend.store import FileOps, best_file_ops
from hcache_backend.store.direct_io import PageIO, find_alignment, move_all
from hcache_backend.store.file_ops import FOLDER
from hcache_backend.store.folder import existing_part
from hcache_backend.streams import current_stream, gpu_name, host_tensor
from hcache_kernels.pages import gather_pages, gather_planes

logger = logging.getLogger("hcache")

PAGE = 64  # tokens
_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LEAST_POINTS = 2
_LEAST_RUNS, _MOST_RUNS = 3, 50
_COLD_BYTES = 64 << 20  # more than a processor's cache holds
_LEAST_PIECES = 8

Work = Callable[[], object]
Prepare = Callable[[int], tuple[float, Work]]  # of tokens: bytes or FLOPs, and the timed work


class Point(NamedTuple):
    """One measurement: bytes or FLOPs, and seconds of the fastest call."""

    tokens: int
    amount: float
    seconds: float


def fit(points: Sequence[Point]) -> Rate:
    """Fit a fixed part (at least 0) and a rate to times, by least squares of relative errors."""
    points = sorted(points, key=lambda point: point.amount)
    largest = points[-1].amount
    amounts = np.array([point.amount / largest for point in points])
    # A time above that of a larger amount was disturbed: it becomes the smaller one.
    times = np.minimum.accumulate([point.seconds for point in reversed(points)])[::-1]
    system = np.stack([1 / times, amounts / times], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(system, np.ones(len(points)), rcond=None)
    if fixed < 0 or slope <= 0 or len(points) < _LEAST_POINTS:
        # Time that does not grow, or grows faster than the amount: fit without a fixed part.
        fixed, slope = 0.0, float(np.sum(amounts / times) / np.sum((amounts / times) ** 2))
    return Rate(seconds=float(fixed), per_second=largest / float(slope))


def cold_pages(
    tokens: int, segment: int, device: torch.device
) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """Host memory for pages, uint8 ``[pages, 2 * segment]`` (``segment`` bytes), and an endless
    iterator over sets of page ids, int64 on the device, each for the pages of ``tokens`` tokens.
    Sets take turns, so that no page is in a CPU cache."""
    pages = tokens // PAGE
    sets = 1 + _COLD_BYTES // (pages * segment)
    memory = host_tensor((sets * pages, 2 * segment), torch.uint8, device).zero_()
    return memory, cycle(torch.randperm(sets * pages).view(sets, pages).to(device))


@dataclass(frozen=True)
class Bench:
    """Times the operations of one layer. ``seconds`` bounds all sizes of one operation."""

    model: ModelShape
    device: torch.device
    dtype: torch.dtype
    seconds: float = 2.0

    @torch.no_grad()
    def points(self, operation: str) -> list[Point]:
        """Measure one of :data:`OPERATIONS`; OutOfMemoryError if the smallest sizes do not fit."""
        prepare: Prepare = getattr(self, f"_{operation}")()
        points, start = list[Point](), time.perf_counter()
        for tokens in _SIZES:
            try:
                amount, work = prepare(tokens)
                seconds = self._time(work, self.seconds / len(_SIZES))
            except torch.OutOfMemoryError:
                if len(points) < _LEAST_POINTS:
                    raise
                break
            points.append(Point(tokens, amount, seconds))
            remaining = self.seconds - (time.perf_counter() - start)
            # The next one has twice the tokens, and attention four times the work.
            if len(points) >= _LEAST_POINTS and remaining < 4 * _LEAST_RUNS * seconds:
                break
        return points

    def _time(self, work: Work, limit: float) -> float:
        """Seconds of the fastest call of ``work`` within ``limit`` seconds, or of the first three:
        other load of the machine only adds to it."""
        work()
        stream = current_stream(self.device)
        times, end = list[float](), time.perf_counter() + limit
        while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() < end):
            stream.record().synchronize()
            start = time.perf_counter()
            work()
            stream.record().synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    def _rows(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) / shape[-1] ** 0.5

    def _hidden_copy(self) -> Prepare:
        def prepare(tokens: int) -> tuple[float, Work]:
            """Bytes, and the copy: one segment of every page to the device, as in a restore."""
            segment = PAGE * self.model.hidden * self.dtype.itemsize
            memory, turns = cold_pages(tokens, segment, self.device)
            out = torch.empty((tokens // PAGE, segment), dtype=torch.uint8, device=self.device)
            return out.numel(), lambda: gather_pages(memory, next(turns), segment, segment, out)

        return prepare

    def _kv_load(self) -> Prepare:
        def prepare(tokens: int) -> tuple[float, Work]:
            """Bytes, and the copy: K and V of every page from host memory to pages of a pool."""
            pages, row = tokens // PAGE, self.model.kv_width * self.dtype.itemsize
            memory, turns = cold_pages(tokens, PAGE * row, self.device)
            # The split into K, V and heads makes no difference.
            halves = (PAGE * (row // 2), PAGE * (row - row // 2))
            empty = torch.zeros(0, dtype=torch.uint8, device=self.device)
            pool = [empty.new_zeros((2 * pages, 1, 1, half)) for half in halves]
            pool_pages = torch.randperm(2 * pages)[:pages].to(self.device)
            size = tokens * self.model.kv_width * self.dtype.itemsize
            return size, lambda: gather_planes(memory, next(turns), 0, pool, pool_pages)

        return prepare

    def _projection(self) -> Prepare:
        model = self.model
        weight = self._rows(model.kv_width, model.hidden)

        def prepare(tokens: int) -> tuple[float, Work]:
            """FLOPs, and the projection of hidden states to K and V, to slots of a pool."""
            hidden, pool = self._rows(tokens, model.hidden), self._rows(2 * tokens, model.kv_width)
            pages = torch.randperm(2 * tokens // PAGE)[: tokens // PAGE]
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten().to(self.device)
            flops = tokens * model.projection_flops
            return flops, lambda: pool.index_copy_(0, slots, functional.linear(hidden, weight))

        return prepare

    def _dense(self) -> Prepare:
        weights = [self._rows(after, before) for before, after in self.model.dense_products]

        def prepare(tokens: int) -> tuple[float, Work]:
            """FLOPs, and all matrix products of a layer's forward pass, on random rows."""
            rows = {width: self._rows(tokens, width) for width in {w.shape[1] for w in weights}}

            def work() -> None:
                for weight in weights:
                    functional.silu(functional.linear(rows[weight.shape[1]], weight), inplace=True)

            return tokens * self.model.dense_flops, work

        return prepare

    def _attention(self) -> Prepare:
        model = self.model

        def prepare(tokens: int) -> tuple[float, Work]:
            """FLOPs, and causal attention of all tokens: half of all pairs of tokens."""
            # Every query head has its own K and V here: no more work, only more memory.
            query, key = (self._rows(1, model.heads, tokens, model.head_dim) for _ in range(2))
            value = self._rows(1, model.heads, tokens, model.value_dim)
            attend = functional.scaled_dot_product_attention
            flops = tokens * tokens / 2 * model.attention_flops
            return flops, lambda: attend(query, key, value, is_causal=True)

        return prepare


def device_name(device: torch.device) -> str:
    return gpu_name(device) or processor_name()


def measure(
    bench: Bench,
    l3: Rate | None,
    dirs: Sequence[Path],
    source: str = "measured by hcache profile",
    begin: Callable[[str], object] = lambda operation: None,
) -> Profile:
    """Measure every operation of a layer, each after ``begin`` with its name; the other arguments
    go to the profile. Random state is restored: ranks must draw the same numbers."""
    points: dict[str, list[Point]] = {}
    with torch.random.fork_rng(devices=[bench.device] if bench.device.type == "cuda" else []):
        for operation in OPERATIONS:
            begin(operation)
            points[operation] = bench.points(operation)
    rates: dict[str, Any] = {operation: fit(measured) for operation, measured in points.items()}
    times = {name: tuple((p.tokens, p.seconds) for p in of_one) for name, of_one in points.items()}
    return Profile(
        device=device_name(bench.device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        source=source,
        dtype=str(bench.dtype).removeprefix("torch."),
        l3=l3,
        model=bench.model,
        dirs=tuple(map(str, dirs)),
        points=times,
        **rates,
    )


class _TestFile(NamedTuple):
    fd: int
    pieces: int
    io: PageIO


def read_rate(
    config: HCacheConfig, model: ModelShape, seconds: float, ops: FileOps | None = None
) -> tuple[Rate, bool]:
    """Write a file beside every folder's pages (or in the nearest parent), for ``seconds``, then
    read all files for ``seconds``, by pages of hidden states of at most 16 MiB. Returns the rate of
    all files together, and True if all were read by direct I/O. Raises OSError if a folder cannot
    be used or is too full."""
    ops = ops or best_file_ops(config)
    piece = round_up(min(PAGE * model.layers * model.hidden_bytes, 16 << 20))
    with ExitStack() as stack:
        files = [_write_file(stack, ops, path, piece, seconds, config) for path in config.dirs]
        direct = all(file.io.alignment.flags for file in files)
        return Rate(per_second=_read_files(files, piece, config.io_threads, seconds)), direct


def _write_file(
    stack: ExitStack, ops: FileOps, path: Path, piece: int, seconds: float, config: HCacheConfig
) -> _TestFile:
    """Write a file of up to 512 MiB, by ``piece`` bytes, for ``seconds``; ``stack`` removes it."""
    temporary = tempfile.TemporaryDirectory(prefix=".hcache-profile-", dir=existing_part(path))
    folder = os.open(stack.enter_context(temporary), FOLDER)
    stack.callback(ops.close, folder)
    free = ops.free_bytes(folder) - config.min_free_bytes
    pieces = min(512 << 20, free) // piece
    if pieces < _LEAST_PIECES:
        raise OSError(
            f"{path}: {max(free, 0)} bytes may still be written above 'min_free_bytes' "
            f"({config.min_free_bytes}); measuring needs {_LEAST_PIECES * piece}"
        )
    alignment = find_alignment(ops, folder, "alignment")
    fd = ops.open("pages", os.O_RDWR | os.O_CREAT | alignment.flags, folder)
    stack.callback(ops.close, fd)
    buffer = memoryview(mmap.mmap(-1, piece))
    buffer[:] = os.urandom(piece)
    end, written = time.perf_counter() + seconds, 0
    while written < pieces and (written < _LEAST_PIECES or time.perf_counter() < end):
        move_all(ops.write, fd, [buffer], written * piece, piece)
        written += 1
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return _TestFile(fd, written, PageIO(ops, alignment, round_up(min(piece, 4 << 20))))


def _read_files(files: Sequence[_TestFile], piece: int, threads: int, seconds: float) -> float:
    """Bytes per second of reads (``piece`` bytes each) from all files, ``threads`` for each."""
    end = time.perf_counter() + seconds

    def work(file: _TestFile, numbers: Iterator[int]) -> int:
        """Read pieces of these numbers until the time is over; returns how many bytes."""
        buffer, done = memoryview(mmap.mmap(-1, piece)), 0
        for number in numbers:
            file.io.read(file.fd, number * piece, [buffer])
            done += piece
            if time.perf_counter() > end:
                break
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(threads * len(files)) as pool:
        readers = []
        for file in files:
            # A random order defeats read-ahead; taking the next number is atomic.
            numbers = cycle(random.sample(range(file.pieces), file.pieces))
            readers += [pool.submit(work, file, numbers) for _ in range(threads)]
        size = sum(reader.result() for reader in readers)
    return size / (time.perf_counter() - start)
