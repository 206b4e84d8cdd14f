"""The kernels against what the device can do. Needs only torch and triton (matplotlib: a picture).

    python -m bench.gpu.kernels [--models Llama-2-7B ...] [--rows 256 1024 ...]

- projection: ``project_kv`` both ways, the bare GEMM of the same shape (the faster of both weight
  layouts) and the same operation composed of torch's; medians of CUDA events, cold L2 cache
- codecs, and gathering and scattering parts of pages in pinned memory: kernels_transfers.py
- correctness of both ways on the same random data, against float64
"""

from __future__ import annotations

import sys
from typing import Any

from bench.gpu import program
from bench.gpu.program import Row
from bench.gpu.shapes import LLAMA_7B, LLAMA_13B, OLMO_7B, OPT_30B, QWEN_8B
from bench.harness.report import markdown

SHAPES = (LLAMA_7B, LLAMA_13B, OPT_30B, QWEN_8B, OLMO_7B)


def main() -> int:
    parser = program.parser(__doc__)
    program.add_models(parser, SHAPES)
    parser.add_argument(
        "--rows", type=int, nargs="*", help="only these numbers of tokens, multiples of 64"
    )
    options, device, results = program.start(parser, "kernels", interpreted=True)

    from bench.gpu import kernels_projection, kernels_transfers

    shapes = [shape for shape in SHAPES if shape.name in options.models]
    kernels_projection.measure(device, shapes, options.rows, results)
    kernels_transfers.measure(device, options.rows, results)
    print(projection_table(results.of("projection")))
    print(f"\n{transfer_tables(results.of('transfers'))}")
    return results.finish(draw)


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
    """Codecs (GB/s of hidden states), encoded K and V, segments of pages (GB/s)."""
    tables = (
        (
            ("codec",),
            ("codec, GB/s", "encode", "decode", "copy", "goals missed", "right"),
            ("what", "encode_gbs", "decode_gbs", "copy_gbs", "missed", "right"),
        ),
        (
            ("segments",),
            (
                *("K and V, GB/s", "encode", "decode", "copy", "saved", "as they are"),
                *("loaded", "as they are", "goals missed", "right"),
            ),
            (
                *("what", "encode_gbs", "decode_gbs", "copy_gbs", "saved_gbs", "uncoded_save_gbs"),
                *("loaded_gbs", "uncoded_load_gbs", "missed", "right"),
            ),
        ),
        (
            ("gather", "scatter"),
            ("segments, GB/s", "", "speed", "plain copy", "share", "right"),
            ("kind", "what", "gbs", "copy_gbs", "share_of_copy", "right"),
        ),
    )
    return "\n\n".join(
        markdown(
            heads, ([told(row[part]) for part in parts] for row in rows if row["kind"] in kinds)
        )
        for kinds, heads, parts in tables
    )


def told(cell: Any) -> Any:
    """A list as its items with commas between them."""
    return (", ".join(cell) or "none") if isinstance(cell, list) else cell


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


if __name__ == "__main__":
    sys.exit(main())
