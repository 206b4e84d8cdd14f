"""``hcache top``: a live view of servers' hidden states and L3."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from typer import Argument, Option

from hcache_backend.cli.common import SERVER, AsJson, human_bytes, output, screen, table
from hcache_backend.cli.metrics_page import MetricsPage, NoMetrics, look, summary

LINES = {
    "prompt tokens computed": "prompt input",
    "  found on the device": "prompt device_hit",
    "  found in host memory": "prompt host_hit",
    "  found in L3": "prompt storage_hit",
    "captured": "tokens captured",
    "backed up to host memory": "tokens backed_up",
    "not encodable": "tokens not_encodable",
    "restored to the device": "tokens restored",
    "looked for in L3, found": "l3_tokens found",
    "  and read": "l3_tokens hit",
    "  and recomputed": "l3_tokens recomputed",
    "  and not readable": "l3_tokens unreadable",
    "  and refused": "l3_tokens slower ended",
    "  absent": "l3_tokens absent other_pool",
    "  while L3 was off": "l3_tokens suspended",
    "L3 reads": "store bytes_read",
    "L3 pages damaged or unreadable": "store bad_pages read_errors",
    "L3 writes": "store bytes_written",
    "L3 pages dropped": "store pages_dropped_full pages_dropped_late pages_dropped_offline",
    "L3 pages evicted": "store pages_evicted",
    "shared L3: read": "behind read",
    "shared L3: not readable or damaged": "behind missed",
    "shared L3: not asked, not responding": "behind not_asked",
    "shared L3: written": "behind written",
    "shared L3: not written": "behind dropped_full write_failed",
}
"""Lines of a server's table: a table of counters and the events that are summed; 0 is not shown."""
_UNITS = {"store": "pages", "behind": "pages"}
_RATES = {
    "l3_read": "L3 is read",
    "behind_read": "the shared L3",
    "load": "loaded to the device",
    "prefill": "computed",
}


def _seen(urls: Sequence[str], interval: float) -> Iterator[list[dict[str, Any]]]:
    """The JSON of all servers, again and again."""
    before: Sequence[MetricsPage | NoMetrics | None] = [None] * len(urls)
    with ThreadPoolExecutor(len(urls)) as pool:
        while True:
            pages = list(pool.map(look, urls))
            yield [
                {"url": url, **summary(page, last)}
                for url, page, last in zip(urls, pages, before, strict=True)
            ]
            before = pages
            time.sleep(interval)


def top(
    urls: Annotated[list[str] | None, Argument(help=f"http://HOST:PORT; default {SERVER}.")] = None,
    interval: Annotated[float, Option("--interval", "-i", min=0.2, help="Seconds.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Print one interval, then end.")] = False,
    as_json: AsJson = False,
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
    output({"servers": seen}, as_json, lambda _: screen.print(picture(seen)))
    if any("error" in server for server in seen):
        raise typer.Exit(1)


def picture(servers: Sequence[dict[str, Any]]) -> Columns:
    """One panel per server, side by side if they fit."""
    panels = []
    for seen in servers:
        parts = [Text(seen["error"], style="red")] if "error" in seen else _parts(seen)
        panels.append(Panel(Group(*parts), title=seen["url"], title_align="left", expand=False))
    return Columns(panels)


def _parts(seen: dict[str, Any]) -> Iterator[RenderableType]:
    """The content of a server's panel, from its JSON."""
    state = [f"{seen['mode']} mode, {seen['pages']} pages"]
    if seen["codec"] is not None:
        state.append(f"codec {seen['codec']}")
    if seen["suspended"] is not None:
        state.append(f"L3 is off ({seen['suspended'].replace('_', ' ')})")
    if seen["behind"] is not None:
        silent = ", not responding" if seen["behind_silent"] else ""
        state.append(f"shared L3: {seen['behind']}{silent}")
    state.append(f"{seen['running']} requests running, {seen['queued']} queued")
    rates = seen["tokens_per_second"]
    expected = [f"{_RATES[name]} at {rates[name]:,.0f}" for name in _RATES if name in rates]
    yield Text(", ".join(state) + "\ntokens per second: " * bool(expected) + ", ".join(expected))
    yield Text()
    counts = table("", "", "per second#", "total#")
    for name, counted in LINES.items():
        counter, *events = counted.split()
        unit = "bytes" if events[0].startswith("bytes_") else _UNITS.get(counter, "tokens")
        tables = [seen[which] and seen[which][counter] for which in ("per_second", "totals")]
        amounts = [known and sum(known.get(event, 0) for event in events) for known in tables]
        if amounts[1]:
            counts.add_row(name, *(_amount(amount, unit) for amount in amounts))
    yield counts
    yield Text()
    times = table("", "stage", "per second#", "mean ms#", "p50 ms#", "p99 ms#", "total#")
    for name, stage in seen["stages"].items():
        values = (stage[key] for key in ("per_second", "mean_ms", "p50_ms", "p99_ms"))
        cells = ("-" if value is None else f"{value:,.2f}" for value in values)
        times.add_row(name, *cells, f"{stage['count']:,.0f}")
    yield times
    problems = sorted((kind, count) for kind, count in seen["totals"]["problems"].items() if count)
    if problems:
        text = ", ".join(f"{kind} {count:,.0f}" for kind, count in problems)
        yield Text(f"\nproblems, each a cache miss: {text}", style="yellow")


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return human_bytes(int(value)) if unit == "bytes" else f"{value:,.0f} {unit}"
