"""Runs a workload against a server, at one rate after the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rich.progress import Progress

from bench.harness.client import StreamingClient
from bench.multiturn.driver import Pace, Request, RunResult, prefill, run
from bench.multiturn.summary import by_round, errors, summarise
from bench.workload.base import Workload
from hcache_backend.cli.common import RequestError
from hcache_backend.cli.ingest import UnusableServer
from hcache_backend.cli.metrics_page import METRICS_LAG_S, MetricsPage, NoMetrics, look, moved

_SERVER_FACTS = (
    *("model_path", "version", "page_size", "max_total_num_tokens", "max_req_input_len"),
    *("enable_hierarchical_cache", "hicache_storage_backend", "hicache_write_policy"),
)


class Target(NamedTuple):
    """A server that is up.

    Attributes:
        url: ``http://HOST:PORT``.
        key: Its bearer token, where it wants one.
    """

    url: str
    key: str | None = None


@dataclass(frozen=True)
class Plan:
    """What is run against a server.

    Attributes:
        rates: One run for each.
        pace: Pace of all runs; the rate is replaced.
        vocabulary: Random tokens are below it.
        flush: Device and host caches are emptied before each run.
    """

    workload: Workload
    rates: Sequence[float]
    pace: Pace
    vocabulary: int
    flush: bool = True


class Measured(NamedTuple):
    """One run: its line of the log file without time and tag, and its requests."""

    parts: dict[str, Any]
    requests: Sequence[Request]


def measure(target: Target, plan: Plan, bar: Progress) -> list[Measured]:
    """Run a plan.

    Raises:
        UnusableServer: The server cannot be reached or flushed, takes no request that long, or
            refused a document that is prefilled.
    """
    return asyncio.run(_measure(target, plan, bar))


async def _measure(target: Target, plan: Plan, bar: Progress) -> list[Measured]:
    async with StreamingClient(target.url, target.key) as client:
        server = await client.server()
        check_length(plan.workload, server)
        if plan.workload.prefilled:
            await _prefill(client, plan, bar)
        measured = []
        for number, rate in enumerate(plan.rates):
            if plan.flush:
                await client.flush()
            before = await asyncio.to_thread(look, target.url)
            pace = replace(plan.pace, rate=rate)
            task = bar.add_task(f"{rate:g} a second", total=plan.workload.requests)
            result = await run(
                client,
                plan.workload,
                pace,
                plan.vocabulary,
                number,
                lambda ended, task=task: bar.advance(task, ended),  # type: ignore[misc]
            )
            if isinstance(before, MetricsPage):
                await asyncio.sleep(METRICS_LAG_S)
            after = await asyncio.to_thread(look, target.url)
            measured.append(_measured(plan, pace, result, server, before, after))
        return measured


async def _prefill(client: StreamingClient, plan: Plan, bar: Progress) -> None:
    """Give the documents to the server; the flush that follows waits until L3 has their pages."""
    task = bar.add_task("prefilling documents", total=len(plan.workload.asked))
    try:
        await prefill(
            client,
            plan.workload,
            plan.vocabulary,
            plan.pace.max_parallel,
            lambda: bar.advance(task),
        )
    except RequestError as error:
        raise UnusableServer(f"a document could not be prefilled: {error}") from None
    if plan.flush:
        await client.flush()


def check_length(workload: Workload, server: Mapping[str, Any]) -> None:
    """Raise a UnusableServer if the server would refuse the longest request of the workload."""
    most = server.get("max_req_input_len")
    if isinstance(most, int) and workload.longest >= most:
        raise UnusableServer(
            f"workload {workload.name} has a history of {workload.longest:,} tokens and the server "
            f"takes fewer than {most:,}: give --max-context {most - 1}, or --scale "
            f"{0.95 * most / workload.longest:.2g}"
        )


def _measured(
    plan: Plan,
    pace: Pace,
    result: RunResult,
    server: Mapping[str, Any],
    before: MetricsPage | NoMetrics,
    after: MetricsPage | NoMetrics,
) -> Measured:
    # JSON has no infinity.
    rate = {"request_rate": "inf"} if math.isinf(pace.rate) else {}
    parts = {
        "summary": summarise(result, pace.rate) | rate,
        "round": by_round(result.requests),
        "l3": moved(before, after),
        "errors": dict(errors(result.requests)),
        "workload": plan.workload.describe(),
        "pace": {name: value for name, value in asdict(pace).items() if name != "rate"},
        "server": {name: server[name] for name in _SERVER_FACTS if name in server},
    }
    return Measured(parts, result.requests)
