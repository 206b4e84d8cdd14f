"""A server's ``/metrics`` page, and ``hcache top``: a live view of such pages."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from typer import Argument, Option

from hcache_backend import metrics
from hcache_backend.cli import common
from hcache_backend.cli.common import SERVER, Failure, RequestError, ask, screen, table

TIMEOUT_SECONDS = 5.0
PROMPT = ("sglang:prefill_effective_tokens_total", "mode")  # prompt tokens by their source

LINES = {
    "prompt tokens computed": "prompt input",
    "  found on the device": "prompt device_hit",
    "  found in host memory": "prompt host_hit",
    "  found in L3": "prompt storage_hit",
    "tokens captured": "tokens captured",
    "tokens backed up to host memory": "tokens backed_up",
    "tokens not encodable": "tokens not_encodable",
    "tokens restored to the device": "tokens restored",
    "tokens looked for in L3, found": "l3_tokens found",
    "  and read": "l3_tokens hit",
    "  and recomputed": "l3_tokens recomputed",
    "  and not readable": "l3_tokens unreadable",
    "  and refused": "l3_tokens slower ended",
    "  absent": "l3_tokens absent other_pool",
    "  while L3 was off": "l3_tokens suspended",
    "bytes read from L3": "store bytes_read",
    "pages of L3 damaged or unreadable": "store bad_pages read_errors",
    "bytes written to L3": "store bytes_written",
    "pages L3 dropped": "store pages_dropped_full pages_dropped_late pages_dropped_offline",
    "pages L3 evicted": "store pages_evicted",
    "pages read from the shared L3": "shared read",
    "  not readable or damaged": "shared missed",
    "  not asked for, no response": "shared not_asked",
    "pages written to the shared L3": "shared written",
    "  not written": "shared dropped_full write_failed",
}
"""Lines of a server's table: a table of counters and the events that are summed; 0 is not shown."""
_RATES = {
    "l3_read": "L3 is read",
    "shared_read": "the shared L3",
    "load": "loaded to the device",
    "prefill": "computed",
}


class NoMetrics(Failure):
    """A server's metrics cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Histogram:
    """The durations of a stage: their number, their sum, and for each bucket its upper bound in
    seconds, rising, with the number of durations up to that bound."""

    count: float = 0.0
    seconds: float = 0.0
    below: tuple[tuple[float, float], ...] = ()

    def since(self, before: Histogram) -> Histogram:
        """The durations that were added after ``before``."""
        below = _growth(dict(self.below), dict(before.below))
        count, seconds = self.count - before.count, self.seconds - before.seconds
        return Histogram(count, seconds, tuple(below.items()))

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the durations do not exceed, interpolated within a bucket. NaN
        without durations; the largest finite bound if the bucket has no upper one."""
        wanted, bound, count = share * self.count, 0.0, 0.0
        for upper, below in self.below:
            if below >= wanted and below > count:
                within = (wanted - count) / (below - count)
                return bound if math.isinf(upper) else bound + (upper - bound) * within
            bound, count = upper, below
        return math.nan


class MetricsPage(NamedTuple):
    """The content of a server's page at ``time``, in seconds of the monotonic clock. ``counters``
    are counts by event, for each table of `metrics.COUNTS` and ``prompt``. ``shared`` is the shared
    tier, silent if it did not answer when asked last. ``tokens_per_second`` are the rates by
    operation that decisions about L3 hits expect."""

    time: float
    counters: Mapping[str, Mapping[str, float]]
    stages: Mapping[str, Histogram]
    mode: str
    pages: str
    codec: str | None
    suspended: str | None
    shared: str | None
    shared_silent: bool
    tokens_per_second: Mapping[str, float]
    running: int
    queued: int

    def since(self, before: MetricsPage) -> MetricsPage | None:
        """The growth since ``before``, in ``time`` seconds; None if it was another run."""
        pairs = ((kind, now, before.counters[kind]) for kind, now in self.counters.items())
        counters = {kind: _growth(now, old) for kind, now, old in pairs}
        if any(count < 0 for counts in counters.values() for count in counts.values()):
            return None
        new = Histogram()
        stages = {name: h.since(before.stages.get(name, new)) for name, h in self.stages.items()}
        seconds = max(self.time - before.time, 1e-9)
        return self._replace(time=seconds, counters=counters, stages=stages)


