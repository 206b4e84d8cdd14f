"""Prefetches that are read in smaller batches than SGLang's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE, PrefetchAck

from hcache_backend.prefetch import reader as reading
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.reader import BatchedReads, batch_pages
from hcache_backend.sglang.reads import BackAck, apply_reports, as_prefetch_read
from tests.kit.prefetch import Operation

SIZE = 4
READS = 2
"""Batches after which a scripted front goes on."""


@pytest.fixture(autouse=True)
def most_steps(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> None:
    """Scripted reads take no time: tests say whether several steps are read at once."""
    monkeypatch.setattr(reading, "_MOST_STEPS", getattr(request, "param", 1))


def waiting(waited: Callable[[float], None]) -> L3Progress:
    """Hears of seconds in which L3 is not read."""
    l3 = L3Progress()
    l3.paused = waited  # type: ignore[method-assign]
    return l3


class Stopped(Operation):
    """A prefetch that is ended as soon as ``stop`` says so."""

    def __init__(self, pages: int, stop: Callable[[], bool]) -> None:
        super().__init__(pages, SIZE)
        self.stop = stop

    def is_terminated(self) -> bool:
        self.terminated = self.terminated or self.stop()
        return self.terminated


class Rank:
    """A storage thread that reads a prefetch in order, of which some pages are missing."""

    def __init__(self, pages: int, missing: set[int], stop_at: int | None = None) -> None:
        self.acks: list[PrefetchAck] = []
        self.batches: list[int] = []
        self.missing, self.stop_at = missing, stop_at
        self.operation: Any = Stopped(pages, lambda: len(self.batches) == stop_at)
        read = as_prefetch_read(self.operation, SIZE, self.read, self.acks.append, from_back=False)
        self.pages = BatchedReads(SIZE, L3Progress()).transfer(read)

    def read(self, operation: Any, keys: list[str], host_indices: torch.Tensor, info: Any) -> int:
        before = operation.hash_value[: int(keys[0])]
        assert info.prefix_keys == before
        assert [int(key) for key in keys] == (host_indices[::SIZE] // SIZE).tolist()
        self.batches.append(len(keys))
        return next((i for i, key in enumerate(keys) if int(key) in self.missing), len(keys))

    @property
    def reports(self) -> list[int]:
        return [ack.completed_tokens // SIZE for ack in self.acks]


@pytest.mark.parametrize("pages", [1, 4, 5, 33, 64, 128, 129, 300, 1000])
def test_every_page_is_read_once_and_every_batch_reported(pages: int) -> None:
    rank = Rank(pages, set())
    assert rank.pages == sum(rank.batches) == pages
    assert max(rank.batches) <= batch_pages(pages)
    assert rank.reports == list(np.cumsum(rank.batches))


@pytest.mark.parametrize("pages", [5, 64, 129, 300])
def test_ranks_make_as_many_reports_however_far_they_get(pages: int) -> None:
    whole = Rank(pages, set())
    others = [Rank(pages, {page}) for page in range(0, pages, 3)]
    others += [Rank(pages, set(), stop_at=batches) for batches in range(len(whole.batches) + 1)]
    for rank in others:
        assert len(rank.reports) == len(whole.reports)
        agreed = [min(pair) for pair in zip(rank.reports, whole.reports, strict=True)]
        assert agreed == sorted(agreed)  # SGLang insists on it
        assert agreed[-1] == rank.pages


class BackRank:
    """A storage thread that reads a prefetch from the back. After :data:`READS` batches the front
    goes on by so many pages.

    Attributes:
        waited: Seconds for which the reader waited for the front.
    """

    def __init__(self, pages: int, front: int = 0, share: float = 1.0) -> None:
        self.reports: list[BackAck] = []
        self.read_pages: list[int] = []
        self.batches, self.front, self.meeting, self.paused = 0, front, Meeting(), 0.0
        self.operation: Any = Operation(pages, SIZE)
        self.operation.prefix_keys, self.operation.meeting = ["before"], self.meeting
        report: Any = self.reports.append
        read = as_prefetch_read(self.operation, SIZE, self.read, report, from_back=True)
        reads, alone = BatchedReads(SIZE, waiting(self._wait)), 2**-10
        reads.transfer(read, self.meeting, lambda *_, longest: (share * alone, alone))

    def _wait(self, seconds: float) -> None:
        assert seconds >= 0
        self.paused += seconds

    def read(self, operation: Any, keys: list[str], host_indices: torch.Tensor, info: Any) -> int:
        pages = [int(key) for key in keys]
        assert info.prefix_keys == ["before", *operation.hash_value[: pages[0]]]
        assert pages == (host_indices[::SIZE] // SIZE).tolist()
        self.batches += 1
        self.read_pages += pages
        if self.batches == READS:
            taken = self.meeting.take_offered(self.meeting.offer(self.front))
            self.meeting.front_launched(taken)
        return len(pages)

    def heard(self, *, running: bool = True) -> int:
        """How many pages count when all reports were heard."""
        apply_reports(self.reports, [self.operation] if running else [], Operation.prefetches, SIZE)
        return int(self.operation.completed_tokens) // SIZE


@pytest.mark.parametrize("most_steps", [4], indirect=True)
@pytest.mark.parametrize("pages", [5, 64, 129, 300])
def test_quick_reads_of_several_steps_are_reported_like_slow_ones(
    pages: int, monkeypatch: MonkeyPatch
) -> None:
    """Every read costs some milliseconds more, which a quick disk's small ones would be."""
    monkeypatch.setattr(reading, "_LEAST_SECONDS", 1e9)
    quick, quick_back, step = Rank(pages, set()), BackRank(pages), batch_pages(pages)
    assert quick.pages == sum(quick.batches) == pages
    assert max(quick.batches) == max(min(4 * step, min(pages, STORAGE_BATCH_SIZE) - step), step)
    monkeypatch.setattr(reading, "_LEAST_SECONDS", 0.0)
    for missing in (set(), {pages - 1}, {0}):
        slow = Rank(pages, missing)
        assert max(slow.batches) == step
        assert len(slow.reports) == len(quick.reports)
    back = BackRank(pages)
    assert (quick_back.batches < back.batches) == (back.batches > 2)  # the first read is a step
    for report, other in zip(quick_back.reports, back.reports, strict=True):
        least = torch.tensor([-other.start, other.end])
        report.reduce(lambda pages, op, least=least: pages.copy_(pages.minimum(least)))
    assert quick_back.heard() == pages


