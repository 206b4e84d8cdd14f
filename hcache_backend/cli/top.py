"""``hcache top``: a live view of what servers do with hidden states and L3."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import typer
from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hcache_backend.cli.common import AsJson, human_bytes, print_json, screen, table
from hcache_backend.cli.metrics_page import MetricsPage, NoMetrics, look, summary

DEFAULT_URL = "http://127.0.0.1:30000"


class Line(NamedTuple):
    """One line of a server's table: the sum of some counters; not shown while it is 0."""

    name: str
    counter: str
    labels: tuple[str, ...]
    unit: str = "tokens"


LINES = (
    Line("prompt tokens computed", "prompt", ("input",)),
    Line("  found on the device", "prompt", ("device_hit",)),
    Line("  found in host memory", "prompt", ("host_hit",)),
    Line("  found in L3", "prompt", ("storage_hit",)),
    Line("captured", "tokens", ("captured",)),
    Line("backed up to host memory", "tokens", ("backed_up",)),
    Line("not encodable", "tokens", ("not_encodable",)),
    Line("restored to the device", "tokens", ("restored",)),
    Line("looked for in L3, found", "l3_tokens", ("found",)),
    Line("  and read", "l3_tokens", ("hit",)),
    Line("  and recomputed", "l3_tokens", ("recomputed",)),
    Line("  and not readable", "l3_tokens", ("unreadable",)),
    Line("  and refused", "l3_tokens", ("slower", "ended")),
    Line("  absent", "l3_tokens", ("absent", "other_pool")),
    Line("  while L3 was off", "l3_tokens", ("suspended",)),
    Line("L3 reads", "store", ("bytes_read",), "bytes"),
    Line("L3 pages damaged or unreadable", "store", ("bad_pages", "read_errors"), "pages"),
    Line("L3 writes", "store", ("bytes_written",), "bytes"),
    Line(
        "L3 pages dropped (full, late, offline)",
        "store",
        ("pages_dropped_full", "pages_dropped_late", "pages_dropped_offline"),
        "pages",
    ),
    Line("L3 pages evicted", "store", ("pages_evicted",), "pages"),
    Line("shared L3: read", "behind", ("read",), "pages"),
    Line("shared L3: not readable or damaged", "behind", ("missed",), "pages"),
    Line("shared L3: not asked, not responding", "behind", ("not_asked",), "pages"),
    Line("shared L3: written", "behind", ("written",), "pages"),
    Line("shared L3: not written", "behind", ("dropped_full", "write_failed"), "pages"),
)


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
        list[str] | None,
        typer.Argument(help=f"Servers, as http://HOST:PORT; default {DEFAULT_URL}."),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, help="Seconds between two fetches.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval, then end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch what servers do with hidden states and L3. The servers need --enable-metrics."""
    watched = [Watched(url) for url in urls or [DEFAULT_URL]]
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
    with Live(picture(watched), console=screen, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                _look(pool, watched)
                live.update(picture(watched), refresh=True)
        except KeyboardInterrupt:
            pass


def picture(watched: Sequence[Watched]) -> Columns:
    """One panel per server, side by side if they fit."""
    return Columns([_panel(server) for server in watched])


def _panel(server: Watched) -> Panel:
    if server.page is None:
        problem = Text(server.problem or "", style="red")
        return Panel(problem, title=server.url, title_align="left", expand=False)
    seen = summary(server.page, server.before)
    parts = Group(
        Text(_state(seen)),
        *_rates(seen),
        Text(),
        _counts(seen),
        Text(),
        _stages(seen),
        *_problems(seen),
    )
    return Panel(parts, title=server.url, title_align="left", expand=False)


def _state(seen: dict[str, Any]) -> str:
    said = [f"{seen['mode']} mode, {seen['pages']} pages"]
    if seen["codec"] is not None:
        said.append(f"codec {seen['codec']}")
    if seen["suspended"] is not None:
        said.append(f"L3 is off ({seen['suspended'].replace('_', ' ')})")
    if seen["behind"] is not None:
        silent = ", not responding" if seen["behind_silent"] else ""
        said.append(f"shared L3: {seen['behind']}{silent}")
    said.append(f"{seen['running']} requests running, {seen['queued']} queued")
    return ", ".join(said)


def _rates(seen: dict[str, Any]) -> list[Text]:
    """What decisions about L3 hits go by."""
    names = {
        "l3_read": "L3 is read",
        "behind_read": "the shared L3",
        "load": "loaded to the device",
        "prefill": "computed",
    }
    rates = seen["tokens_per_second"]
    said = [f"{text} at {rates[name]:,.0f}" for name, text in names.items() if name in rates]
    return [Text(f"tokens per second: {', '.join(said)}")] if said else []


def _counts(seen: dict[str, Any]) -> Table:
    shown = table("", "", "per second#", "total#")
    for line in LINES:
        totals, rates = seen["totals"][line.counter], (seen["per_second"] or {}).get(line.counter)
        total = sum(totals.get(label, 0.0) for label in line.labels)
        if not total:
            continue
        rate = None if rates is None else sum(rates.get(label, 0.0) for label in line.labels)
        shown.add_row(line.name, _amount(rate, line.unit), _amount(total, line.unit))
    return shown


def _stages(seen: dict[str, Any]) -> Table:
    shown = table("", "stage", "per second#", "mean ms#", "p50 ms#", "p99 ms#", "total#")
    for name, stage in seen["stages"].items():
        times = (stage[key] for key in ("per_second", "mean_ms", "p50_ms", "p99_ms"))
        shown.add_row(name, *map(_decimal, times), f"{stage['count']:,.0f}")
    return shown


def _problems(seen: dict[str, Any]) -> list[Text]:
    counted = sorted((kind, count) for kind, count in seen["totals"]["problems"].items() if count)
    if not counted:
        return []
    text = ", ".join(f"{kind} {count:,.0f}" for kind, count in counted)
    return [Text(), Text(f"problems, each a cache miss: {text}", style="yellow")]


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return human_bytes(int(value)) if unit == "bytes" else f"{value:,.0f} {unit}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
