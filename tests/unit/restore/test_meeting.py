"""The front and the back of a prefetch meet: every interleaving of readers, ranks and scheduler."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hcache_backend.restore.meeting import Meeting

STEP = 3
"""Pages of a batch."""


@dataclass
class Rank:
    """One rank's side of a prefetch, with the thread that reads it."""

    pages: int
    lost: set[int]
    meeting: Meeting = field(default_factory=Meeting)
    reading: range = range(0)
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)  # whatever came of it
    reports: list[tuple[int, int]] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.meeting.begin(self.pages)
        self.start = self.end = self.pages

    def begin_batch(self) -> None:
        self.reading = self.meeting.next_batch(STEP)
        self.done = not self.reading
        self.written.update(self.reading)

    def end_batch(self) -> None:
        """As ``hcache_backend/engine/read_batches.py``, which needs SGLang."""
        batch, self.reading = self.reading, range(0)
        got = next((i for i, page in enumerate(batch) if page in self.lost), len(batch))
        self.read.update(batch[:got])
        self.start, self.end = batch.start, self.end if got == len(batch) else batch.start + got
        self.reports.append((self.start, self.end))


class Meetings(RuleBasedStateMachine):
    """The ranks' schedulers are in step; their readers are not."""

    @initialize(
        pages=st.integers(1, 14),
        lost=st.lists(st.sets(st.integers(0, 13), max_size=2), min_size=1, max_size=3),
    )
    def start(self, pages: int, lost: list[set[int]]) -> None:
        self.pages = pages
        self.ranks = [Rank(pages, each) for each in lost]
        self.launched: set[int] = set()
        self.drained = 0
        self.counted = 0

    @rule(data=st.data())
    def a_reader_goes_on(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.reading:
            rank.end_batch()
        elif not rank.done:
            rank.begin_batch()

    @precondition(lambda self: not self.failed)
    @rule(most=st.integers(0, 5), fails=st.booleans())
    def recompute(self, most: int, fails: bool) -> None:
        rooms: list[int] = []
        for rank in self.ranks:  # each tells its room before anybody has an answer
            with rank.meeting._lock:
                assert rank.meeting._unread is not None
                rooms.append(rank.meeting._unread - rank.meeting._taken)

        taken = [rank.meeting.take(lambda _: min(most, *rooms)) for rank in self.ranks]
        assert len(set(taken)) == 1
        if fails and taken[0] and len(self.ranks) == 1:  # with more the server stops
            self.failed = True
            assert not self.ranks[0].meeting.take(lambda room: room)
            return
        for rank in self.ranks:
            if taken[0]:
                rank.meeting.launched(taken[0])
        self.launched.update(taken[0])

    failed = False

    @rule()
    def the_scheduler_hears(self) -> None:
        for number in range(self.drained, min(len(rank.reports) for rank in self.ranks)):
            start = max(rank.reports[number][0] for rank in self.ranks)
            end = min(rank.reports[number][1] for rank in self.ranks)
            for rank in self.ranks:
                rank.meeting.arrived(start, end)
            self.drained += 1

    @invariant()
    def what_counts_is_there_and_nobody_writes_to_it(self) -> None:
        if not hasattr(self, "ranks"):
            return
        [counted] = {rank.meeting.pages for rank in self.ranks}
        assert self.counted <= counted <= self.pages
        self.counted = counted
        for rank in self.ranks:
            assert not rank.written & self.launched, "read and recomputed"
            assert set(range(counted)) <= rank.read | self.launched
            assert not set(rank.reading) & set(range(counted)), "a thread writes there"
            assert set(rank.meeting.here) <= rank.read

    def teardown(self) -> None:
        """However it went: in the end the pages before the first one that is lost count."""
        if not hasattr(self, "ranks"):
            return
        for rank in self.ranks:
            while not rank.done:
                self.a_reader_ends(rank)
        # Where the front spared them, ranks report the same once more.
        most = max(len(rank.reports) for rank in self.ranks)
        for rank in self.ranks:
            rank.reports += [(rank.start, rank.end)] * (most - len(rank.reports))
        self.the_scheduler_hears()
        self.what_counts_is_there_and_nobody_writes_to_it()
        lost = {page for rank in self.ranks for page in rank.lost & rank.written}
        if not self.failed:
            assert self.counted == min([self.pages, *lost])

    def a_reader_ends(self, rank: Rank) -> None:
        if rank.reading:
            rank.end_batch()
        rank.begin_batch()


Meetings.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestMeetings = Meetings.TestCase


def test_a_reader_takes_nothing_while_ranks_agree_on_what_the_front_takes() -> None:
    meeting, tries = Meeting(), list[range]()
    meeting.begin(4)
    reader = threading.Thread(target=lambda: tries.append(meeting.next_batch(4)))

    def agree(room: int) -> int:
        reader.start()
        reader.join(0.05)
        assert not tries
        return room - 1

    assert meeting.take(agree) == range(3)
    reader.join()
    assert tries == [range(3, 4)]


def test_both_sides_may_say_how_many_pages_there_are() -> None:
    meeting = Meeting()
    meeting.begin(5)
    assert meeting.next_batch(3) == range(2, 5)
    meeting.begin(5)
    assert meeting.next_batch(3) == range(2)
    assert not meeting.next_batch(3) and not meeting.take(lambda room: room)
