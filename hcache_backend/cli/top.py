"""``hcache top``: a live view of servers' hidden states and L3."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from hcache_backend.cli.common import SERVER, AsJson, human_bytes, print_json, screen, table
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
    "L3 pages dropped (full, late, offline)": (
        "store pages_dropped_full pages_dropped_late pages_dropped_offline"
    ),
    "L3 pages evicted": "store pages_evicted",
    "shared L3: read": "shared read",
    "shared L3: not readable or damaged": "shared missed",
    "shared L3: not asked, not responding": "shared not_asked",
    "shared L3: written": "shared written",
    "shared L3: not written": "shared dropped_full write_failed",
}
"""Lines of a server's table: a table of counters and the events that are summed; 0 is not shown."""
_UNITS = {"store": "pages", "shared": "pages"}
_RATES = {
    "l3_read": "L3 is read",
    "shared_read": "the shared L3",
    "load": "loaded to the device",
    "prefill": "computed",
}


@dataclass
class Watched:
    """A server and its last two metrics pages."""

    url: str
    page: MetricsPage | None = None
    before: MetricsPage | None = None
    problem: str | None = None

    def look(self) -> None:
        """Fetch the server's page."""
        page = look(self.url)
        if isinstance(page, NoMetrics):
            self.page, self.problem = None, str(page)
            return
        same_run = self.page is not None and page.follows(self.page)
        self.page, self.before, self.problem = page, self.page if same_run else None, None

    def as_json(self) -> dict[str, Any]:
        if self.page is None:
            return {"url": self.url, "error": self.problem}
        return {"url": self.url, **summary(self.page, self.before)}


def top(
    urls: Annotated[
        list[str] | None, typer.Argument(help=f"Servers, as http://HOST:PORT; default {SERVER}.")
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, help="Seconds between two fetches.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval, then end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch what servers do with hidden states and L3. The servers need --enable-metrics."""
    watched = [Watched(url) for url in urls or [SERVER]]
    with ThreadPoolExecutor(len(watched)) as pool:
        _look(pool, watched)
        if not (once or as_json):
            _watch(pool, watched, interval)
            return
        if any(server.page is not None for server in watched):
            time.sleep(interval)
            _look(pool, watched)
    if as_json:
        print_json({"servers": [server.as_json() for server in watched]})
    else:
        screen.print(picture(watched))
    if any(server.problem is not None for server in watched):
        raise typer.Exit(1)


def _look(pool: ThreadPoolExecutor, watched: Sequence[Watched]) -> None:
    list(pool.map(Watched.look, watched))


def _watch(pool: ThreadPoolExecutor, watched: Sequence[Watched], interval: float) -> None:
    with (
        suppress(KeyboardInterrupt),
        Live(picture(watched), console=screen, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(interval)
            _look(pool, watched)
            live.update(picture(watched), refresh=True)


def picture(watched: Sequence[Watched]) -> Columns:
    """One panel per server, side by side if they fit."""
    panels = []
    for server in watched:
        seen = server.as_json()
        parts = [Text(seen["error"], style="red")] if "error" in seen else _parts(seen)
        panels.append(Panel(Group(*parts), title=server.url, title_align="left", expand=False))
    return Columns(panels)


def _parts(seen: dict[str, Any]) -> Iterator[RenderableType]:
    """The content of a server's panel, from its JSON."""
    state = [f"{seen['mode']} mode, {seen['pages']} pages"]
    if seen["codec"] is not None:
        state.append(f"codec {seen['codec']}")
    if seen["suspended"] is not None:
        state.append(f"L3 is off ({seen['suspended'].replace('_', ' ')})")
    if seen["shared"] is not None:
        silent = ", not responding" if seen["shared_silent"] else ""
        state.append(f"shared L3: {seen['shared']}{silent}")
    yield Text(", ".join([*state, f"{seen['running']} requests running, {seen['queued']} queued"]))
    rates = seen["tokens_per_second"]
    if expected := [f"{_RATES[name]} at {rates[name]:,.0f}" for name in _RATES if name in rates]:
        yield Text(f"tokens per second: {', '.join(expected)}")
    yield Text()
    counts = table("", "", "per second#", "total#")
    for name, counted in LINES.items():
        counter, *labels = counted.split()
        unit = "bytes" if labels[0].startswith("bytes_") else _UNITS.get(counter, "tokens")
        if total := _sum(seen["totals"][counter], labels):
            rates = seen["per_second"] and _sum(seen["per_second"][counter], labels)
            counts.add_row(name, _amount(rates, unit), _amount(total, unit))
    yield counts
    yield Text()
    times = table("", "stage", "per second#", "mean ms#", "p50 ms#", "p99 ms#", "total#")
    for name, stage in seen["stages"].items():
        cells = (stage[key] for key in ("per_second", "mean_ms", "p50_ms", "p99_ms"))
        shown = ["-" if value is None else f"{value:,.2f}" for value in cells]
        times.add_row(name, *shown, f"{stage['count']:,.0f}")
    yield times
    problems = sorted((kind, count) for kind, count in seen["totals"]["problems"].items() if count)
    if problems:
        text = ", ".join(f"{kind} {count:,.0f}" for kind, count in problems)
        yield Text(f"\nproblems, each a cache miss: {text}", style="yellow")


def _sum(counts: dict[str, float], labels: Sequence[str]) -> float:
    return sum(counts.get(label, 0.0) for label in labels)


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return human_bytes(int(value)) if unit == "bytes" else f"{value:,.0f} {unit}"
