"""Rows of hidden states that do not fit on one rank: all keep K and V of their pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch

from tests.engine.in_process.encoded_kv.host import LAYERS, PAGE, Ack, Transferred, whole
from tests.engine.in_process.encoded_kv.test_rows import Rows

RANKS = 2
SECONDS = 60
"""After so long a rank is alone in a collective."""


class Ranks:
    """Ranks with rows and heads of their own, and what HiCache does with the ends of backups.

    Attributes:
        asked: What each rank has said of the pages of each backup.
    """

    def __init__(self, *room: int) -> None:
        self.servers = [Rows(rows) for rows in room]
        self.asked = [list[list[bool]]() for _ in room]
        self.queues = [list[Ack]() for _ in room]
        self._barrier = Barrier(RANKS, timeout=SECONDS)
        for rank, server in enumerate(self.servers):
            server.overflow.agree = partial(self._agree, rank)

    def _agree(self, rank: int, fit: Sequence[bool]) -> list[bool]:
        """The collective: it ends when all ranks are in it, for the same backup."""
        self.asked[rank].append([*fit])
        self._barrier.wait()
        every = [asked[-1] for asked in self.asked]
        assert len({len(asked) for asked in self.asked}) == len({*map(len, every)}) == 1
        self._barrier.wait()
        return [all(said) for said in zip(*every, strict=True)]

    def forward(self, *pages: int, unfit: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """As :meth:`Rows.forward`, with the ``unfit`` pages of each rank."""
        both = zip(self.servers, unfit, strict=True)
        return [server.forward(*pages, unfit=own) for server, own in both]

    def launch(self, *pages: int) -> tuple[torch.Tensor, list[Transferred]]:
        """Backups to the same pages of all ranks, and their transfers."""
        launched = [server.launch(*pages) for server in self.servers]
        hosts, transfers, acks = zip(*launched, strict=True)
        assert all(torch.equal(host, hosts[0]) for host in hosts)
        for queue, added in zip(self.queues, acks, strict=True):
            queue.extend(added)
        return hosts[0], list(transfers)

    def turn(self) -> list[int]:
        """What SGLang does in each turn, ``writing_check``; nodes whose backup has ended."""
        ready = [
            next((at for at, ack in enumerate(queue) if not ack.finish_event.query()), len(queue))
            for queue in self.queues
        ]
        return self._end(min(ready))

    def wait(self) -> list[int]:
        """The same where tokens are evicted by ``write_back``."""
        return self._end(len(self.queues[0]))

    def _end(self, acks: int) -> list[int]:
        def end(queue: list[Ack]) -> list[int]:
            ended = list[int]()
            for _ in range(acks):
                ack = queue.pop(0)
                ack.finish_event.synchronize()
                ended += ack.node_ids
            return ended

        with ThreadPoolExecutor(RANKS) as pool:
            first, *others = pool.map(end, self.queues)
        assert all(ended == first for ended in others)
        return first

    def kept(self, host: torch.Tensor) -> list[list[bool]]:
        """Which of some pages each rank has in its overflow."""
        areas = [(s.overflow, s.pool.page_ids(host).tolist()) for s in self.servers]
        return [[len(area.kept(page)) == LAYERS for page in pages] for area, pages in areas]

    def whole(self, host: torch.Tensor) -> list[bool]:
        """Which ranks say that the pages can be loaded; a load is made where all do."""
        return [whole(s.overflow, s.pool.page_ids(host)) for s in self.servers]

    def load(self, host: torch.Tensor, *pages: int) -> list[torch.Tensor]:
        """Load what was backed up; what was there is gone, and unfit pages mean nothing."""
        for server, kept in zip(self.servers, self.kept(host), strict=True):
            for buffer in (*server.device.k_buffer, *server.device.v_buffer):
                buffer.zero_()
            arena, layout = server.pool.arena, server.pool.page_layout
            unfit = arena.physical(server.pool.page_ids(host)[kept])
            server.pool.kv_buffer[unfit, layout.header_bytes :] = 0xA5
        return [server.load(host, *pages) for server in self.servers]


def test_what_does_not_fit_on_one_rank_is_kept_on_all() -> None:
    """Of three pages one does not fit on the first rank, and another one on the second."""
    ranks = Ranks(4, 4)
    wanted = ranks.forward(1, 2, 3, unfit=[[2], [1]])
    host, _ = ranks.launch(1, 2, 3)
    assert ranks.wait() == [0]
    assert ranks.asked == [[[True, False, True]], [[False, True, True]]]
    assert ranks.kept(host) == RANKS * [[True, True, False]]
    assert all(map(torch.equal, ranks.load(host, 6, 5, 4), wanted))


def test_ranks_agree_in_the_turn_in_which_all_know_and_a_backup_ends_behind_that() -> None:
    ranks = Ranks(4, 4)
    ranks.forward(1, 2, unfit=[[2], []])
    host, (first, second) = ranks.launch(1, 2)
    first.done = True
    area = ranks.servers[1].overflow
    fit, area.rows_fit = area.rows_fit, lambda pages: None
    for _ in range(2):
        assert ranks.turn() == [] and ranks.asked == [[], []]
        second.done = True  # then it is not known yet which rows fit
    area.rows_fit = fit
    assert ranks.whole(host) == [False, False]
    assert ranks.turn() == [] and ranks.asked == [[[True, False]], [[True, True]]]
    assert ranks.whole(host) == [False, False]  # what was launched then is on its way
    assert ranks.turn() == [0] and ranks.whole(host) == [True, True]
    assert [len(asked) for asked in ranks.asked] == [1, 1]


def test_a_rank_without_room_keeps_nothing_and_enters_every_collective() -> None:
    ranks = Ranks(8, 1)
    room = ranks.servers[1].overflow.pages.rows // LAYERS
    assert 0 < room < 4
    wanted = ranks.forward(1, 2, 3, 4, unfit=[[1, 2, 3, 4], []])
    hosts = [ranks.launch(page)[0] for page in (1, 2, 3, 4)]
    assert ranks.wait() == [0, 0, 0, 0]
    found = [ranks.whole(host) for host in hosts]
    assert found == room * [[True, True]] + (4 - room) * [[True, False]]
    for host, *want in zip(hosts[:room], *(w.split(PAGE, 1) for w in wanted), strict=False):
        assert all(map(torch.equal, ranks.load(host, 6), want))


def test_where_a_rank_knows_nothing_at_a_backup_that_is_waited_for_all_keep_it() -> None:
    ranks = Ranks(4, 4)
    wanted = ranks.forward(1, 2, unfit=[[], []])
    host, _ = ranks.launch(1, 2)
    ranks.servers[1].overflow.rows_fit = lambda pages: None
    assert ranks.wait() == [0] and ranks.kept(host) == RANKS * [[True, True]]
    assert all(map(torch.equal, ranks.load(host, 6, 5), wanted))


def test_a_rank_whose_capture_broke_enters_every_collective() -> None:
    """Nothing that it has is loaded (the header of its pages says so)."""
    ranks = Ranks(4, 4)
    ranks.forward(1, 2, unfit=[[2], []])
    ranks.launch(1, 2)
    broken = ranks.servers[1]
    broken.capture.ledger.give_up("a test")
    for transfer in (queue[-1].finish_event._finish for queue in ranks.queues):
        transfer.done = True
    assert ranks.turn() == [] and ranks.turn() == [0]
    assert [len(asked) for asked in ranks.asked] == [1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_random_backups_of_two_ranks(seed: int) -> None:
    """Transfers end on one rank sooner than on the other, some are waited for, pages are freed
    before, and one rank has little room."""
    dice = random.Random(seed)
    ranks = Ranks(6, dice.choice((1, 6)))
    torch.manual_seed(seed)
    loaded = 0
    for _ in range(30):
        backups = []
        for pages in ((1, 2), (3,)):
            unfit = [[page for page in pages if dice.random() < 0.4] for _ in range(RANKS)]
            wanted = ranks.forward(*pages, unfit=unfit)
            host, transfers = ranks.launch(*pages)
            backups.append((host, wanted))
            if dice.random() < 0.3:
                ranks.turn()
            for transfer in transfers:
                transfer.done = dice.random() < 0.6
        for _ in range(dice.randrange(4)):
            ranks.turn()
        if dice.random() < 0.1:  # an aborted request, a flush
            for server in ranks.servers:
                server.pool.free(backups[-1][0])
            backups.pop()
        ranks.wait()
        for (host, wanted), to in zip(backups, ((5, 6), (7,)), strict=False):
            first, second = ranks.kept(host)
            if all(ranks.whole(host)):
                assert first == second
                assert all(map(torch.equal, ranks.load(host, *to), wanted))
                loaded += any(first)
            for server in ranks.servers:
                server.pool.free(host)
        assert [s.overflow.pages.rows_in_use for s in ranks.servers] == [0, 0]
        assert len({len(asked) for asked in ranks.asked}) == 1
    assert loaded > 5
