"""What a comparison found, as Markdown tables; see :mod:`.pictures`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bench.harness.report import markdown as table

SETTING_TITLES = {
    "disk": "L3 as it is",
    "balanced": "bus: copy = projection",
    "slow": "slow L3",
}
TIERS = ("device", "host", "storage")
_LAYERS = re.compile(r"hidden mode: (.*?), \d+ bytes")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a document: a table for each part."""
    parts = [
        f"# Methods compared on {report['device']}",
        f"SGLang {report['sglang_version']}, attention backend {report['attention_backend']}, "
        f"{report['date']}. Model: {report['model']}.",
    ]
    for part, paragraphs in (("restore", _restores), ("saving", _saving), ("load", _load)):
        if part in report:
            parts += paragraphs(report[part])
    return "\n\n".join(parts) + "\n"


def table_lines(results: Mapping[str, Any]) -> str:
    """The table of the part that ``results`` hold, for the marked blocks of the documentation."""
    if results.get("saving"):
        return _saving_table(results["saving"])
    if results.get("load"):
        return _load_table(results["load"])
    return _restore_table(results["restore"])


def _number(row: Mapping[str, Any] | None, part: str) -> str:
    return f"{row[part]:,.0f}" if row and row.get(part) else "-"


def layers(said: str) -> str:
    """How each layer comes back, from what a server of ours said; empty where it is not ours."""
    found = _LAYERS.search(said)
    if found:
        return found[1]
    return "KV pages" if "KV mode" in said else ""


def _restores(restore: Mapping[str, Any]) -> Iterator[str]:
    options = ", ".join(f"`{name}` {value}" for name, value in restore["hcache_options"].items())
    yield (
        f"## Restoring a history of {restore['tokens']:,} tokens\n\n"
        f"Milliseconds in the server, medians of {restore['rounds']}: from the start of the "
        "prefetch to the last layer on the device; over the balanced bus the load alone. L3 is "
        f"read from a cold page cache. Options of all servers of ours: {options}."
    )
    yield _restore_table(restore)
    methods = restore["methods"].values()
    if any(row["balanced"] or row["slow"] for row in methods):
        bus = restore["balanced_bus_bytes_per_second"] / 1e6
        l3 = restore["slow_l3_bytes_per_second"] / 1e6
        yield (
            f"Balanced bus: copies to the device are slowed down to {bus:,.0f} MB/s, at which "
            "hidden states take as long to copy as to project. Slow L3: reads are slowed down to "
            f"{l3:,.0f} MB/s, at which hidden states take three times as long to read as to "
            "project."
        )
    yield "\n".join(
        f"- {row['title']}, {title}: {text}"
        for setting, title in SETTING_TITLES.items()
        for row in methods
        if row[setting] and (text := layers(row[setting]["said"]))
    )
    yield from (f"Left out: {line}." for line in restore["left_out"])


def _restore_table(restore: Mapping[str, Any]) -> str:
    heads = (
        *("method", "bytes per token", "L3 as it is", "of it reading", "TTFT"),
        *("balanced bus", "slow L3"),
    )
    rows = [
        (
            row["title"],
            _bytes(row),
            _number(row["disk"], "ms"),
            _number(row["disk"], "l3_ms"),
            _number(row["disk"], "ttft_ms"),
            _number(row["balanced"], "load_ms"),
            _number(row["slow"], "ms"),
        )
        for row in restore["methods"].values()
    ]
    # Results of older runs have no TTFT.
    timed = any(row[heads.index("TTFT")] != "-" for row in rows)
    columns = [n for n, head in enumerate(heads) if timed or head != "TTFT"]
    return table([heads[n] for n in columns], [[row[n] for n in columns] for row in rows])


def _bytes(row: Mapping[str, Any]) -> str:
    """Bytes per token; of each setting if they differ, as those of automatic servers may."""
    tried = (_number(row[s], "bytes_per_token") for s in SETTING_TITLES if row[s])
    return " / ".join(dict.fromkeys(tried)) or "-"


def _saving(saving: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "## Saving hidden states while requests run\n\nMilliseconds between tokens of sequences "
        f"that run together, each with a history of {saving['history']:,} tokens: median (99%), "
        "and the median as a multiple of that without saving."
    )
    yield _saving_table(saving)


def _saving_table(saving: Mapping[str, Any]) -> str:
    batches = saving["batches"]
    return table(
        ("ms between tokens", *(f"{n} sequence{'s' if n > 1 else ''}" for n in batches)),
        [
            (way["title"], *(_gap(saving, name, batch) for batch in batches))
            for name, way in saving["ways"].items()
        ],
    )


def _gap(saving: Mapping[str, Any], way: str, batch: int) -> str:
    found, without = (saving["ways"][name]["gaps_ms"][str(batch)] for name in (way, "none"))
    shown = f"{found['median']:,.1f} ({found['p99']:,.1f})"
    return shown if way == "none" else f"{shown}, {found['median'] / without['median']:.2f}x"


def _load(load: Mapping[str, Any]) -> Iterator[str]:
    asked = load["workload"]
    yield (
        f"## Workload {asked['name']}: {asked['sessions']} sessions, {asked['requests']} requests\n"
        f"\nModel: {load['model']}. Histories of {asked['history_median']:,.0f} tokens (median; "
        f"at most {asked['history_max']:,}). Times in milliseconds, hits in % of prompt tokens."
    )
    yield _load_table(load)


def _load_table(load: Mapping[str, Any]) -> str:
    head = (
        *("method", "requests/s offered", "TTFT p50", "TTFT p90", "between tokens"),
        "requests/s done",
    )
    rows = []
    for row in load["methods"].values():
        for run in row["runs"]:
            shares = [run[f"{tier}_hit_rate"] for tier in TIERS]
            rows.append(
                (
                    row["title"],
                    f"{run['request_rate']}",
                    f"{1e3 * run['median_ttft']:,.0f}",
                    f"{1e3 * run['p90_ttft']:,.0f}",
                    f"{1e3 * run['average_tbt']:,.1f}",
                    f"{run['throughput']:.2f}",
                    " / ".join("?" if s is None else f"{100 * s:.0f}" for s in shares),
                )
            )
    return table((*head, "hits: device / host / storage"), rows)
