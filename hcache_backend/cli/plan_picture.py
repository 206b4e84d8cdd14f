"""The picture of ``hcache plan``: streams over time, layer by layer, for every method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hcache_backend.partition.plan import Plan

_COLOURS = {"recompute": "#b05fa8", "hidden": "#2a7ab9", "kv": "#e8a33d", None: "#9aa0a6"}
_ROWS = {"l3": 2, "transfer": 1, "compute": 0}
_MIN_LABEL = 0.02  # share of the width below which a layer's number would not fit


def draw(plan: Plan, titles: Mapping[str, str], path: Path) -> None:
    """Write the pipelines of the mix and of every pure method as a PNG, on one time axis.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(len(plan.choices), 1, height_ratios=(3, 2, 2, 2))
    longest = max(plan.seconds(name) for name in plan.choices)
    rows = {stream: row for stream, row in _ROWS.items() if row < 2 or plan.l3 == "first"}
    for axes, name in zip(panels, plan.choices, strict=True):
        # The partition alone fills its panel; the pure methods share one axis.
        end = 1e3 * (plan.seconds(name) if name == "mix" else longest)
        tasks = plan.timeline(name)
        for task in tasks:
            start, width = task.start * 1e3, (task.end - task.start) * 1e3
            row = _ROWS[task.stream]
            axes.barh(
                row,
                width,
                left=start,
                height=0.8,
                color=_COLOURS[task.method],
                edgecolor="white",
                linewidth=0.4,
            )
            label = "all" if task.layer is None else str(task.layer)
            if width > _MIN_LABEL * end:
                axes.text(start + width / 2, row, label, ha="center", va="center", fontsize=6)
        axes.set_yticks(list(rows.values()), list(rows))
        axes.set_xlim(0, end)
        axes.set_ylim(-0.5, len(rows) - 0.5)
        heading = f"{titles[name]}: {plan.seconds(name) * 1e3:,.1f} ms"
        axes.set_title(heading, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms")
    names: dict[str | None, str] = {"recompute": "recompute", "hidden": "hidden states", "kv": "KV"}
    if plan.l3 == "first":
        names[None] = "L3"
    handles = [Patch(color=_COLOURS[key], label=label) for key, label in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(
        f"{plan.model.family}, {plan.model.layers} layers, hidden size {plan.model.hidden}: "
        f"{plan.tokens:,} tokens on {plan.profile.device}"
        + (f" x {plan.tp}" if plan.tp > 1 else ""),
        fontsize=10,
    )
    figure.savefig(path, dpi=130, format="png")
