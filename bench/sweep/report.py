"""The table and the picture of a sweep."""

from __future__ import annotations

from typing import Any

from bench.harness.report import markdown
from bench.sweep.plans import AUTOMATIC, SWEEPS

Row = dict[str, Any]


def table_lines(results: Row) -> str:
    """Milliseconds by rate and method, how they compare, and time between tokens."""
    sweep = SWEEPS[results["sweep"]]
    heads, rows = [f"{sweep.slowed}, MB/s", *titles(results).values()], []
    if sweep.automatic:
        heads += ["fastest of the others / automatic", "R + H + K"]
    else:
        other = next(name for name in sweep.methods if name not in ("eager", "layerwise"))
        others = {"kv": "KV / eager", "file": "eager / file"}
        heads += ["eager / layer-wise", "eager / larger part", others[other]]
    for row in results["rates"]:
        ms, compared = row["ms"], []
        if sweep.automatic:
            fastest = min(ms[name] for name in sweep.methods)
            compared = [fastest / ms["auto"], " + ".join(map(str, row["partition"]))]
        else:
            larger = max(row["layerwise_parts_ms"].values())
            with_other = ms["kv"] / ms["eager"] if other == "kv" else ms["eager"] / ms["file"]
            compared = [ms["eager"] / ms["layerwise"], ms["eager"] / larger, with_other]
        times = (f"{ms[name]:,.0f}" for name in titles(results))
        rows.append([label(row, results), *times, *compared])
    table = markdown(heads, rows)
    if not (gaps := results.get("time_between_tokens")):
        return table
    means = {name: f"{found['mean_ms']:.0f}" for name, found in gaps.items()}
    cells = [(titles(results).get(name, "no restore"), mean) for name, mean in means.items()]
    return f"{table}\n\n{markdown(('during restores', 'ms between tokens'), cells)}"


def titles(results: Row) -> dict[str, str]:
    """The methods of the results, in words."""
    known = {**SWEEPS[results["sweep"]].methods, "auto": AUTOMATIC}
    return {name: known[name].title for name in results["rates"][0]["ms"]}


def label(row: Row, results: Row) -> str:
    """The rate of a row."""
    rate = row["mb_per_s"]
    balanced = " (balanced)" if rate and rate == results.get("balanced_mb_per_s") else ""
    return f"{rate:g}{balanced}" if rate else "no limit"


def draw(results: Row) -> Any:
    """Restore time by the rate."""
    from matplotlib.figure import Figure

    figure, rows = Figure(figsize=(8, 4.5), layout="constrained"), results["rates"]
    axes = figure.subplots()
    for name, title in titles(results).items():
        style = "o-" if name in ("auto", "eager") else "o--"
        axes.plot([row["ms"][name] for row in rows], style, label=title)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [label(row, results).replace(" (", "\n(") for row in rows])
    axes.set_xlabel(f"{SWEEPS[results['sweep']].slowed}, MB/s")
    axes.set_ylabel("restore, ms")
    axes.set_title(f"Restores by method, {results['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
