"""How fast servers bring histories back, by workloads that SGLang's own benchmark does not have.

``python -m sglang.benchmark.serving`` has multi-turn conversations, files of ShareGPT and traces of
agents. This program has the workloads of the HCache paper (figures 9, 10 and 15): conversations
with the statistics of ShareGPT4, long contexts of L-Eval, and contexts by Zipf's law. With
--flush-between-rounds every history comes from L3. Against a running server (--url), or a server of
each method: time to first token, time between tokens, and the tiers of hits.
"""

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from bench.harness.client import Reply, RequestError, StreamingClient, UnusableServer
from bench.harness.methods import METHODS, PAGE_SIZE, SERVED, server_options
from bench.harness.models import TinyLlama
from bench.harness.options import ADMIN_KEY
from bench.harness.program import MODEL, Program, Run, Setting, at_least, names, scratch, several
from bench.harness.report import Column, Picture, Results, Row, Series, Table
from bench.harness.server import Server
from bench.workload.base import Turn, Workload, WorkloadError
from bench.workload.paper import leval, sharegpt4, zipf_contexts

SHAPE = TinyLlama(layers=4, hidden=512, heads=4, kv_heads=4, intermediate=1408)
VOCABULARY = 1000  # random tokens are below it
PARALLEL = 128  # requests in flight at most, if neither option nor workload says
WORKLOADS = ("sharegpt4", "leval", "zipf")
TIERS = ("device", "host", "storage")


@dataclass(frozen=True)
class Pace:
    """When requests are sent.

    Attributes:
        rate: Sessions that begin per second; infinite: all at once.
        max_parallel: Requests in flight at most.
        flush: A round begins when all sessions have ended the one before it, and the caches of
            device and host are emptied before it.
        seed: Draws times.
    """

    rate: float
    max_parallel: int = PARALLEL
    flush: bool = False
    seed: int = 1


class Request(NamedTuple):
    """One request of a run; a failed one has ``error`` and no reply."""

    session: int
    round: int
    reply: Reply | None
    error: str | None = None


@dataclass
class _Talk:
    """A session: its history, and whether there is a ``round`` to ask; None: it has ended."""

    place: int
    turns: Sequence[Turn]
    history: list[int]
    round: int | None = 0


class Conversations:
    """Asks everything of a workload once; a request that fails is recorded, and ends its session.

    Runs on one server have different numbers, and ask different questions.
    """

    def __init__(
        self, client: StreamingClient, workload: Workload, pace: Pace, number: int = 0
    ) -> None:
        self._client, self._workload, self._pace, self._number = client, workload, pace, number
        self._chance = random.Random(f"{pace.seed}/{number}")
        self._gate = asyncio.Semaphore(pace.max_parallel)
        self._ended: list[Request] = []

    async def run(self) -> tuple[Sequence[Request], float]:
        """Requests in the order of their ends, and the seconds until the last end.

        Raises:
            UnusableServer: The caches could not be flushed between rounds.
        """
        start, workload = time.perf_counter(), self._workload
        left = [
            _Talk(place, session.turns, workload.document_ids(session.document, VOCABULARY))
            for place, session in enumerate(workload.sessions)
        ]
        async with asyncio.TaskGroup() as tasks:
            for talk in left:
                if talk.place and math.isfinite(self._pace.rate):
                    await asyncio.sleep(self._chance.expovariate(self._pace.rate))
                tasks.create_task(self._ask(talk) if self._pace.flush else self._go_on(talk))
        while left := [talk for talk in left if talk.round is not None]:
            await self._client.flush()
            await asyncio.sleep(workload.interval_s)
            await asyncio.gather(*map(self._ask, left))
        return self._ended, self._last_end - start

    async def _go_on(self, talk: _Talk) -> None:
        await self._ask(talk)
        while talk.round is not None:
            await asyncio.sleep(self._workload.interval_s)
            await self._ask(talk)

    async def _ask(self, talk: _Talk) -> None:
        assert talk.round is not None
        place, number = talk.place, talk.round
        talk.history += self._workload.prompt_ids(place, number, VOCABULARY, self._number)
        talk.round = None
        try:
            async with self._gate:
                reply = await self._client.generate(talk.history, talk.turns[number].output)
        except RequestError as error:
            self._ended.append(Request(place, number, None, str(error)))
        else:
            self._ended.append(Request(place, number, reply))
            talk.history += reply.output_ids
            talk.round = number + 1 if number + 1 < len(talk.turns) else None
        self._last_end = time.perf_counter()


