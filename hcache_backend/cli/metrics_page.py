"""A server's ``/metrics`` page, and ``hcache top``: a live view of such pages."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from typer import Argument, Option

from hcache_backend import metrics
from hcache_backend.cli import common
from hcache_backend.cli.common import SERVER, Failure, screen, table

# Without the environment's proxies, which may not know the server: no_proxy has no 127.0.0.0/8.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PROMPT = ("sglang:prefill_effective_tokens_total", "mode")  # prompt tokens by their source


class NoMetrics(Failure):
    """A server's metrics cannot be read; the message says why and what to do."""


class MetricsPage(NamedTuple):
    """A server's page at ``time``, in seconds of the monotonic clock. ``counters`` are counts by
    event, for each table of `metrics.COUNTS`, ``prompt``, ``stages`` (how often each ran) and
    ``stage_seconds``. ``state`` has what else the page says, by name."""

    time: float
    counters: Mapping[str, Mapping[str, float]]
    state: Mapping[str, Any]


def fetch(url: str) -> MetricsPage:
    """The metrics of the server at ``http://host:port``, or ``host:port``. Raises NoMetrics."""
    server = url.rstrip("/").removesuffix("/metrics")
    whole = server if "://" in server else f"http://{server}"
    if not whole.startswith(("http://", "https://")):
        raise NoMetrics(f"{server!r} is no address of a server; it must be http://HOST:PORT")
    try:
        with _DIRECT.open(f"{whole}/metrics", timeout=5.0) as answer:
            return parse(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        error.close()
        why = f"/metrics answered {error.code}"
        if error.code == 404:
            why = "the server answers and has no /metrics: start it with --enable-metrics"
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = f"the server does not answer: {getattr(error, 'reason', error)}"
    raise NoMetrics(why)


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

    def sums(name: str, key: Callable[[dict[str, str]], str]) -> dict[str, float]:
        """Values of the samples called ``name``, added up by ``key`` of their labels."""
        totals = defaultdict[str, float](float)
        for labels, value in samples[name]:
            totals[key(labels)] += value
        return dict(totals)

    def state(metric: metrics.Metric, label: str) -> str | None:
        return next((labels[label] for labels, value in samples[metric.name] if value == 1), None)

    mode, pages = state(metrics.MODE, "mode"), state(metrics.MODE, "pages")
    if mode is None:
        raise NoMetrics("no hcache metrics on /metrics: is hcache the server's storage backend?")
    counters = {"prompt": sums(PROMPT[0], lambda labels: labels.get(PROMPT[1], ""))}
    for kind, events in metrics.COUNTS.items():
        tables = (sums(f"{metric.name}_total", metric.event) for metric in events.counters)
        counters[kind] = {event: count for counts in tables for event, count in counts.items()}
    for kind, part in (("stages", "count"), ("stage_seconds", "sum")):
        counters[kind] = sums(f"{metrics.STAGE_SECONDS.name}_{part}", itemgetter("stage"))
    rates = sums(metrics.RATES.name, itemgetter("operation"))
    silent = sums(metrics.SHARED.name, itemgetter("state")).get("silent")
    shown: dict[str, Any] = {"mode": mode, "pages": pages}
    shown["suspended"] = state(metrics.SUSPENDED, "reason")
    shown["codec"] = state(metrics.CODEC, "used") if pages == "own" else None
    shown |= {"shared": state(metrics.SHARED, "backend"), "shared_silent": bool(silent)}
    shown["tokens_per_second"] = {k: round(v) for k, v in rates.items() if v}  # 0: detached
    rooms = sums(metrics.FOLDERS.name, lambda labels: f"{labels['of']} of {labels['folder']}")
    shown["l3_bytes"] = {what: int(count) for what, count in rooms.items() if count}
    for name in ("running", "queue"):
        shown[name] = int(sum(number for _, number in samples[f"sglang:num_{name}_reqs"]))
    return MetricsPage(time.monotonic(), counters, shown)


def summary(page: MetricsPage, before: MetricsPage) -> dict[str, Any]:
    """The output of ``hcache top --json`` for a server: its state, totals, and rates since the page
    ``before``. No rates (None) if that is the same page, or if the server was started anew."""
    seconds, rates = page.time - before.time, dict[str, dict[str, float]]()  # by table and event
    for kind, now in page.counters.items() if seconds else ():
        rates[kind] = {k: (n - before.counters[kind].get(k, 0)) / seconds for k, n in now.items()}
    anew = any(rate < 0 for kind in rates.values() for rate in kind.values())
    return {**page.state, "totals": page.counters, "per_second": None if anew else rates or None}


def top(
    urls: Annotated[list[str] | None, Argument(help=f"http://HOST:PORT; default {SERVER}.")] = None,
    interval: Annotated[float, Option("--interval", "-i", min=0.2, help="Seconds.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Print one interval, then end.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Watch what servers do with hidden states and L3. The servers need --enable-metrics."""
    before: dict[str, MetricsPage] = {}

    def read_server(url: str) -> dict[str, Any]:
        """The summary of one server since the last call, or the error why there is none."""
        try:
            page = fetch(url)
        except NoMetrics as error:
            return {"url": url, "error": str(error)}
        last, before[url] = before.get(url, page), page
        return {"url": url, **summary(page, last)}

    def read_all() -> Iterator[list[dict[str, Any]]]:
        with ThreadPoolExecutor() as pool:
            while True:
                yield list(pool.map(read_server, urls or [SERVER]))
                time.sleep(interval)

    if not (once or as_json):
        with suppress(KeyboardInterrupt), Live(console=screen, auto_refresh=False) as live:
            for servers in read_all():
                live.update(panels_of(servers), refresh=True)
        return
    _, servers = islice(read_all(), 2)
    failed = any("error" in server for server in servers)
    common.output({"servers": servers}, as_json, lambda _: screen.print(panels_of(servers)), failed)


def panels_of(servers: Sequence[Mapping[str, Any]]) -> Columns:
    """A panel for each server: its state, and its counts that are not 0."""
    panels = []
    for server in servers:
        counts = table("", "", "per second#", "total#")
        for kind, totals in server.get("totals", {}).items():
            for name in filter(totals.get, totals):
                rate = f"{server['per_second'][kind][name]:,.2f}" if server["per_second"] else "-"
                counts.add_row(f"{kind} {name}", rate, f"{totals[name]:,.1f}")
        state = {k: v for k, v in server.items() if v and k not in ("url", "totals", "per_second")}
        group = Group(Text("\n".join(f"{name}: {v}" for name, v in state.items())), counts)
        panels.append(Panel.fit(group, title=Text(server["url"]), title_align="left"))
    return Columns(panels)
