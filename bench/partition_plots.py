"""The picture of the simulated figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_BLUE, _ORANGE, _PURPLE, _GREY = "#2a7ab9", "#e8a33d", "#b05fa8", "#9aa0a6"


def draw(content: dict[str, Any], path: Path) -> None:
    """Figures 11 (platforms), 12 and 13 and the ring, one panel each, with the paper's numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), layout="constrained")
    panels: tuple[Callable[[Any, dict[str, Any]], None], ...] = (
        _platforms,
        _ablations,
        _by_tokens,
        _ring,
    )
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        axes.tick_params(labelsize=8)
        panel(axes, content)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _platforms(axes: Any, content: dict[str, Any]) -> None:
    rows = content["figure_11"]["platforms"]
    low, high = content["paper"]["figure_11"]["platforms, over KV"]
    axes.axhspan(low, high, color=_GREY, alpha=0.25, lw=0, label="paper, range")
    models = {"Llama-2-7B": _BLUE, "Llama-2-13B": _ORANGE, "OPT-30B": _PURPLE}
    for model, colour in models.items():
        places = [place for place, row in enumerate(rows) if row["model"] == model]
        heights = [rows[place]["over_kv"] for place in places]
        bars = axes.bar(places, heights, 0.7, color=colour, label=model)
        axes.bar_label(bars, labels=[f"{height:.2f}" for height in heights], fontsize=7, padding=1)
    points = {row["setting"]: row["paper"] for row in content["figure_11"]["implied"]}
    named = [place for place, row in enumerate(rows) if row["setting"] in points]
    values = [points[rows[place]["setting"]] for place in named]
    axes.plot(named, values, "kD", markersize=5, label="paper, this platform")
    names = [
        row["device"].replace(" SXM4", "") + (f" x{row['tp']}" if row["tp"] > 1 else "")
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), names, rotation=35, ha="right")
    axes.set_ylim(0, 2.9)
    axes.set_ylabel("restoration speed over KV offload")
    axes.set_title("Figure 11: platforms, pages in DRAM")
    axes.legend(fontsize=7, ncols=3, loc="upper left")


def _ablations(axes: Any, content: dict[str, Any]) -> None:
    rows = content["figure_12"]
    methods = {
        "hcache": ("the partition", _BLUE),
        "hidden": ("hidden states only", "#a9cce3"),
        "naive hybrid": ("naive hybrid: KV and recompute", _PURPLE),
        "kv": ("KV only", _ORANGE),
    }
    for number, (name, (label, colour)) in enumerate(methods.items()):
        xs = [place + (number - 1.5) * 0.2 for place in range(len(rows))]
        heights = [row["ms"][name] / row["ms"]["hcache"] for row in rows]
        bars = axes.bar(xs, heights, 0.19, color=colour, label=label)
        axes.bar_label(bars, labels=[f"{height:.2f}" for height in heights], fontsize=6, padding=1)
    names = [f"{_two_lines(row['kind'])}\n{_short(row['setting'])}" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylim(0, 3.6)
    axes.set_ylabel("restore time, the partition = 1")
    ranges = content["paper"]["figure_12"]
    hidden, naive = ranges["over hidden only, skewed"], ranges["over naive hybrid"]
    axes.set_title(
        f"Figure 12: ablations. Paper: hidden only {hidden[0]} to {hidden[1]} (skewed),\n"
        f"naive hybrid {naive[0]} to {naive[1]}"
    )
    axes.legend(fontsize=7, ncols=2, loc="upper right")


def _by_tokens(axes: Any, content: dict[str, Any]) -> None:
    paper = content["paper"]["figure_13"]
    names = {"paper's naive": "794 + 230 tokens", "paper's rounded": "768 + 256 tokens"}
    for place, name in enumerate(names):
        axes.hlines(
            100 * paper[name],
            place - 0.42,
            place + 0.42,
            color="black",
            label="paper" if not place else None,
        )
    series = [
        (row, order, colour)
        for row, colours in zip(
            content["figure_13"], ((_GREY, "#d0d4d8"), (_BLUE, "#a9cce3")), strict=True
        )
        for order, colour in zip(("recomputed last", "recomputed first"), colours, strict=True)
    ]
    for number, (row, order, colour) in enumerate(series):
        xs = [place + (number - 1.5) * 0.2 for place in range(len(names))]
        heights = [100 * row[order][name]["slower"] for name in names]
        label = f"compute share {row['compute_share']:.2f}, {order}"
        bars = axes.bar(xs, heights, 0.19, color=colour, label=label)
        axes.bar_label(bars, labels=[f"{height:+.1f}" for height in heights], fontsize=7, padding=1)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.set_ylim(-1, 22)
    axes.set_ylabel("slower than by layers, %")
    axes.set_title("Figure 13: split by tokens, 13B, one SSD")
    axes.legend(fontsize=7, loc="upper right")


def _ring(axes: Any, content: dict[str, Any]) -> None:
    settings = list(dict.fromkeys(row["setting"] for row in content["ring"]))
    for setting, colour in zip(settings, (_PURPLE, _ORANGE, _BLUE), strict=True):
        rows = [row for row in content["ring"] if row["setting"] == setting]
        for name, line, label in (("slower", "--", None), ("best_slower", "-", setting)):
            axes.plot(
                [row["ring"] for row in rows],
                [100 * row[name] for row in rows],
                line,
                color=colour,
                marker=".",
                label=label,
            )
    axes.set_xlabel("segments that have room on the device")
    axes.set_ylabel("slower than with room for all, %")
    axes.set_title("The ring: partition made for it (lines), for endless room (dashes)")
    axes.legend(fontsize=7)


def _two_lines(kind: str) -> str:
    resource, dash, word = kind.rpartition("-")
    return f"{resource}{dash}\n{word}"


def _short(setting: str) -> str:
    model, device, storage = setting.split(", ")
    device = device.removesuffix("-40G SXM4")
    return f"{model.removeprefix('Llama-2-')}, {device}\n{storage}"
