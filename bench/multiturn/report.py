"""What a run of ``bench.multiturn`` gives: lines of its log file, and a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.multiturn.run import Measured
from hcache_backend.cli.common import human_bytes, screen, table


def log_lines(measured: Sequence[Measured], tag: str) -> list[dict[str, Any]]:
    """A line for each run, as SGLang's ``bench_multiturn.py`` writes them."""
    now = datetime.now(UTC).isoformat()
    return [{"timestamp": now, "tag": tag, **run.parts} for run in measured]


def request_lines(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A line for each request of each run."""
    return [
        {"run": number, **request.as_json()}
        for number, run in enumerate(measured)
        for request in run.requests
    ]


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a JSONL file, which is made if it is missing.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in lines)


def show(measured: Sequence[Measured]) -> None:
    """Runs as a table, one column each, and what there is to say about them."""
    shown = table("", "", *(f"{_rate(run)} a second#" for run in measured))
    for title, keys, form in _ROWS:
        values = [[run.parts["summary"].get(key) for key in keys] for run in measured]
        shown.add_row(title, *(form(found) for found in values))
    for title, key in _MOVED:
        moved = [run.parts["l3"].get(key) for run in measured]
        if any(count is not None for count in moved):
            shown.add_row(title, *("-" if n is None else human_bytes(n) for n in moved))
    screen.print(shown)
    for line in notes(measured):
        screen.print(f"- {line}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def notes(measured: Sequence[Measured]) -> list[str]:
    """What a reader has to know about the numbers, each once."""
    found: dict[str, None] = {}
    for run in measured:
        for said, count in run.parts["errors"].items():
            found[f"{count} requests failed: {said}"] = None
        if run.parts["l3"].get("missing"):
            found[f"no bytes of L3: {run.parts['l3']['missing']}"] = None
        if run.parts["l3"].get("pages_dropped"):
            found[f"L3 dropped {run.parts['l3']['pages_dropped']:,} pages"] = None
        if run.parts["summary"]["storage_hit_rate"] is None:
            found[
                "the server does not say where hits were: start it with --enable-cache-report"
            ] = None
    return list(found)


def _rate(run: Measured) -> str:
    rate = run.parts["summary"]["request_rate"]
    return rate if isinstance(rate, str) else f"{rate:g}"


def _ms(values: Sequence[Any]) -> str:
    return " / ".join(f"{1e3 * value:,.1f}" for value in values)


def _counts(values: Sequence[Any]) -> str:
    return " / ".join(f"{value:,.0f}" for value in values)


def _rates(values: Sequence[Any]) -> str:
    return " / ".join(f"{value:,.1f}" for value in values)


def _shares(values: Sequence[Any]) -> str:
    return " / ".join("?" if value is None else f"{100 * value:.1f}" for value in values)


def _quartet(name: str) -> tuple[str, ...]:
    return tuple(f"{kind}_{name}" for kind in ("average", "median", "p90", "p99"))


_ROWS = (
    ("requests (failed)", ("total_requests", "failed_requests"), _counts),
    ("prompt / reply, tokens", ("average_prompt_len", "average_output_len"), _counts),
    ("TTFT, ms: avg / p50 / p90 / p99", _quartet("ttft"), _ms),
    ("between tokens, ms", _quartet("itl"), _ms),
    ("latency, ms", _quartet("latency"), _ms),
    ("requests per second", ("throughput",), _rates),
    (
        "tokens per second: prompts / replies",
        ("input_token_throughput", "output_token_throughput"),
        _counts,
    ),
    ("prompt tokens from a cache, %", ("cache_hit_rate",), _shares),
    (
        "  device / host / storage",
        ("device_hit_rate", "host_hit_rate", "storage_hit_rate"),
        _shares,
    ),
)
_MOVED = (
    ("L3 reads", "bytes_read"),
    ("L3 writes", "bytes_written"),
    ("restored to the device", "bytes_restored"),
)
