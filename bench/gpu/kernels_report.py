"""Tables, goals and the picture of the kernel benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.program import all_right, at_least

Row = dict[str, Any]

GOAL_ROWS = 1024
"""Goals hold from this number of tokens on."""


def print_projections(rows: list[Row]) -> None:
    """One line per model and number of tokens; shares are of the bare GEMM's speed."""
    print("\nproject_kv: microseconds, and share of the bare GEMM's speed")
    print(
        f"{'model':12} {'tokens':>6} {'GEMM':>8} {'TFLOP/s':>8} {'fused':>8} {'share':>6} "
        f"{'library':>8} {'share':>6} {'composed':>9} {'times':>6}  right"
    )
    for row in rows:
        print(
            f"{row['model']:12} {row['n']:6} {min(row['gemm_us'].values()):8.1f} "
            f"{row['gemm_tflops']:8.1f} {row['fused_us']:8.1f} {row['fused_share']:6.2f} "
            f"{row['library_us']:8.1f} {row['library_share']:6.2f} {row['composed_us']:9.1f} "
            f"{row['times_composed']:6.2f}  {'yes' if row['right'] else 'NO'}"
        )


def projection_goals(rows: list[Row]) -> list[Row]:
    """What the projection is to reach, and its worst case."""
    at = f"at {GOAL_ROWS} tokens or more"

    def worst(value: Callable[[Row], float]) -> Iterator[tuple[float, str]]:
        large = (row for row in rows if row["n"] >= GOAL_ROWS)
        return ((value(row), f"{row['model']}, {row['n']}") for row in large)

    return [
        at_least(
            f"project_kv, the better way: 0.92 of the bare GEMM's speed {at}",
            0.92,
            worst(lambda row: max(row["fused_share"], row["library_share"])),
        ),
        at_least(
            f"project_kv, each way: 0.80 of the bare GEMM's speed {at}",
            0.80,
            worst(lambda row: min(row["fused_share"], row["library_share"])),
        ),
        at_least(
            f"project_kv: 2 times as fast as composed of torch operations {at}",
            2.0,
            worst(lambda row: row["times_composed"]),
        ),
        all_right("project_kv: error at most torch's in the same type, nothing else written", rows),
    ]


def draw(results: Row) -> Any:
    """Shares of the GEMM's speed over the number of tokens, a panel per model."""
    from matplotlib.figure import Figure

    device, rows = results["device"], results["projection"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(3.2 * len(models), 3.4), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        tokens = [row["n"] for row in mine]
        gemm = [min(row["gemm_us"].values()) for row in mine]
        for name, style in (("fused", "o-"), ("library", "s-")):
            panel.plot(tokens, [row[f"{name}_share"] for row in mine], style, label=name)
        shares = [us / row["composed_us"] for us, row in zip(gemm, mine, strict=True)]
        panel.plot(tokens, shares, "^:", label="composed of torch operations")
        panel.axhline(0.92, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.05)
        panel.set_title(model)
        panel.set_xlabel("tokens")
    panels[0].set_ylabel("share of the bare GEMM's speed")
    panels[0].legend(loc="lower right", fontsize="small")
    figure.suptitle(f"K and V from hidden states, {device}")
    return figure
