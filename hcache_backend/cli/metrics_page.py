"""A server's ``/metrics`` page: fetch and parse it, and compare two pages of one server."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from hcache_backend import metrics
from hcache_backend.cli.common import RequestError, ask

TIMEOUT_SECONDS = 5.0
METRICS_LAG_S = 1.5
"""Counters of the page store are passed on once per second."""
PROMPT = ("sglang:prefill_effective_tokens_total", "mode")
"""SGLang's counter of prompt tokens, and the label that says where they came from."""
_REQUESTS = ("sglang:num_running_reqs", "sglang:num_queue_reqs")


class NoMetrics(Exception):
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
        count, seconds, earlier = before.count, before.seconds, dict(before.below)
        below = ((bound, number - earlier.get(bound, 0.0)) for bound, number in self.below)
        return Histogram(self.count - count, self.seconds - seconds, tuple(below))

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the durations do not exceed, interpolated within a bucket.

        NaN if there are no durations; the largest finite bound if the bucket has no upper one.
        """
        wanted, bound, count = share * self.count, 0.0, 0.0
        for upper, below in self.below:
            if below >= wanted and below > count:
                if math.isinf(upper):
                    return bound
                return bound + (upper - bound) * (wanted - count) / (below - count)
            bound, count = upper, below
        return math.nan


class MetricsPage(NamedTuple):
    """The content of a server's page at one time.

    Attributes:
        time: When the page was read: seconds of the monotonic clock.
        counters: For each table of `metrics.COUNTS`, and `prompt`, the counts by event.
        stages: Durations by stage.
        mode, pages, codec: As the server's report; no codec: pages are plain.
        suspended: Why L3 is neither read nor written, or None.
        shared, shared_silent: The shared tier, or None; whether it did not answer when asked last.
        tokens_per_second: Rates by operation, as decisions about L3 hits expect them.
        running, queued: Requests in a batch, and those that wait for one.
    """

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

    def follows(self, before: MetricsPage) -> bool:
        """Whether both pages are of the same run of the server: no counter has decreased."""
        return all(
            self.counters[table].get(event, 0.0) >= count
            for table, counts in before.counters.items()
            for event, count in counts.items()
        )

    def since(self, before: MetricsPage) -> dict[str, dict[str, float]]:
        """Counts by table and event since ``before``, an earlier page of the same run."""
        return {
            table: {
                event: n - before.counters[table].get(event, 0.0) for event, n in counts.items()
            }
            for table, counts in self.counters.items()
        }


def fetch(url: str) -> MetricsPage:
    """Read the metrics of the server at ``url``: ``http://host:port``, or ``host:port``.

    Raises:
        NoMetrics: The server does not answer, or its page has none of our metrics.
    """
    try:
        return parse(ask(url.rstrip("/").removesuffix("/metrics"), "metrics", TIMEOUT_SECONDS))
    except RequestError as error:
        if error.status == 404:
            raise NoMetrics(
                "the server answers and has no /metrics: start it with --enable-metrics"
            ) from None
        raise NoMetrics(f"/metrics answered {error}" if error.status else str(error)) from None


def look(url: str) -> MetricsPage | NoMetrics:
    """The metrics of the server at ``url``, or why there are none."""
    try:
        return fetch(url)
    except NoMetrics as error:
        return error


def parse(text: str) -> MetricsPage:
    """Parse a page in Prometheus' text format; the counts of all ranks are added up.

    Raises:
        NoMetrics: The text is no such page, or has none of our metrics.
    """
    ours = {
        f"{metric.name}_total": (name, metric)
        for name, table in metrics.COUNTS.items()
        for metric in table.counters
    }
    stages = metrics.STAGE_SECONDS.name
    counters = {name: defaultdict[str, float](float) for name in (*metrics.COUNTS, "prompt")}
    buckets = defaultdict[str, defaultdict[float, float]](lambda: defaultdict(float))
    sums = defaultdict[str, float](float)  # of seconds by stage, and of requests by gauge
    rates: dict[str, float] = {}
    on = defaultdict[str, list[dict[str, str]]](list)
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        raise NoMetrics(f"its /metrics is no Prometheus page: {error}") from None
    for name, labels, value, *_ in (sample for family in families for sample in family.samples):
        if name in ours:
            table, metric = ours[name]
            counters[table][metric.event(labels)] += value
        elif name == PROMPT[0]:
            counters["prompt"][labels.get(PROMPT[1], "")] += value
        elif name == f"{stages}_bucket":
            buckets[labels["stage"]][float(labels["le"])] += value
        elif name == f"{stages}_sum":
            sums[labels["stage"]] += value
        elif name in _REQUESTS:
            sums[name] += value
        elif name == metrics.RATES.name and value:  # 0: a backend that was detached
            rates[labels["operation"]] = value
        elif value == 1.0:
            on[name].append(labels)
    if not (modes := on[metrics.MODE.name]):
        raise NoMetrics(
            "no hcache metrics on /metrics. Check that hcache-backend is installed in the server's "
            "environment and is its storage backend (or HCACHE_ENABLE=1)"
        )
    codec, suspended, shared = (
        next((labels[label] for labels in on[metric.name]), None)
        for metric, label in (
            (metrics.CODEC, "used"),
            (metrics.SUSPENDED, "reason"),
            (metrics.SHARED, "backend"),
        )
    )
    return MetricsPage(
        time.monotonic(),
        counters,
        {
            name: Histogram(below[math.inf], sums[name], tuple(sorted(below.items())))
            for name, below in buckets.items()
        },
        mode=modes[0]["mode"],
        pages=modes[0]["pages"],
        codec=codec if modes[0]["pages"] == "own" else None,
        suspended=suspended,
        shared=shared,
        shared_silent=any(rank["state"] == "silent" for rank in on[metrics.SHARED.name]),
        tokens_per_second=rates,
        running=int(sums[_REQUESTS[0]]),
        queued=int(sums[_REQUESTS[1]]),
    )


def summary(page: MetricsPage, before: MetricsPage | None) -> dict[str, Any]:
    """The output of ``hcache top --json`` for a server: totals, rates and stage durations.

    Args:
        before: An earlier page of the same run; without it there are no rates. Durations are those
            after ``before`` for stages that ran since then, otherwise all of the server.
    """
    elapsed = max(page.time - before.time, 1e-9) if before else math.nan
    stages = {}
    for name, histogram in sorted(page.stages.items()):
        recent = histogram.since(before.stages.get(name, Histogram())) if before else histogram
        times = recent if recent.count > 0 else histogram
        milliseconds = {
            "mean_ms": 1e3 * times.seconds / times.count if times.count else math.nan,
            "p50_ms": 1e3 * times.quantile(0.5),
            "p99_ms": 1e3 * times.quantile(0.99),
        }
        stages[name] = {
            "count": histogram.count,
            "per_second": recent.count / elapsed if before else None,
            **{name: None if math.isnan(ms) else ms for name, ms in milliseconds.items()},
        }
    _, counters, _, *state = page
    grown = page.since(before) if before else {}
    return {
        **dict(zip(page._fields[3:], state, strict=True)),
        "totals": {name: dict(counts) for name, counts in counters.items()},
        "per_second": {t: {e: n / elapsed for e, n in grown[t].items()} for t in grown} or None,
        "stages": stages,
    }


def moved(before: MetricsPage | NoMetrics, after: MetricsPage | NoMetrics) -> dict[str, Any]:
    """Bytes that moved between two looks, by our metrics; ``missing`` says why there are none."""
    if isinstance(before, NoMetrics) or isinstance(after, NoMetrics):
        return {"missing": str(before if isinstance(before, NoMetrics) else after)}
    if not after.follows(before):
        return {"missing": "the server was started anew during the run"}
    grown = after.since(before)
    store = {
        name: int(sum(n for event, n in grown["store"].items() if event.startswith(name)))
        for name in ("bytes_read", "bytes_written", "pages_evicted", "pages_dropped")
    }
    restored = (n for event, n in grown["bytes"].items() if event.startswith("restored"))
    moved = {"bytes_restored": int(sum(restored)), "problems": int(sum(grown["problems"].values()))}
    return {"mode": after.mode, "pages": after.pages, **store, **moved}