@pytest.mark.parametrize("most_steps", [4], indirect=True)
def test_a_quick_disk_does_not_seem_slow_by_small_last_reads(monkeypatch: MonkeyPatch) -> None:
    clock, sizes = SimpleNamespace(now=0.0), list[int]()
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def read(operation: Any, keys: list[str], host_indices: torch.Tensor, info: Any) -> int:
        sizes.append(len(keys))
        clock.now += 5e-3 + 3e-4 * len(keys)  # each read costs something besides
        return len(keys)

    operation: Any = Operation(16, SIZE)
    reads = BatchedReads(SIZE, L3Progress())
    prefetch = as_prefetch_read(operation, SIZE, read, lambda report: None, from_back=False)
    for _ in range(8):
        sizes.clear()
        assert reads.transfer(prefetch) == 16
    assert sizes == [16]


@pytest.mark.parametrize("pages", [1, 5, 129, 1000])
@pytest.mark.parametrize("front", [0, 1, 1000])
def test_from_the_back_every_page_is_read_or_recomputed(pages: int, front: int) -> None:
    rank = BackRank(pages, front)
    assert len(rank.reports) == -(-pages // batch_pages(pages))
    assert sorted(rank.read_pages) == list(range(rank.meeting.front, pages))
    assert bool(rank.meeting.front) == bool(front and pages > READS * batch_pages(pages))
    assert rank.heard() == pages


def test_a_report_does_not_change_what_hicache_has_dealt_with() -> None:
    assert BackRank(40).heard(running=False) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("pages", [1, 33, 129, 1000])
def test_from_the_back_parts_reach_to_where_the_front_will_be(pages: int, share: float) -> None:
    rank, most = BackRank(pages, share=share), batch_pages(pages)
    assert len(rank.reports) == -(-pages // most)
    assert sorted(rank.read_pages) == list(range(pages))
    left, at = pages, 0
    # A last page that the front would reach sooner was waited for as long as reading takes.
    assert rank.paused >= (2**-10 if share <= 0.5 else 0.0)
    while left:  # what stays unread when the front has done its share of it is the front's
        part = max(1, min(most - at % most, int(share * left)))
        assert rank.read_pages[at : at + part] == list(range(left - part, left))
        left, at = left - part, at + part


def test_a_trial_reads_a_page_although_the_front_would_have_it_sooner() -> None:
    waited: list[float] = []
    meeting, reports, got = Meeting(), list[Any](), list[list[str]]()
    operation = Stopped(4, lambda: len(waited) == 3)
    reads = BatchedReads(SIZE, waiting(waited.append))

    def read(operation: Any, keys: list[str], indices: torch.Tensor, info: Any) -> int:
        got.append(keys)
        return len(keys)

    prefetch = as_prefetch_read(operation, SIZE, read, reports.append, from_back=True)
    reads.transfer(prefetch, meeting, lambda *_, longest: (0.0, 1e9), trial=True)
    assert got == [operation.hash_value[-1:]] and len(waited) == 3
    assert [(report.start, report.end) for report in reports] == [(3, 4)]


def test_from_the_back_who_waits_for_the_front_says_so_and_ends_with_the_prefetch() -> None:
    """Else nothing would come, L3 would seem not to answer, and a flush would wait in vain."""
    waited: list[float] = []
    meeting, reports = Meeting(), list[Any]()
    operation = Stopped(4, lambda: len(waited) == 3)
    reads = BatchedReads(SIZE, waiting(waited.append))
    read: Any = None  # nothing is read
    prefetch = as_prefetch_read(operation, SIZE, read, reports.append, from_back=True)
    reads.transfer(prefetch, meeting, lambda *_, longest: (0.0, 1e9))
    assert len(waited) == 3 and all(0 < seconds < 60 for seconds in waited)
    assert [(report.start, report.end) for report in reports] == [(4, 4)]
