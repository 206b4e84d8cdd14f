"""Runs a workload against a server: the part that ``hcache bench``'s commands share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.progress import Progress

from hcache_backend.benchmark.client import BenchError, Client
from hcache_backend.benchmark.driver import Pace, Record, RunResult, prefill, run
from hcache_backend.benchmark.summary import by_round, errors, summarise
from hcache_backend.cli.bench_server import Method, launch, unwind_when_terminated
from hcache_backend.cli.machine import find_machine
from hcache_backend.cli.metrics_page import MetricsPage, NoMetrics, fetch
from hcache_backend.cli.serving import ServerProcess
from hcache_backend.cli.tiny_model import TinyLlama, build
from hcache_backend.workload.base import Workload
from hcache_backend.workload.statistics import describe

METRICS_LAG_S = 1.5
"""Counters of the page store are passed on once a second."""
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
        pace: Of all runs but for its rate.
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
    records: Sequence[Record]


@contextmanager
def own_server(
    method: Method, model: str | None, pool_tokens: int, extra: Sequence[str], folder: Path | None
) -> Iterator[ServerProcess]:
    """A server for the length of the block.

    Args:
        model: None: a tiny Llama with random weights.
        extra: More arguments of SGLang.
        folder: Where L3 and log stay; None: they go with the server.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: The server did not start.
    """
    unwind_when_terminated()
    machine = find_machine()
    with TemporaryDirectory(prefix="hcache-bench-") as scratch:
        place = folder or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        if model is None:
            shape = TinyLlama(positions=pool_tokens)
            model = str(build(shape, Path(scratch) / "model"))
        command, environment = launch(
            method, machine, model, place, pool_tokens=pool_tokens, extra=extra
        )
        with ServerProcess(command, environment, place / "server.log") as server:
            yield server


def measure(target: Target, plan: Plan, bar: Progress) -> list[Measured]:
    """Run a plan.

    Raises:
        BenchError: The server cannot be reached or flushed, or takes no request that long.
        RequestError: The server refused a document that is prefilled.
    """
    return asyncio.run(_measure(target, plan, bar))


async def _measure(target: Target, plan: Plan, bar: Progress) -> list[Measured]:
    async with Client(target.url, target.key) as client:
        server = await client.server()
        check_length(plan.workload, server)
        if plan.workload.prefilled:
            await _prefill(client, plan, bar)
        measured = []
        for number, rate in enumerate(plan.rates):
            if plan.flush:
                await client.flush()
            before = await metrics(target.url)
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
            after = await metrics(target.url)
            measured.append(_measured(plan, pace, result, server, before, after))
        return measured


async def _prefill(client: Client, plan: Plan, bar: Progress) -> None:
    """Give the documents to the server; the flush that follows waits until L3 has their pages."""
    documents = {session.document for session in plan.workload.sessions}
    task = bar.add_task("prefilling documents", total=len(documents))
    await prefill(
        client,
        plan.workload,
        plan.vocabulary,
        plan.pace.max_parallel,
        lambda: bar.advance(task),
    )
    if plan.flush:
        await client.flush()


def check_length(workload: Workload, server: Mapping[str, Any]) -> None:
    """Raise a BenchError if the server would refuse the longest request of the workload."""
    most = server.get("max_req_input_len")
    if isinstance(most, int) and workload.longest >= most:
        raise BenchError(
            f"workload {workload.name} has a history of {workload.longest:,} tokens and the server "
            f"takes fewer than {most:,}: give --max-context {most - 1}, or --scale "
            f"{0.95 * most / workload.longest:.2g}"
        )


async def metrics(url: str) -> MetricsPage | NoMetrics:
    """Our metrics, or why there are none."""
    try:
        return await asyncio.to_thread(fetch, url)
    except NoMetrics as error:
        return error


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
        "round": by_round(result.records),
        "l3": moved(before, after),
        "errors": dict(errors(result.records)),
        "workload": describe(plan.workload),
        "pace": {name: value for name, value in asdict(pace).items() if name != "rate"},
        "server": {name: server[name] for name in _SERVER_FACTS if name in server},
    }
    return Measured(parts, result.records)


def moved(before: MetricsPage | NoMetrics, after: MetricsPage | NoMetrics) -> dict[str, Any]:
    """Bytes that moved between two looks, by our metrics; ``missing`` says why there are none."""
    for page in (before, after):
        if isinstance(page, NoMetrics):
            return {"missing": str(page)}
    assert isinstance(before, MetricsPage)
    assert isinstance(after, MetricsPage)
    if not after.follows(before):
        return {"missing": "the server was started anew during the run"}

    def grown(counter: str, label: str) -> int:
        now, then = after.counters[counter], before.counters[counter]
        return int(now.get(label, 0.0) - then.get(label, 0.0))

    restored = [label for label in after.counters["bytes"] if label.startswith("restored")]
    dropped = [label for label in after.counters["store"] if label.startswith("pages_dropped")]
    return {
        "mode": after.mode,
        "bytes_read": grown("store", "bytes_read"),
        "bytes_written": grown("store", "bytes_written"),
        "bytes_restored": sum(grown("bytes", label) for label in restored),
        "pages_evicted": grown("store", "pages_evicted"),
        "pages_dropped": sum(grown("store", label) for label in dropped),
        "problems": sum(grown("problems", kind) for kind in after.counters["problems"]),
    }
