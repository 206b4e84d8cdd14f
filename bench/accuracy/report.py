"""What ``bench.accuracy`` found, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.accuracy.methods import EXACT
from bench.harness.report import markdown

Row = Mapping[str, Any]
CHOSEN = (EXACT, "KV, exp4", "KV, int8", "KV, fp8", "KV, pairs by attention, merged")


def table_lines(results: Row) -> str:
    """One line per method: bytes, errors of K and V, what the model says, recall by distance."""
    rows = whole(results)
    distances = list(dict.fromkeys(far for row in rows for far in row["recall"]))
    heads = (
        "history from",
        "bytes per token",
        "not kept",
        "error of K",
        "of V",
        "KL, nats",
        "largest",
    )
    more = ("same token", "NLL", *(f"recalled, {far} back" for far in distances))
    lines = []
    for row in rows:
        compared = "kl" in row
        lines.append(
            (
                row["method"],
                f"{row['bytes_per_token']:,}" if compared else None,
                row.get("not_kept"),
                *(f"{row[name]:.1e}" if name in row else None for name in ("k_error", "v_error")),
                *(f"{row[name]:.1e}" if compared else None for name in ("kl", "largest_kl")),
                f"{row['same']:,} of {row['tokens']:,}" if compared else None,
                f"{row['nll']:.4f}",
                *(_share(row["recall"].get(far)) for far in distances),
            )
        )
    return markdown((*heads, *more), lines)


def short_lines(results: Row) -> str:
    """What a server finds out at its start: how exactly K and V come back, what may be merged."""
    exactness, krul = results["exactness"], results["krul"]
    projected = "; ".join(group["exactness"] for group in exactness["projected"])
    merged = (
        f"{krul['may_be_merged']:.0f} of {krul['pairs']:.0f}; the merge that changes least changes "
        f"K or V by {krul['least_change']:.2f}"
    )
    rows = [
        ("projected from hidden states", projected),
        ("recomputed", exactness["recomputed"]),
        ("pairs of layers that codec `krul` may merge", merged),
    ]
    return markdown((f"{results['name']}, {results['dtype']}", "at the start of a server"), rows)


def chosen_lines(results: Row) -> str:
    """What codecs of K and V lose."""
    found = {row["method"]: row for row in whole(results)}
    rows = [
        (
            name,
            f"{found[name]['bytes_per_token']:,}",
            found[name]["bytes_per_token"] / found[EXACT]["bytes_per_token"],
            *(f"{found[name][key]:.1e}" for key in ("kl", "largest_kl")),
            f"{found[name]['same']:,} of {found[name]['tokens']:,}",
        )
        for name in CHOSEN
    ]
    heads = ("history from", "bytes per token", "of plain", "KL, nats", "largest", "same token")
    return markdown(heads, rows)


def whole(results: Row) -> list[Row]:
    """The reference and the methods that restore all layers alike."""
    reference = {"method": "no cache", **results["reference"]}
    return [reference, *(row for row in results["methods"] if row["layer"] is None)]


def by_layer(results: Row) -> dict[str, list[float]]:
    """KL of every layer restored alone, by what it is restored from."""
    found: dict[str, list[float]] = {}
    for row in results["methods"]:
        if row["layer"] is not None:
            found.setdefault(row["method"], []).append(row["kl"])
    return found


def _share(found: list[int] | None) -> str | None:
    return None if found is None else f"{found[0]} of {found[1]}"


def draw(results: Row) -> Any:
    """KL of every method, and of layers restored alone if there are any."""
    from matplotlib.figure import Figure

    rows = sorted((row for row in whole(results) if "kl" in row), key=lambda row: float(row["kl"]))
    # Behind restored K and V a turn is computed apart from its history, which rounds as well.
    least = max((row["kl"] for row in rows if row["method"] == EXACT), default=0.0)
    lossy = [row["kl"] for row in rows if row["kl"] > 1.01 * least]
    floor = min(lossy, default=1.0) / 10
    layers = by_layer(results)
    figure = Figure(figsize=(8.5, 4.5 + 3 * bool(layers)), layout="constrained")
    axes = figure.add_subplot(2 if layers else 1, 1, 1)
    for place, row in enumerate(rows):
        kl = row["kl"]
        if kl > 1.01 * least:
            axes.barh(place, kl, left=0, color="#dd8452")
            axes.text(kl, place, f" {kl:.1e}", va="center", fontsize=9)
        else:
            axes.text(floor, place, " as K and V themselves", va="center", fontsize=9)
    names = [f"{row['method']}, {row['bytes_per_token'] / 1024:.1f} KiB per token" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xscale("log")
    axes.set_xlim(floor, 8 * max(lossy, default=1.0))
    axes.set_xlabel("KL from a run without a cache, nats per token", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{results['name']} in {results['dtype']}: {len(rows) - len(lossy)} of {len(rows)} ways to "
        "keep a history change nothing",
        fontsize=11,
    )
    if layers:
        below = figure.add_subplot(2, 1, 2)
        for name, values in layers.items():
            below.plot(values, "o-", label=name)
        below.set_yscale("log")
        below.set_xlabel("layer restored from hidden states, the others exact", fontsize=9)
        below.set_ylabel("KL, nats per token", fontsize=9)
        below.grid(alpha=0.3)
        below.legend(fontsize=9)
    return figure