Look = MetricsPage | NoMetrics


def _growth(now: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
    return {name: now.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **now}}


def fetch(url: str) -> MetricsPage:
    """The metrics of the server at ``http://host:port``, or ``host:port``. Raises NoMetrics."""
    try:
        return parse(ask(url.rstrip("/").removesuffix("/metrics"), "metrics", TIMEOUT_SECONDS))
    except RequestError as error:
        why = f"/metrics answered {error}" if error.status else str(error)
        if error.status == 404:
            why = "the server answers and has no /metrics: start it with --enable-metrics"
        raise NoMetrics(why) from None


def look(url: str) -> Look:
    """The metrics of the server at ``url``, or why there are none."""
    try:
        return fetch(url)
    except NoMetrics as error:
        return error


def parse(text: str) -> MetricsPage:
    """Parse a page in Prometheus' text format; the counts of all ranks are added up. Raises
    NoMetrics if the text is no such page, or has none of our metrics."""
    samples = defaultdict[str, list[tuple[dict[str, str], float]]](list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise NoMetrics(f"its /metrics is no Prometheus page: {error}") from None

    def sums(name: str, key: Callable[[dict[str, str]], Any]) -> dict[Any, float]:
        found = defaultdict[Any, float](float)
        for labels, value in samples[name]:
            found[key(labels)] += value
        return found

    def state(metric: metrics.Metric, label: str) -> str | None:
        return next((labels[label] for labels, value in samples[metric.name] if value == 1), None)

    mode, pages = state(metrics.MODE, "mode"), state(metrics.MODE, "pages")
    if mode is None or pages is None:
        where = "installed in the server's environment and is its storage backend"
        hint = f"Check that hcache-backend is {where} (or HCACHE_ENABLE=1)"
        raise NoMetrics(f"no hcache metrics on /metrics. {hint}")
    counters = {"prompt": sums(PROMPT[0], lambda labels: labels.get(PROMPT[1], ""))}
    for kind, events in metrics.COUNTS.items():
        found = (sums(f"{metric.name}_total", metric.event) for metric in events.counters)
        counters[kind] = {event: count for counts in found for event, count in counts.items()}
    stages, name = {}, metrics.STAGE_SECONDS.name
    buckets = sums(f"{name}_bucket", itemgetter("stage", "le"))
    for stage, seconds in sums(f"{name}_sum", itemgetter("stage")).items():
        below = sorted((float(le), count) for (at, le), count in buckets.items() if at == stage)
        stages[stage] = Histogram(below[-1][1], seconds, tuple(below))
    rates = sums(metrics.RATES.name, itemgetter("operation"))
    return MetricsPage(
        time.monotonic(),
        counters,
        stages,
        mode,
        pages,
        codec=state(metrics.CODEC, "used") if pages == "own" else None,
        suspended=state(metrics.SUSPENDED, "reason"),
        shared=state(metrics.SHARED, "backend"),
        shared_silent=sums(metrics.SHARED.name, itemgetter("state")).get("silent", 0) > 0,
        # 0: a backend that was detached
        tokens_per_second={name: rate for name, rate in rates.items() if rate},
        running=int(sum(number for _, number in samples["sglang:num_running_reqs"])),
        queued=int(sum(number for _, number in samples["sglang:num_queue_reqs"])),
    )


def summary(page: Look, before: Look | None) -> dict[str, Any]:
    """The output of ``hcache top --json`` for a server: totals, rates and stage durations. There
    are no rates without ``before``, an earlier page of the same run. Durations are those since
    ``before`` for stages that ran since then, otherwise all of the server."""
    if isinstance(page, NoMetrics):
        return {"error": str(page)}
    grown = page.since(before) if isinstance(before, MetricsPage) else None
    seconds = math.nan if grown is None else grown.time
    per_second = grown and {
        kind: {event: count / seconds for event, count in counts.items()}
        for kind, counts in grown.counters.items()
    }
    stages = {}
    for name, total in sorted(page.stages.items()):
        recent = Histogram() if grown is None else grown.stages[name]
        times = recent if recent.count else total
        stages[name] = {
            "count": total.count,
            "per_second": None if grown is None else recent.count / seconds,
            "mean_ms": 1e3 * times.seconds / times.count,
            "p50_ms": 1e3 * times.quantile(0.5),
            "p99_ms": 1e3 * times.quantile(0.99),
        }
    state = dict(zip(page._fields[3:], page[3:], strict=True))
    return {**state, "totals": page.counters, "per_second": per_second, "stages": stages}


def _seen(urls: Sequence[str], interval: float) -> Iterator[list[dict[str, Any]]]:
    """The JSON of all servers, again and again."""
    before: Sequence[Look | None] = [None] * len(urls)
    with ThreadPoolExecutor(len(urls)) as pool:
        while True:
            pages = list(pool.map(look, urls))
            looks = zip(urls, pages, before, strict=True)
            yield [{"url": url, **summary(page, last)} for url, page, last in looks]
            before = pages
            time.sleep(interval)


def top(
    urls: Annotated[list[str] | None, Argument(help=f"http://HOST:PORT; default {SERVER}.")] = None,
    interval: Annotated[
        float, Option("--interval", "-i", min=0.2, help="Seconds between looks.")
    ] = 2.0,
    once: Annotated[bool, Option("--once", help="Print one interval, then end.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Watch what servers do with hidden states and L3. The servers need --enable-metrics."""
    looks = _seen(urls or [SERVER], interval)
    if not (once or as_json):
        with suppress(KeyboardInterrupt), Live(console=screen, auto_refresh=False) as live:
            for seen in looks:
                live.update(picture(seen), refresh=True)
        return
    seen = next(looks)
    if not all("error" in server for server in seen):
        seen = next(looks)
    failed = any("error" in server for server in seen)
    common.output({"servers": seen}, as_json, lambda _: screen.print(picture(seen)), failed)


def picture(servers: Sequence[dict[str, Any]]) -> Columns:
    """One panel per server, side by side if they fit."""
    parts = ((seen["url"], Group(*_parts(seen))) for seen in servers)
    return Columns(Panel.fit(group, title=url, title_align="left") for url, group in parts)


def _parts(seen: dict[str, Any]) -> Iterator[RenderableType]:
    """The content of a server's panel, from its JSON."""
    if "error" in seen:
        yield Text(seen["error"], style="red")
        return
    state = [f"{seen['mode']} mode, {seen['pages']} pages"]
    if seen["codec"] is not None:
        state.append(f"codec {seen['codec']}")
    if seen["suspended"] is not None:
        state.append(f"L3 is off ({seen['suspended'].replace('_', ' ')})")
    if seen["shared"] is not None:
        silent = ", not responding" if seen["shared_silent"] else ""
        state.append(f"shared L3: {seen['shared']}{silent}")
    state.append(f"{seen['running']} requests running, {seen['queued']} queued")
    rates = seen["tokens_per_second"]
    expected = [f"{_RATES[name]} at {rates[name]:,.0f}" for name in _RATES if name in rates]
    yield Text(", ".join(state) + "\ntokens per second: " * bool(expected) + ", ".join(expected))
    yield Text()
    counts = table("", "", "per second#", "total#")
    for name, counted in LINES.items():
        kind, *events = counted.split()
        tables = [seen[which] and seen[which][kind] for which in ("per_second", "totals")]
        amounts = [known and sum(known.get(event, 0) for event in events) for known in tables]
        if amounts[1]:
            counts.add_row(name, *(common.cell(counted, amount) for amount in amounts))
    yield counts
    yield Text()
    times = table("", "stage", "per second#", "mean ms#", "p50 ms#", "p99 ms#", "total#")
    for name, stage in seen["stages"].items():
        values = (stage[key] for key in ("per_second", "mean_ms", "p50_ms", "p99_ms"))
        cells = ("-" if value is None else f"{value:,.2f}" for value in values)
        times.add_row(name, *cells, f"{stage['count']:,.0f}")
    yield times
    problems = sorted((kind, n) for kind, n in seen["totals"]["problems"].items() if n)
    if text := ", ".join(f"{kind} {n:,.0f}" for kind, n in problems):
        yield Text(f"\nproblems, each a cache miss: {text}", style="yellow")
