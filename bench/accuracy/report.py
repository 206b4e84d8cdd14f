"""The results of ``bench.accuracy``, as a table and a picture."""

from collections.abc import Mapping
from typing import Any

from bench.accuracy.methods import EXACT
from bench.harness.report import SMALLEST, Columns, Table, picture

Row = Mapping[str, Any]
CHOSEN = (EXACT, "KV, exp4", "KV, int8", "KV, pairs by attention, merged")


_DIVERGENCE = "KL, nats = kl :.1e | largest = largest_kl :.1e | same token = same_of"


def all_columns(results: Row) -> Columns:
    distances = dict.fromkeys(far for row in all_rows(results) for far in row["recall"])
    return (
        "history from = method | bytes per token = bytes_per_token :, | not kept = not_kept | "
        f"error of K = k_error :.1e | of V = v_error :.1e | {_DIVERGENCE} | NLL = nll :.4f",
        *(f"recalled, {far} back = shares.{far}" for far in distances),
    )


def start_rows(results: Row) -> list[Row]:
    """How exactly K and V come back, and the pairs that may be merged, as a server finds out at its
    start."""
    exactness, krul = results["exactness"], results["krul"]
    merged = "none: merges take K and V in 16 bits"
    if krul is not None:
        merged = (
            f"{krul['may_be_merged']:.0f} of {krul['pairs']:.0f}; the merge that changes least "
            f"changes K or V by {krul['least_change']:.2f}"
        )
    found = {
        "projected from hidden states": "; ".join(g["exactness"] for g in exactness["projected"]),
        "recomputed": exactness["recomputed"],
        "pairs of layers that codec `krul` may merge": merged,
    }
    return [{"what": what, "found": text} for what, text in found.items()]


def chosen(results: Row) -> list[Row]:
    found = {row["method"]: row for row in all_rows(results)}
    plain = found[EXACT]["bytes_per_token"]
    return [{**found[name], "of_plain": found[name]["bytes_per_token"] / plain} for name in CHOSEN]


def all_rows(results: Row) -> list[Row]:
    """The reference and the methods."""
    rows = [{"method": "no cache", **results["reference"]}, *results["methods"]]
    return [
        {
            **row,
            "same_of": f"{row['same']:,} of {row['tokens']:,}" if "kl" in row else None,
            "shares": {far: f"{hits} of {asked}" for far, (hits, asked) in row["recall"].items()},
        }
        for row in rows
    ]


def draw(results: Row) -> Any:
    """KL of every method."""
    rows = sorted(all_rows(results)[1:], key=lambda row: float(row["kl"]))
    # Behind restored K and V a turn is computed apart from its history, which rounds as well.
    least = max((row["kl"] for row in rows if row["method"] == EXACT), default=0.0)
    lossy = [row["kl"] for row in rows if row["kl"] > 1.01 * least]
    floor = min(lossy, default=1.0) / 10
    figure = picture(
        f"{results['name']} in {results['dtype']}: {len(rows) - len(lossy)} of {len(rows)} ways to "
        "keep a history change nothing"
    )
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        kl = row["kl"]
        if kl > 1.01 * least:
            axes.barh(place, kl, left=0, color="#dd8452")
            axes.text(kl, place, f" {kl:.1e}", va="center", fontsize=SMALLEST)
        else:
            axes.text(floor, place, " as K and V themselves", va="center", fontsize=SMALLEST)
    names = [f"{row['method']}, {row['bytes_per_token'] / 1024:.1f} KiB per token" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=SMALLEST)
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xscale("log")
    axes.set_xlim(floor, 8 * max(lossy, default=1.0))
    axes.set_xlabel("KL from a run without a cache, nats per token", fontsize=SMALLEST)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


TABLES: Mapping[str, Table] = {
    "table": Table(all_rows, all_columns),
    "short": Table(
        start_rows,
        lambda results: (
            f"{results['name']}, {results['dtype']} = what | at the start of a server = found"
        ),
    ),
    "chosen": Table(
        chosen,
        "history from = method | bytes per token = bytes_per_token :, | of plain = of_plain | "
        f"{_DIVERGENCE}",
    ),
}
