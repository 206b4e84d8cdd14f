"""The front and the back of a prefetch meet: every interleaving of readers, ranks and scheduler."""

import threading
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.reader import BatchedReads, batch_pages
from hcache_backend.sglang.reads import BackAck, apply_reports, as_prefetch_read
from tests.kit.prefetch import Operation

SIZE, MOST_PAGES = 2, 14
STEP = batch_pages(MOST_PAGES)


class Rank:
    """One rank's side of a prefetch, with the thread that reads it: it goes on when it is told to.

    It stops before it takes pages, and while it reads them.
    """

    def __init__(self, pages: int, lost: set[int]) -> None:
        self.operation, self.meeting = Operation(pages, SIZE), Meeting()
        self.operation.meeting = self.meeting
        self.lost = lost
        self.meeting.set_pages(pages)
        self.reading = range(0)
        self.read: set[int] = set()
        self.written: set[int] = set()  # whatever came of it
        self.reports: list[BackAck] = []
        self.done = False
        self._may_go_on, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._reader = threading.Thread(target=self._run, daemon=True)

    @property
    def waits(self) -> bool:
        """True if the reader would wait for the ranks: all unread pages are offered."""
        meeting = self.meeting
        return not self.done and 0 < meeting.unread <= meeting._offered

    def go_on(self) -> None:
        """The reader goes on to where it stops next."""
        if self.done:
            return
        if self._reader.ident is None:
            self._reader.start()
        else:
            self._may_go_on.release()
        self._stopped.acquire()

    def _run(self) -> None:
        report: Any = self.reports.append
        read = as_prefetch_read(self.operation, SIZE, self._read, report, from_back=True)
        BatchedReads(SIZE, L3Progress()).transfer(read, self.meeting, self._seconds_until_met)
        self.done = True
        self._stopped.release()

    def _stop(self) -> None:
        self._stopped.release()
        self._may_go_on.acquire()

    def _seconds_until_met(
        self, meeting: Meeting, prefix: int, *, longest: bool
    ) -> tuple[float, float]:
        self._stop()
        return 1.0, 1.0  # the front adds nothing

    def _read(self, operation: Any, keys: list[str], indices: torch.Tensor, info: Any) -> int:
        pages = range(int(keys[0]), int(keys[-1]) + 1)
        assert indices[::SIZE].tolist() == [page * SIZE for page in pages]
        self.reading = pages
        self.written.update(pages)
        self._stop()
        self.reading = range(0)
        got = next((i for i, page in enumerate(pages) if page in self.lost), len(pages))
        self.read.update(pages[:got])
        return got


def agree(reports: list[BackAck]) -> None:
    told: list[torch.Tensor] = []
    for report in reports:
        report.reduce(lambda pages, op: told.append(pages.clone()))
    smallest = torch.stack(told).amin(0)
    for report in reports:
        report.reduce(lambda pages, op: pages.copy_(smallest))


class Meetings(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(1, MOST_PAGES),
        lost=st.lists(st.sets(st.integers(0, 13), max_size=2), min_size=1, max_size=3),
    )
    def start(self, pages: int, lost: list[set[int]]) -> None:
        self.pages = pages
        self.ranks = [Rank(pages, each) for each in lost]
        self.ended = False
        self.launched: set[int] = set()
        self.drained = 0
        self.counted = 0
        self.offered: list[int] = []

    @rule(data=st.data())
    def a_reader_goes_on(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        if not rank.waits:
            rank.go_on()

    @precondition(lambda self: not self.failed and not self.offered)
    @rule(data=st.data())
    def offer_pages(self, data: st.DataObject) -> None:
        """Each tells its room before anybody has an answer, and readers go on meanwhile."""
        most = [data.draw(st.integers(0, 5)) for _ in self.ranks]
        self.offered = [r.meeting.offer(pages) for r, pages in zip(self.ranks, most, strict=True)]

    @precondition(lambda self: self.offered)
    @rule(fails=st.booleans())
    def recompute(self, fails: bool) -> None:
        agreed, self.offered = min(self.offered), []
        taken = [rank.meeting.take_offered(agreed) for rank in self.ranks]
        assert len(set(taken)) == 1
        if fails and taken[0] and len(self.ranks) == 1:  # with more the server stops
            self.failed = True
            assert not self.ranks[0].meeting.take_offered(self.ranks[0].meeting.offer(5))
            return
        for rank in self.ranks:
            if taken[0]:
                rank.meeting.front_launched(taken[0])
        self.launched.update(taken[0])

    failed = False

    @rule()
    def the_scheduler_hears(self) -> None:
        for number in range(self.drained, min(len(rank.reports) for rank in self.ranks)):
            reports = [rank.reports[number] for rank in self.ranks]
            agree(reports)
            for rank, report in zip(self.ranks, reports, strict=True):
                apply_reports([report], {rank.operation}, Operation.prefetches, SIZE)
                assert rank.operation.completed_tokens == rank.meeting.counted_pages * SIZE
            self.drained += 1

    @rule(ends=st.integers(0, 19))
    def it_is_terminated(self, ends: int) -> None:
        """Seldom. Each rank's reader sees it when it looks next."""
        if ends != 19:
            return
        self.ended = True
        for rank in self.ranks:
            rank.operation.terminated = True

    @invariant()
    def what_counts_is_there_and_nobody_writes_to_it(self) -> None:
        if not hasattr(self, "ranks"):
            return
        [counted] = {rank.meeting.counted_pages for rank in self.ranks}
        assert self.counted <= counted <= self.pages
        self.counted = counted
        for rank in self.ranks:
            assert not rank.written & self.launched, "read and recomputed"
            assert set(range(counted)) <= rank.read | self.launched
            assert not set(rank.reading) & set(range(counted)), "a thread writes there"
            assert set(rank.meeting.back) <= rank.read

    def teardown(self) -> None:
        """However it went: in the end the pages before the first one that is lost count."""
        if not hasattr(self, "ranks"):
            return
        if self.offered:
            self.recompute(False)
        for rank in self.ranks:
            while not rank.done:
                rank.go_on()
        assert {len(rank.reports) for rank in self.ranks} == {-(-self.pages // STEP)}
        self.the_scheduler_hears()
        self.what_counts_is_there_and_nobody_writes_to_it()
        lost = {page for rank in self.ranks for page in rank.lost & rank.written}
        if not self.failed and not self.ended:
            assert self.counted == min([self.pages, *lost])


def test_a_reader_goes_on_while_a_rank_stalls_before_it_agrees() -> None:
    """It leaves what is offered to the front, and waits only for these last pages."""
    meeting, last = Meeting(), list[range]()
    meeting.set_pages(10)
    assert meeting.offer(3) == 3
    assert [meeting.next_batch(4), meeting.next_batch(4)] == [range(6, 10), range(3, 6)]
    waits = threading.Thread(target=lambda: last.append(meeting.next_batch(4)), daemon=True)
    waits.start()
    waits.join(0.05)
    assert not last
    assert meeting.take_offered(2) == range(2)
    waits.join()
    assert last == [range(2, 3)] and not meeting.next_batch(1)


Meetings.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestMeetings = Meetings.TestCase