async def prefill(client: StreamingClient, workload: Workload, max_parallel: int) -> None:
    """Give the server every document that is asked about, so that it stores their pages.

    Raises:
        RequestError: The server refused one.
    """
    gate = asyncio.Semaphore(max_parallel)

    async def one(document: int) -> None:
        async with gate:
            await client.generate(workload.document_ids(document, VOCABULARY), 1)

    asked = {session.document for session in workload.sessions}
    await asyncio.gather(*map(one, sorted(place for place in asked if place is not None)))


def check_length(workload: Workload, server: Mapping[str, Any]) -> None:
    """Raise an UnusableServer if the server would refuse the longest request."""
    most = server.get("max_req_input_len")
    if isinstance(most, int) and workload.longest >= most:
        raise UnusableServer(
            f"workload {workload.name} has a history of {workload.longest:,} tokens and the server "
            f"takes fewer than {most:,}: give --scale {0.95 * most / workload.longest:.2g}"
        )


async def ask(
    url: str, key: str | None, workload: Workload, rates: Sequence[float], pace: Pace
) -> list[Row]:
    """A row for each rate.

    Raises:
        UnusableServer: The server cannot be reached or flushed, takes no request that long, or
            refused a document.
    """
    rows: list[Row] = []
    async with StreamingClient(url, key) as client:
        check_length(workload, await client.server())
        try:
            await prefill(client, workload, pace.max_parallel)
        except RequestError as error:
            raise UnusableServer(f"a document could not be prefilled: {error}") from None
        for number, rate in enumerate(rates):
            await client.flush()
            asked = Conversations(client, workload, replace(pace, rate=rate), number)
            requests, seconds = await asked.run()
            offered = rate if math.isfinite(rate) else "inf"  # JSON has no infinity
            rows.append({"rate": offered, **summary(requests, seconds)})
            print(f"{rate:g} a second: {len(requests)} requests, {seconds:.0f} s", flush=True)
    return rows


def summary(requests: Sequence[Request], seconds: float) -> Row:
    """Times in milliseconds, and hits as shares of all prompt tokens.

    ``between_ms`` is the paper's time between tokens: the mean of a request's. Tiers are None if
    the server does not say them.
    """
    good = [request.reply for request in requests if request.reply is not None]
    errors = [request.error for request in requests if request.error is not None]
    first = sorted(1e3 * reply.ttft_s for reply in good)
    between = [1e3 * fmean(reply.gaps_s) for reply in good if reply.gaps_s]
    prompts = max(1, sum(reply.prompt_tokens for reply in good))
    cached = [reply.cached for reply in good]
    split = not any(each.unsplit for each in cached)
    return {
        "requests": len(good),
        "failed": len(errors),
        "errors": sorted(set(errors)),
        "per_second": len(good) / max(seconds, 1e-9),
        "first_ms": median(first) if first else None,
        "first_p90_ms": first[min(int(0.9 * len(first)), len(first) - 1)] if first else None,
        "between_ms": fmean(between) if between else None,
        "cached": sum(each.total for each in cached) / prompts,
        "tiers": {
            tier: sum(getattr(each, tier) for each in cached) / prompts if split else None
            for tier in TIERS
        },
    }


def workload_of(given: Any) -> Workload:
    """The workload of these options.

    Raises:
        WorkloadError: A value is out of its range.
    """
    shape = (given.num_clients, given.seed)
    if given.workload == "sharegpt4":
        made = sharegpt4(*shape)
    elif given.workload == "leval":
        made = leval(*shape)
    else:
        made = zipf_contexts(*shape, given.zipf_skew)
    if not 0 < given.scale < math.inf:
        raise WorkloadError(f"--scale {given.scale:g}: must be a number above 0")
    return made.scaled(given.scale, given.max_rounds)


def pool_of(workload: Workload, given: int | None, method: str) -> int:
    """Tokens of the device's pool: an eighth of all histories, so that most have to leave it, and
    more than the longest. The ideal method has room for all."""
    histories = sum(map(workload.history, workload.sessions))
    longest = workload.longest + PAGE_SIZE
    tokens = given or max(histories / 8, 1.25 * longest)
    if method == "ideal":
        tokens = max(histories + longest, 2 * longest)
    return math.ceil(tokens / PAGE_SIZE) * PAGE_SIZE


