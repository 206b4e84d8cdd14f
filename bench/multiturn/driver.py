"""Sends the requests of a workload: when, in which order, how many at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.harness.client import Reply, StreamingClient
from bench.harness.server import CachedTokens
from bench.workload.base import Workload
from hcache_backend.cli.common import RequestError

_NOTHING = CachedTokens()
PARALLEL = 128
"""Requests in flight at most, where neither options nor workload say."""


@dataclass(frozen=True)
class Pace:
    """When requests are sent.

    Attributes:
        rate: Requests per second, or sessions where the workload says so; infinite: at once.
        distribution: Times between requests are exponential, or uniform from 0 to twice the mean.
        policy: Which request that is ready goes next: any, or the one that waits longest.
        max_parallel: Requests in flight at most.
        barrier: A round begins when all sessions have finished the one before it.
        flush: Device and host caches are emptied between rounds; needs ``barrier``.
        seed: What times and picks are drawn from.
    """

    rate: float = 1.0
    distribution: Literal["poisson", "uniform"] = "poisson"
    policy: Literal["random", "fifo"] = "random"
    max_parallel: int = PARALLEL
    barrier: bool = False
    flush: bool = False
    seed: int = 1


@dataclass(frozen=True)
class Request:
    """One request of a run.

    Attributes:
        sent_s: Since the run began.
        error: Why it failed, or None; the counts of a failed one are 0.
    """

    session: int
    round: int
    sent_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: CachedTokens = _NOTHING
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """A line of the file of all requests."""
        return {**asdict(self), "cached": self.cached._asdict()}


@dataclass(frozen=True)
class RunResult:
    """The requests of a run in the order in which they ended, and when the last one did."""

    requests: Sequence[Request]
    duration_s: float


async def prefill(
    client: StreamingClient,
    workload: Workload,
    vocabulary: int,
    max_parallel: int,
    done: Callable[[], None],
) -> int:
    """Give the server every document of the workload, so that it stores their pages.

    Args:
        done: Called after each document.

    Returns:
        Tokens of all documents.

    Raises:
        RequestError: The server refused one.
    """
    gate = asyncio.Semaphore(max_parallel)

    async def one(document: int) -> int:
        async with gate:
            reply = await client.generate(workload.document_ids(document, vocabulary), 1)
            done()
            return reply.prompt_tokens

    with _first_error():
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(one(document)) for document in workload.asked]
    return sum(task.result() for task in asked)


async def run(
    client: StreamingClient,
    workload: Workload,
    pace: Pace,
    vocabulary: int,
    number: int = 0,
    done: Callable[[int], None] = lambda requests: None,
) -> RunResult:
    """Ask everything once.

    A request that fails is recorded, and its session ends there.

    Args:
        vocabulary: Random tokens are below it.
        number: Number of this run of the workload on one server; other questions are asked in each.
        done: Called with the number of requests that came to an end.

    Raises:
        UnusableServer: The caches could not be flushed between rounds.
    """
    return await _Run(client, workload, pace, vocabulary, number, done).all()


class _Talk:
    """A session under way."""

    def __init__(self, place: int, history: list[int]) -> None:
        self.place = place
        self.round = 0
        self.history = history


class _Run:
    def __init__(
        self,
        client: StreamingClient,
        workload: Workload,
        pace: Pace,
        vocabulary: int,
        number: int,
        done: Callable[[int], None],
    ) -> None:
        self._client, self._workload, self._pace = client, workload, pace
        self._vocabulary, self._number, self._done = vocabulary, number, done
        self._times = random.Random(f"{pace.seed}/{number}/times")
        self._picks = random.Random(f"{pace.seed}/{number}/picks")
        self._talks = [
            _Talk(place, self._document(session.document))
            for place, session in enumerate(workload.sessions)
        ]
        self._ready: list[_Talk] = []
        self._held: list[_Talk] = []  # behind the barrier
        self._in_round = len(self._talks)
        self._in_flight = 0
        self._left = workload.requests
        self._ended: list[Request] = []
        self._changed = asyncio.Event()
        self._start = time.perf_counter()
        self._last_end_s = 0.0  # when the last request ended; the sender may wait beyond it

    async def all(self) -> RunResult:
        self._start = time.perf_counter()
        with _first_error():
            await self._send()
        return RunResult(self._ended, self._last_end_s)

    async def _send(self) -> None:
        by_session = self._workload.arrivals == "sessions"
        async with asyncio.TaskGroup() as tasks:
            if by_session:
                tasks.create_task(self._arrive())
            else:
                self._ready += self._talks
            while self._left:
                if not self._ready or self._in_flight >= self._pace.max_parallel:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                talk = self._ready.pop(self._pick())
                self._in_flight += 1
                tasks.create_task(self._ask(talk))
                if not by_session:
                    await asyncio.sleep(self._gap())

    async def _arrive(self) -> None:
        """Sessions come one after the other."""
        for place, talk in enumerate(self._talks):
            if place:
                await asyncio.sleep(self._gap())
            self._make_ready([talk])

    async def _ask(self, talk: _Talk) -> None:
        """One round of a session, then what follows from it."""
        session = self._workload.sessions[talk.place]
        turn = session.turns[talk.round]
        question = self._workload.prompt_ids(talk.place, talk.round, self._vocabulary, self._number)
        talk.history += question
        sent = time.perf_counter() - self._start
        left = len(session.turns) - talk.round
        try:
            reply = await self._client.generate(talk.history, turn.output)
        except RequestError as error:
            self._ended.append(Request(talk.place, talk.round, sent, error=str(error)))
            ended = left
        else:
            talk.history += reply.output_ids
            self._ended.append(_answered(talk, sent, reply))
            ended = 1
            talk.round += 1
        self._last_end_s = time.perf_counter() - self._start
        self._in_flight -= 1
        self._left -= ended
        self._done(ended)
        self._changed.set()
        if self._pace.barrier:
            await self._next_round(talk, more=ended < left)
        elif ended < left:
            await asyncio.sleep(self._workload.interval_s)
            self._make_ready([talk])

    async def _next_round(self, talk: _Talk, more: bool) -> None:
        """Hold a session until the others have ended the round too."""
        if more:
            self._held.append(talk)
        self._in_round -= 1
        if self._in_round or not self._held:
            return
        if self._pace.flush:
            await self._client.flush()
        await asyncio.sleep(self._workload.interval_s)
        held, self._held = self._held, []
        self._in_round = len(held)
        self._make_ready(held)

    def _make_ready(self, talks: Sequence[_Talk]) -> None:
        self._ready += talks
        self._changed.set()

    def _pick(self) -> int:
        return self._picks.randrange(len(self._ready)) if self._pace.policy == "random" else 0

    def _gap(self) -> float:
        """Seconds to the next request or session."""
        mean = 1 / self._pace.rate
        if not mean or self._pace.distribution == "uniform":
            return self._times.uniform(0, 2 * mean)
        return self._times.expovariate(1 / mean)

    def _document(self, document: int | None) -> list[int]:
        if document is None:
            return []
        return self._workload.document_ids(document, self._vocabulary)


def _answered(talk: _Talk, sent: float, reply: Reply) -> Request:
    return Request(
        session=talk.place,
        round=talk.round,
        sent_s=sent,
        prompt_tokens=reply.prompt_tokens,
        output_tokens=len(reply.output_ids),
        cached=reply.cached,
        ttft_s=reply.ttft_s,
        latency_s=reply.latency_s,
        gaps_s=tuple(reply.gaps_s),
    )


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise the first error of a group of tasks itself; the group has ended the others."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
