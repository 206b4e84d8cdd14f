"""A server's ``/metrics`` page: fetch and parse it, and compare two pages of one server."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from hcache_backend import metrics
from hcache_backend.cli.common import Failure, RequestError, ask

TIMEOUT_SECONDS = 5.0
METRICS_LAG_S = 1.5
"""Counters of the page store are passed on once per second."""
PROMPT = ("sglang:prefill_effective_tokens_total", "mode")
"""SGLang's counter of prompt tokens, and the label that says where they came from."""


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
        earlier = dict(before.below)
        below = ((bound, number - earlier.get(bound, 0.0)) for bound, number in self.below)
        return Histogram(self.count - before.count, self.seconds - before.seconds, tuple(below))

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the durations do not exceed, interpolated within a bucket.

        NaN if there are no durations; the largest finite bound if the bucket has no upper one.
        """
        wanted, bound, count = share * self.count, 0.0, 0.0
        for upper, below in self.below:
            if below >= wanted and below > count:
                within = (wanted - count) / (below - count)
                return bound if math.isinf(upper) else bound + (upper - bound) * within
            bound, count = upper, below
        return math.nan


class MetricsPage(NamedTuple):
    """The content of a server's page at ``time``, in seconds of the monotonic clock.

    ``counters`` are counts by event, for each table of `metrics.COUNTS` and ``prompt``. The state
    is that of the server's report, with the reason why L3 is ``suspended``. ``behind`` is the
    shared tier, silent if it did not answer when asked last. ``tokens_per_second`` are the rates by
    operation that decisions about L3 hits expect. ``queued`` requests wait for a batch.
    """

    time: float
    counters: Mapping[str, Mapping[str, float]]
    stages: Mapping[str, Histogram]
    mode: str
    pages: str
    codec: str | None
    suspended: str | None
    behind: str | None
    behind_silent: bool
    tokens_per_second: Mapping[str, float]
    running: int
    queued: int

    def since(self, before: MetricsPage) -> MetricsPage | None:
        """The growth since ``before``, in ``time`` seconds; None if it was another run."""
        counters = {}
        for table, now in self.counters.items():
            old = before.counters[table]
            events = {**old, **now}
            counters[table] = {name: now.get(name, 0.0) - old.get(name, 0.0) for name in events}
        if any(count < 0 for counts in counters.values() for count in counts.values()):
            return None
        new = Histogram()
        stages = {name: h.since(before.stages.get(name, new)) for name, h in self.stages.items()}
        seconds = max(self.time - before.time, 1e-9)
        return self._replace(time=seconds, counters=counters, stages=stages)


def fetch(url: str) -> MetricsPage:
    """The metrics of the server at ``url``: ``http://host:port``, or ``host:port``.

    Raises NoMetrics if the server does not answer, or its page has none of our metrics.
    """
    try:
        return parse(ask(url.rstrip("/").removesuffix("/metrics"), "metrics", TIMEOUT_SECONDS))
    except RequestError as error:
        why = f"/metrics answered {error}" if error.status else str(error)
        if error.status == 404:
            why = "the server answers and has no /metrics: start it with --enable-metrics"
        raise NoMetrics(why) from None


def look(url: str) -> MetricsPage | NoMetrics:
    """The metrics of the server at ``url``, or why there are none."""
    try:
        return fetch(url)
    except NoMetrics as error:
        return error


def parse(text: str) -> MetricsPage:
    """Parse a page in Prometheus' text format; the counts of all ranks are added up.

    Raises NoMetrics if the text is no such page, or has none of our metrics.
    """
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
        raise NoMetrics(
            "no hcache metrics on /metrics. Check that hcache-backend is installed in the server's "
            "environment and is its storage backend (or HCACHE_ENABLE=1)"
        )
    counters = {"prompt": sums(PROMPT[0], lambda labels: labels.get(PROMPT[1], ""))}
    for table, events in metrics.COUNTS.items():
        found = (sums(f"{metric.name}_total", metric.event) for metric in events.counters)
        counters[table] = {event: count for counts in found for event, count in counts.items()}
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
        behind=state(metrics.BEHIND, "backend"),
        behind_silent=sums(metrics.BEHIND.name, itemgetter("state")).get("silent", 0) > 0,
        # 0: a backend that was detached
        tokens_per_second={name: rate for name, rate in rates.items() if rate},
        running=int(sum(number for _, number in samples["sglang:num_running_reqs"])),
        queued=int(sum(number for _, number in samples["sglang:num_queue_reqs"])),
    )


def summary(
    page: MetricsPage | NoMetrics, before: MetricsPage | NoMetrics | None
) -> dict[str, Any]:
    """The output of ``hcache top --json`` for a server: totals, rates and stage durations.

    Without ``before``, an earlier page of the same run, there are no rates. Durations are those
    since ``before`` for stages that ran since then, otherwise all of the server.
    """
    if isinstance(page, NoMetrics):
        return {"error": str(page)}
    grown = page.since(before) if isinstance(before, MetricsPage) else None
    seconds = math.nan if grown is None else grown.time
    per_second = {
        table: {event: count / seconds for event, count in counts.items()}
        for table, counts in (grown.counters if grown is not None else {}).items()
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
    return {**state, "totals": page.counters, "per_second": per_second or None, "stages": stages}


def moved(before: MetricsPage | NoMetrics, after: MetricsPage | NoMetrics) -> dict[str, Any]:
    """Bytes that moved between two looks, by our metrics; ``missing`` says why there are none."""
    if isinstance(before, NoMetrics) or isinstance(after, NoMetrics):
        return {"missing": str(before if isinstance(before, NoMetrics) else after)}
    if (grown := after.since(before)) is None:
        return {"missing": "the server was started anew during the run"}
    names = ("bytes_read", "bytes_written", "pages_evicted", "pages_dropped")
    sums = {name: (grown.counters["store"], name) for name in names}
    sums |= {"bytes_restored": (grown.counters["bytes"], "restored")}
    sums |= {"problems": (grown.counters["problems"], "")}
    totals = {
        name: int(sum(count for event, count in counts.items() if event.startswith(beginning)))
        for name, (counts, beginning) in sums.items()
    }
    return {"mode": after.mode, "pages": after.pages, **totals}