def measure(run: Run) -> Results:
    given, workload = run.given, workload_of(run.given)
    parallel = given.max_parallel or workload.max_parallel or PARALLEL
    pace = Pace(given.rates[0], parallel, given.flush_between_rounds, given.seed)
    rows: list[Row] = []
    if given.url is not None:
        if not given.url.startswith(("http://", "https://")):
            raise UnusableServer(f"--url {given.url}: must be http://HOST:PORT")
        found = asyncio.run(ask(given.url, given.api_key, workload, given.rates, pace))
        rows = [{"method": "the server", **row} for row in found]
        return {"device": given.url, "workload": workload.describe(), "rows": rows}
    with scratch() as folder:
        for name in given.methods:
            method = METHODS[name]
            print(f"{method.title}: starting", flush=True)
            model = given.model_path or SHAPE.build(Path(folder))
            pool = pool_of(workload, given.pool_tokens, name)
            options = server_options(
                *(method, run.machine, model, Path(folder) / name),
                pool_tokens=pool,
                hicache_ratio=1.25,
                extra_args=given.server_args,
            )
            with Server(options) as server:
                found = asyncio.run(ask(server.url, ADMIN_KEY, workload, given.rates, pace))
            rows += [{"method": method.title, **row} for row in found]
    return {"workload": workload.describe(), "rows": rows}


def tiers(row: Row) -> str:
    return " / ".join("?" if s is None else f"{100 * s:.0f}" for s in row["tiers"].values())


def panels(results: Results) -> Mapping[str, Sequence[Row]]:
    return {
        title: [
            {"rate": str(rate)}
            | {row["method"]: row[key] for row in results["rows"] if row["rate"] == rate}
            for rate in dict.fromkeys(row["rate"] for row in results["rows"])
        ]
        for title, key in (("median", "first_ms"), ("90%", "first_p90_ms"))
    }


def series(results: Results) -> list[Series]:
    colours = ("ours", "file", "computed", "nixl", "ours, all read", "exp4", "int8", "fp8", "pairs")
    methods = dict.fromkeys(row["method"] for row in results["rows"])
    return [Series(name, name, colour) for name, colour in zip(methods, colours, strict=False)]


PROGRAM = Program(
    name="multiturn",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--url", str, None, "http://HOST:PORT of a running server"),
        Setting("--api-key", str, None, "its (admin) API key; default: $HCACHE_API_KEY"),
        Setting("--methods", names(SERVED), "hcache-eager", "whose servers are started otherwise"),
        Setting("--pool-tokens", at_least(256), None, "of the device; default: an eighth of all"),
        *MODEL,
        Setting("--workload", str, "sharegpt4", "of the paper", {"choices": WORKLOADS}),
        Setting("--num-clients", at_least(1), 8, "sessions"),
        Setting("--zipf-skew", float, 1.0, "0: all documents alike, 2: few favourites (zipf)"),
        Setting("--max-rounds", at_least(1), None, "of a client"),
        Setting("--scale", float, 1.0, "multiplies all lengths and intervals"),
        several("--rates", float, [1.0], "sessions that begin per second; or inf"),
        Setting("--max-parallel", at_least(1), None, "requests in flight; leval and zipf: 1"),
        Setting(
            "--flush-between-rounds",
            None,
            False,
            "empty device and host caches: histories come from L3",
        ),
        Setting("--seed", at_least(0), 1, "of lengths, tokens and times"),
    ),
    tables=Table(
        "rows",
        (
            "method | offered per second = rate :g | done = per_second | failed | "
            "first token, ms = first_ms :,.0f | 90% = first_p90_ms :,.0f | "
            "between tokens, ms = between_ms :,.1f | "
            "prompt tokens from a cache = cached :.0%",
            Column("% device / host / storage", tiers),
        ),
    ),
    draw=Picture(
        title=lambda results: f"Time to the first token, workload {results['workload']['name']}",
        panels=panels,
        x="rate",
        x_label="offered per second",
        y_label="time to the first token, ms",
        series=series,
    ),
    wrong=lambda results: [error for row in results["rows"] for error in row["errors"]],
)

if __name__ == "__main__":
    PROGRAM.run()
