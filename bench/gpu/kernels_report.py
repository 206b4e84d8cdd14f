"""Tables and the picture of the kernel benchmark."""

from __future__ import annotations

from typing import Any

from bench.gpu.program import Row
from bench.harness.report import markdown


def projection_table(rows: list[Row]) -> str:
    """One line per model and number of tokens; shares are of the bare GEMM's speed."""
    heads = ("project_kv, us", "tokens", "GEMM", "TFLOP/s", "fused", "share", "library", "share")
    parts = (
        *("gemm_tflops", "fused_us", "fused_share", "library_us", "library_share"),
        *("composed_us", "times_composed", "right"),
    )
    lines = (
        (row["model"], row["n"], min(row["gemm_us"].values()), *(row[part] for part in parts))
        for row in rows
    )
    return markdown((*heads, "composed", "times", "right"), lines)


def transfer_tables(rows: list[Row]) -> str:
    """Codecs (GB/s of hidden states), segments of pages (GB/s), restores of a layer (us)."""
    tables = (
        (
            ("codec",),
            ("codec, GB/s", "encode", "decode", "copy", "right"),
            ("what", "encode_gbs", "decode_gbs", "copy_gbs", "right"),
        ),
        (
            ("gather", "scatter"),
            ("segments, GB/s", "", "speed", "plain copy", "share", "right"),
            ("kind", "what", "gbs", "copy_gbs", "share_of_copy", "right"),
        ),
        (
            ("restore",),
            ("restore, us", "gather", "product", "exact", "exp4", "times", "right"),
            ("what", "gather_us", "product_us", "exact_us", "exp4_us", "times_exact", "right"),
        ),
    )
    return "\n\n".join(
        markdown(heads, ([row[part] for part in parts] for row in rows if row["kind"] in kinds))
        for kinds, heads, parts in tables
    )


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
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.05)
        panel.set_title(model)
        panel.set_xlabel("tokens")
    panels[0].set_ylabel("share of the bare GEMM's speed")
    panels[0].legend(loc="lower right", fontsize="small")
    figure.suptitle(f"K and V from hidden states, {device}")
    return figure
