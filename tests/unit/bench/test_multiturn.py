"""What ``bench.multiturn`` sends when, to a client that takes notes; and what it counts."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from bench.harness.client import Reply, StreamingClient
from bench.harness.server import CachedTokens
from bench.multiturn import (
    PROGRAM,
    VOCABULARY,
    Conversations,
    Pace,
    Request,
    check_length,
    pool_of,
    prefill,
    summary,
    tiers,
)
from bench.workload.base import Session, Turn, Workload
from hcache_backend.cli.common import RequestError
from hcache_backend.cli.ingest import UnusableServer

AT_ONCE = Pace(rate=math.inf)


@dataclass
class Notes:
    """A client: every reply is as many times 7 as asked for.

    Attributes:
        refuse: Prompts of this length fail.
        seen: Prompts, and ``flush``, in the order in which they came.
        most: Requests that were in flight at once.
    """

    refuse: int | None = None
    flush_error: bool = False
    seen: list[Any] = field(default_factory=list)
    in_flight: int = 0
    most: int = 0

    async def generate(self, prompt: Sequence[int], output_tokens: int) -> Reply:
        self.seen.append(list(prompt))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(5):
            await asyncio.sleep(0)
        self.in_flight -= 1
        if len(prompt) == self.refuse:
            raise RequestError("refused")
        return Reply([7] * output_tokens, len(prompt), CachedTokens(), 0.1, 0.2, [0.1])

    async def flush(self) -> None:
        assert not self.in_flight
        if self.flush_error:
            raise UnusableServer("not idle")
        self.seen.append("flush")


def ask(
    notes: Notes, workload: Workload, pace: Pace = AT_ONCE, number: int = 0
) -> Sequence[Request]:
    client = cast(StreamingClient, notes)
    return asyncio.run(Conversations(client, workload, pace, number).run())[0]


def flat(lengths: Sequence[Sequence[int]], **options: Any) -> Workload:
    """Sessions with questions of these lengths and replies of two tokens."""
    return Workload(
        "test", tuple(Session(tuple(Turn(n, 2) for n in session)) for session in lengths), **options
    )


def test_each_round_sends_the_whole_history() -> None:
    notes, workload = Notes(), flat([[3, 4, 5]])
    result = ask(notes, workload)
    first, second, third = notes.seen
    assert first == workload.prompt_ids(0, 0, VOCABULARY)
    assert second == [*first, 7, 7, *workload.prompt_ids(0, 1, VOCABULARY)]
    assert third == [*second, 7, 7, *workload.prompt_ids(0, 2, VOCABULARY)]
    assert [(r.session, r.round) for r in result] == [(0, 0), (0, 1), (0, 2)]


def test_no_more_are_in_flight_than_allowed() -> None:
    workload = flat([[3, 3]] * 20)
    notes = Notes()
    result = ask(notes, workload, Pace(rate=math.inf, max_parallel=4))
    assert notes.most == 4
    assert len(result) == 40


def rounds_of(notes: Notes, workload: Workload) -> list[Any]:
    """For everything that came: the round it was of, or ``flush``."""
    first = workload.sessions[0].turns[0].prompt
    step = workload.sessions[0].turns[0].output + workload.sessions[0].turns[1].prompt
    return [seen if seen == "flush" else (len(seen) - first) // step for seen in notes.seen]


def test_a_barrier_ends_a_round_before_the_next_and_flushes_between() -> None:
    workload = flat([[3, 3, 3]] * 4)
    notes = Notes()
    ask(notes, workload, Pace(rate=math.inf, flush=True))
    assert rounds_of(notes, workload) == [0] * 4 + ["flush"] + [1] * 4 + ["flush"] + [2] * 4


def test_a_barrier_does_not_wait_for_sessions_that_have_ended_or_failed() -> None:
    workload = flat([[3, 3, 3], [3], [5, 3, 3]])
    notes = Notes(refuse=5)
    result = ask(notes, workload, Pace(rate=math.inf, flush=True))
    assert [len(seen) for seen in notes.seen[3:] if seen != "flush"] == [8, 13]
    assert [(r.session, r.round, r.error) for r in result if r.error] == [(2, 0, "refused")]
    assert [r.round for r in result if r.session == 0] == [0, 1, 2]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of every sleep, none of which takes any time."""
    seconds_slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        seconds_slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return seconds_slept


def test_sessions_begin_at_the_rate(waited: list[float]) -> None:
    workload = flat([[3]] * 2000)
    ask(Notes(), workload, Pace(rate=4.0))
    gaps = [seconds for seconds in waited if seconds]
    assert len(gaps) == 1999
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.05)
    squares = sum(gap**2 for gap in gaps) / len(gaps)
    assert squares == pytest.approx(2 * 0.25**2, rel=0.15)  # of an exponential variable


def test_documents_that_are_asked_about_are_prefilled_once() -> None:
    sessions = tuple(Session((Turn(3, 1),), document=place) for place in (2, 0, 2))
    workload = Workload("test", sessions, (10, 20, 30))
    notes = Notes()
    asyncio.run(prefill(cast(StreamingClient, notes), workload, 2))
    assert sorted(map(len, notes.seen)) == [10, 30]
    with pytest.raises(RequestError, match="refused"):
        asyncio.run(prefill(cast(StreamingClient, Notes(refuse=10)), workload, 2))


REPLIES = [
    Reply([1, 2, 3], 100, CachedTokens(), 0.1, 0.3, [0.1, 0.1]),
    Reply([1, 2, 3], 200, CachedTokens(20, 40, 80), 0.3, 0.9, [0.2, 0.4]),
]


def test_a_row_counts_what_succeeded_and_says_why_others_failed() -> None:
    requests = [*(Request(0, n, reply) for n, reply in enumerate(REPLIES))]
    found = summary([*requests, Request(1, 0, None, "refused")], 2.0)
    assert (found["requests"], found["failed"], found["errors"]) == (2, 1, ["refused"])
    assert found["first_ms"] == pytest.approx(200) and found["first_p90_ms"] == pytest.approx(300)
    assert found["between_ms"] == pytest.approx(1e3 * (0.1 + 0.3) / 2)  # the paper's
    assert found["per_second"] == 1 and found["cached"] == pytest.approx(140 / 300)
    assert tiers(found) == "7 / 13 / 27"
    row = {"method": "ours", "rate": 1.0, **found}
    assert PROGRAM.table({"rows": [row]}).splitlines()[-1] == (
        "| ours | 1 | 1.00 | 1 | 200 | 300 | 200.0 | 47% | 7 / 13 / 27 |"
    )
    assert PROGRAM.wrong({"rows": [row]}) == ["refused"]


def test_a_workload_that_the_server_would_refuse_is_refused_before() -> None:
    workload = Workload("test", (Session((Turn(90, 10),)),))
    check_length(workload, {"max_req_input_len": 101})
    check_length(workload, {})
    wrong = r"100 tokens .* fewer than 100: give --scale 0.95"
    with pytest.raises(UnusableServer, match=wrong):
        check_length(workload, {"max_req_input_len": 100})


def test_the_ideal_pool_holds_all_histories_and_others_an_eighth() -> None:
    workload = flat([[998]] * 80)
    assert pool_of(workload, None, "ideal") >= 80 * 1000 + 1000
    assert pool_of(workload, None, "file") == -(-80 * 1000 // 8 // 64) * 64
    assert pool_of(workload, 300, "file") == 320
