"""The demo's picture: bytes a token and restore time, a bar for each method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hcache_backend.cli.demo_report import L3_METHODS, METHODS, title

_COLOURS = {"recompute": "#9aa0a6", "kv_offload": "#e8a33d", "hcache": "#2a7ab9"}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of ``report`` (the content of ``demo.json``) as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    methods = report["methods"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    size, time = figure.subplots(1, 2, width_ratios=(2, 3))
    _bars(size, L3_METHODS, [methods[name]["stored_bytes_per_token"] for name in L3_METHODS])
    size.set_title("bytes stored a token")
    times = [methods[name]["restore_ms_per_1k_tokens"] or 0.0 for name in METHODS]
    _bars(time, METHODS, times)
    time.set_title("ms to bring back 1000 tokens of history")
    figure.suptitle(
        f"hcache demo: {report['model']['architecture']}, {report['model']['dtype']}, "
        f"SGLang {report['sglang_version']}, {report['device']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _bars(axes: Any, names: tuple[str, ...], values: list[float]) -> None:
    bars = axes.bar(
        [title(name) for name in names],
        values,
        color=[_COLOURS[name] for name in names],
        width=0.6,
    )
    axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=3)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
