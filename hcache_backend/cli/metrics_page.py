"""A server's ``/metrics`` page: fetch and parse it, and compute rates between two pages."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hcache_backend.cli.common import RequestError, ask
from hcache_backend.engine import metrics

TIMEOUT_SECONDS = 5.0
METRICS_LAG_S = 1.5
"""Counters of the page store are passed on once per second."""
PROMPT = ("sglang:prefill_effective_tokens_total", "mode")
"""SGLang's counter of prompt tokens, and the label that says where they came from."""


class NoMetrics(Exception):
    """A server's metrics cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Histogram:
    """The durations of a stage.

    Attributes:
        count: Number of durations.
        seconds: Their sum.
        below: For each bucket its upper bound in seconds, rising, and the number of durations up
            to that bound.
    """

    count: float = 0.0
    seconds: float = 0.0
    below: tuple[tuple[float, float], ...] = ()

    def since(self, before: Histogram) -> Histogram:
        """The durations that were added after ``before``."""
        earlier = dict(before.below)
        return Histogram(
            self.count - before.count,
            self.seconds - before.seconds,
            tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in self.below),
        )

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of the durations do not exceed, interpolated within a bucket.

        None if there are no durations; the largest finite bound if the bucket has no upper one.
        """
        wanted, bound, count = share * self.count, 0.0, 0.0
        for upper, below in self.below:
            if below >= wanted and below > count:
                if math.isinf(upper):
                    return bound
                return bound + (upper - bound) * (wanted - count) / (below - count)
            bound, count = upper, below
        return None


@dataclass(frozen=True)
class MetricsPage:
    """The content of a server's page at one time.

    Attributes:
        time: When the page was read: seconds of the monotonic clock.
        counters: For each table of `metrics.COUNTS`, and `prompt`, the counts by event.
        stages: Durations by stage.
        mode: ``hidden`` or ``kv``.
        pages: ``own`` or ``plain``.
        codec: How own pages are encoded; None: pages are plain.
        suspended: Why L3 is neither read nor written, or None.
        behind: What L3 is behind the page store, or None.
        behind_silent: Whether it did not answer when it was asked last.
        rates: Tokens per second by operation, as decisions about L3 hits expect them.
        running: Requests in a batch.
        queued: Requests waiting for a batch.
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
    rates: Mapping[str, float]
    running: int
    queued: int

    def follows(self, before: MetricsPage) -> bool:
        """Whether both pages are of the same run of the server: no counter has decreased."""
        return all(
            self.counters[name].get(label, 0.0) >= count
            for name, counts in before.counters.items()
            for label, count in counts.items()
        )

    def since(self, before: MetricsPage) -> dict[str, dict[str, float]]:
        """Counts per second since ``before``, an earlier page of the same run."""
        elapsed = max(self.time - before.time, 1e-9)
        return {
            name: {
                label: (count - before.counters[name].get(label, 0.0)) / elapsed
                for label, count in counts.items()
            }
            for name, counts in self.counters.items()
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


def parse(text: str) -> MetricsPage:
    """Parse a page in Prometheus' text format; the counts of all ranks are added up.

    Raises:
        NoMetrics: The text is no such page, or has none of our metrics.
    """
    counters = {name: defaultdict[str, float](float) for name in (*metrics.COUNTS, "prompt")}
    seconds = defaultdict[str, float](float)
    buckets = defaultdict[str, defaultdict[float, float]](lambda: defaultdict(float))
    on: dict[str, list[dict[str, str]]] = {}
    rates: dict[str, float] = {}
    requests = {"sglang:num_running_reqs": 0.0, "sglang:num_queue_reqs": 0.0}
    ours = {
        f"{metric.name}_total": (name, metric)
        for name, table in metrics.COUNTS.items()
        for metric in table.counters
    }
    stages = metrics.STAGE_SECONDS.name
    for name, labels, value in _samples(text):
        if name in ours:
            table, metric = ours[name]
            counters[table][metric.event(labels)] += value
        elif name == PROMPT[0]:
            counters["prompt"][labels.get(PROMPT[1], "")] += value
        elif name == f"{stages}_bucket":
            buckets[labels["stage"]][float(labels["le"])] += value
        elif name == f"{stages}_sum":
            seconds[labels["stage"]] += value
        elif name in requests:
            requests[name] += value
        elif name == metrics.RATES.name and value:  # 0: a backend that was detached
            rates[labels["operation"]] = value
        elif value == 1.0:
            on.setdefault(name, []).append(labels)
    modes = on.get(metrics.MODE.name)
    if not modes:
        raise NoMetrics(
            "no hcache metrics on /metrics. Check that hcache-backend is installed in the server's "
            "environment and is its storage backend (or HCACHE_ENABLE=1)"
        )
    codecs = on.get(metrics.CODEC.name)
    suspended = on.get(metrics.SUSPENDED.name)
    behind = on.get(metrics.BEHIND.name, [])
    return MetricsPage(
        time=time.monotonic(),
        counters=counters,
        stages={
            name: Histogram(below[math.inf], seconds[name], tuple(sorted(below.items())))
            for name, below in buckets.items()
        },
        mode=modes[0]["mode"],
        pages=modes[0]["pages"],
        codec=codecs[0]["used"] if codecs and modes[0]["pages"] == "own" else None,
        suspended=suspended[0]["reason"] if suspended else None,
        behind=behind[0]["backend"] if behind else None,
        behind_silent=any(rank["state"] == "silent" for rank in behind),
        rates=rates,
        running=int(requests["sglang:num_running_reqs"]),
        queued=int(requests["sglang:num_queue_reqs"]),
    )


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    try:
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except (ValueError, KeyError, IndexError) as error:
        raise NoMetrics(f"its /metrics is no Prometheus page: {error}") from None


def summary(page: MetricsPage, before: MetricsPage | None) -> dict[str, Any]:
    """The output of ``hcache top --json`` for a server: totals, rates and stage durations.

    Args:
        before: An earlier page of the same run; without it there are no rates. Durations are those
            after ``before`` for stages that ran since then, else all since the server's start.
    """
    stages = {}
    for name, histogram in sorted(page.stages.items()):
        recent = histogram.since(before.stages.get(name, Histogram())) if before else histogram
        times = recent if recent.count > 0 else histogram
        stages[name] = {
            "count": histogram.count,
            "per_second": recent.count / max(page.time - before.time, 1e-9) if before else None,
            "mean_ms": 1e3 * times.seconds / times.count if times.count else None,
            "p50_ms": _milliseconds(times.quantile(0.5)),
            "p99_ms": _milliseconds(times.quantile(0.99)),
        }
    return {
        "mode": page.mode,
        "pages": page.pages,
        "codec": page.codec,
        "suspended": page.suspended,
        "behind": page.behind,
        "behind_silent": page.behind_silent,
        "tokens_per_second": dict(page.rates),
        "running": page.running,
        "queued": page.queued,
        "totals": {name: dict(counts) for name, counts in page.counters.items()},
        "per_second": page.since(before) if before else None,
        "stages": stages,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def look(url: str) -> MetricsPage | NoMetrics:
    """The metrics of the server at ``url``, or why there are none."""
    try:
        return fetch(url)
    except NoMetrics as error:
        return error


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
        "pages": after.pages,
        "bytes_read": grown("store", "bytes_read"),
        "bytes_written": grown("store", "bytes_written"),
        "bytes_restored": sum(grown("bytes", label) for label in restored),
        "pages_evicted": grown("store", "pages_evicted"),
        "pages_dropped": sum(grown("store", label) for label in dropped),
        "problems": sum(grown("problems", kind) for kind in after.counters["problems"]),
    }
