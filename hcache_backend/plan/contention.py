"""Copies to a GPU during matrix products: the speed of both, for every way to copy. A copying
kernel keeps products off the multiprocessors that it waits on, so a restore slows both. More
programs fill the bus more, and slow products more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from hcache_backend.streams import Event, Stream, current_stream, host_tensor, new_stream
from hcache_kernels.launch import most_copy_programs
from hcache_kernels.pages import gather_pages
from hcache_kernels.pages.kernel import gather_launch

logger = logging.getLogger("hcache")

PROGRAMS = (2, 4, 8, 16, 32)
TOKENS, PAGE, PRODUCT_TOKENS = 2048, 64, 8192  # of a copy, a page, a product; longer than a launch
_COLD_BYTES = 64 << 20
_EVEN = 1.05  # ways count as equally fast if their layers take at most this many times as long
_LEAST, _MOST = 4, 1000  # repetitions of one measurement

Work = Callable[[], object]


class CopySpeed(NamedTuple):
    """A :class:`~hcache_backend.plan.profile.CopyWay` without pydantic."""

    programs: int | None
    alone: float
    beside: float
    products: float


class Repeated(NamedTuple):
    """Work that one of two concurrent streams repeated: seconds of one repetition undisturbed
    (``alone``), and of all together (``took``)."""

    times: int
    alone: float
    took: float


def shares(one: Repeated, other: Repeated) -> tuple[float, float]:
    """Share of its own speed, at most 1, that each stream kept while both worked."""
    both = min(one.took, other.took)

    def share(work: Repeated) -> float:
        # The slower one worked alone after the other's end.
        done = work.times * work.alone - (work.took - both)
        return min(1.0, max(done, work.alone / 2) / both)  # noise must not look like a standstill

    return share(one), share(other)


def fastest_first(
    speeds: Sequence[CopySpeed], size: float, product: float
) -> tuple[CopySpeed, ...]:
    """Sort by the time of a layer: the longer of its copy (``size`` bytes) and its product (seconds
    alone). Of equally fast ways the one that slows products least comes first."""

    def seconds(way: CopySpeed) -> float:
        return max(size / way.beside, product / way.products)

    left, found = sorted(speeds, key=seconds), []
    while left:
        even = [way for way in left if seconds(way) <= _EVEN * seconds(left[0])]
        found.append(max(even, key=lambda way: (way.products, -(way.programs or 0))))
        left.remove(found[-1])
    return tuple(found)


def cold_pages(
    tokens: int, segment: int, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Host pages of two segments each (bytes), and sets of page ids to copy in turn, so that no
    page is in the processor's cache."""
    pages = tokens // PAGE
    sets = 1 + _COLD_BYTES // (pages * segment)
    memory = host_tensor((sets * pages, 2 * segment), torch.uint8, device).zero_()
    return memory, list(torch.randperm(sets * pages).view(sets, pages))


