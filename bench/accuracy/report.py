"""What ``bench.accuracy`` found, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.harness.report import markdown

Row = Mapping[str, Any]


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
    """KL over bytes, KL by layer, recall by distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    sizes, layers, recall = figure.subplots(1, 3)
    for row in whole(results):
        shares = {int(far): hits / of for far, (hits, of) in row["recall"].items()}
        recall.plot([str(far) for far in shares], list(shares.values()), "o-", label=row["method"])
        if "kl" in row:
            sizes.plot(row["bytes_per_token"], row["kl"], "o", label=row["method"])
    sizes.set_yscale("log")
    sizes.set_xlabel("bytes per token")
    sizes.set_title("KL from a run without a cache, nats per token", fontsize=10)
    for name, values in by_layer(results).items():
        layers.plot(values, "o-", label=name)
    layers.set_yscale("log")
    layers.set_xlabel("layer restored from hidden states, the others exact")
    layers.set_title("KL by layer", fontsize=10)
    recall.set_ylim(-0.05, 1.05)
    recall.set_xlabel("tokens back, at most")
    recall.set_title("values recalled from the history", fontsize=10)
    for axes in (sizes, layers, recall):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    model = results["name"]
    figure.suptitle(f"{model}, {results['dtype']}, {results['device']}", fontsize=9)
    return figure