class Contention:
    """Copies ``tokens`` hidden states to a device beside products of :data:`PRODUCT_TOKENS` tokens,
    which ``product`` launches. All ways together take about ``seconds``."""

    def __init__(
        self,
        device: torch.device,
        row_bytes: int,
        product: Work,
        seconds: float,
        tokens: int = TOKENS,
    ) -> None:
        self._device, self._product, self._tokens = device, product, tokens
        self._length = PAGE * row_bytes
        self._memory, self._here = cold_pages(tokens, self._length, device)
        self._memory.random_(0, 256)  # pages of equal bytes could not be told from each other
        self._ids = [ids.to(device) for ids in self._here]
        self._out = torch.empty((tokens // PAGE, self._length), dtype=torch.uint8, device=device)
        self._computing = new_stream(device, "compute")
        # One for all ways: torch hands out 32 streams in turn, and the next ones would be SGLang's.
        self._copying = new_stream(device, "copy")
        self._ways = [n for n in PROGRAMS if n <= most_copy_programs(device)]
        # A way is measured alone and beside, the product alone.
        self._share = seconds / (2 * len(self._ways) + 3)

    def measure(self) -> tuple[CopySpeed, ...]:
        """Speeds, :func:`fastest_first`, of the ways that work here."""
        product = self._alone(self._computing, self._product)
        found = []
        for programs in (*self._ways, None):
            try:
                found.append(self._speed(programs, product))
            except Exception as error:
                self._copying = new_stream(self._device, "copy")  # a failed one runs nothing more
                how = "the copy engine" if programs is None else f"{programs} programs"
                logger.warning("hcache: copies by %s could not be measured: %s", how, error)
        per_layer = product * self._tokens / PRODUCT_TOKENS
        return fastest_first(found, self._out.nbytes, per_layer)

    def _speed(self, programs: int | None, product: float) -> CopySpeed:
        turns = cycle(self._here if programs is None else self._ids)

        def copy() -> None:
            ids = next(turns)
            if programs is None:
                gather_pages(self._memory, ids, self._length, self._length, self._out)
            else:
                gather_launch(self._memory, ids, self._length, self._out, programs).run()

        self._out.zero_()
        self._run(self._copying, copy, 1)
        if not torch.equal(self._out.cpu(), self._memory[self._here[0], self._length :]):
            raise RuntimeError("other bytes arrived than were sent")
        alone = self._alone(self._copying, copy)
        copies, products = (max(_LEAST, round(self._share / one)) for one in (alone, product))
        loops = (self._copying, copy, copies), (self._computing, self._product, products)
        copied, multiplied = self._beside(loops)
        kept = shares(Repeated(copies, alone, copied), Repeated(products, product, multiplied))
        rate = self._out.nbytes / alone
        return CopySpeed(programs, rate, rate * kept[0], kept[1])

    def _alone(self, stream: Stream, work: Work) -> float:
        """Seconds of one undisturbed ``work``."""
        first = self._run(stream, work, 1)
        first = min(first, self._run(stream, work, 1))  # the first one compiles
        times = min(_MOST, max(_LEAST, round(self._share / first)))
        return self._run(stream, work, times) / times

    def _run(self, stream: Stream, work: Work, times: int) -> float:
        return self._beside([(stream, work, times)])[0]

    def _beside(self, loops: Sequence[tuple[Stream, Work, int]]) -> list[float]:
        """Seconds of loops that begin together, each on its stream."""
        start = current_stream(self._device).record(timed=True)
        for stream, _, _ in loops:
            stream.wait(start)
        try:
            for stream, work in in_turn(loops):
                stream.run(work)
        finally:  # no work may run when the memory is freed
            ends: list[Event] = [stream.record(timed=True) for stream, _, _ in loops]
            for end in ends:
                end.synchronize()
        return [max(start.elapsed_time(end), 1e-3) / 1e3 for end in ends]


def engine_works(device: torch.device) -> bool:
    """True if the copy engine brings the right bytes to ``device``."""
    memory = host_tensor((3, 1024), torch.uint8, device)
    memory.view(-1).copy_(torch.arange(memory.numel()) % 251)
    ids, out = torch.tensor([2, 0]), torch.zeros((2, 512), dtype=torch.uint8, device=device)
    try:
        copying = new_stream(device, "copy")
        copying.wait(current_stream(device).record())
        copying.run(lambda: gather_pages(memory, ids, 512, 512, out))
        copying.record().synchronize()
    except Exception as error:
        logger.warning("hcache: copies by the copy engine do not work here: %s", error)
        return False
    return torch.equal(out.cpu(), memory[ids, 512:])


def in_turn(loops: Sequence[tuple[Stream, Work, int]]) -> Iterator[tuple[Stream, Work]]:
    """Work of all loops, interleaved so that all progress evenly."""
    every = enumerate(times for *_, times in loops)
    turns = [((n + 1) / times, index) for index, times in every for n in range(times)]
    for _, index in sorted(turns):
        stream, work, _ = loops[index]
        yield stream, work
