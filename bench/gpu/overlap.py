"""Whether copies over the bus run beside matrix products. Needs only torch and triton.

    python -m bench.gpu.overlap [--pages 64] [--layers 12]

Layer by layer, hidden states of Llama-2-7B's width come from pages in pinned memory to one of three
buffers on one stream, and are multiplied by the weights of K and V on another, as in a restore.
Copies are done by:

- the product's gather kernel, whose grid covers the pages
- the same by a few programs that go through the pages in turn
- the copy engine, a copy a page, and in one piece (what no layout of pages allows)

Each is measured alone and with the products. Where they overlap, both together take as long as the
longer one; where they do not, as long as their sum.

Prints a table and writes ``out/DEVICE/overlap.json`` (row by row) and ``overlap.png``.
``--dry-run`` runs it on tiny shapes under Triton's interpreter: its times mean nothing, and it
writes nothing unless ``--out`` names a folder.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.gpu import program
from bench.gpu.interpreted import interpret
from bench.harness.report import markdown

WIDTH = 4096
PROGRAMS = (2, 4, 8, 16, 32, 64, 132)


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--pages", type=int, default=64, help="of the history, 64 tokens each")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    options = parser.parse_args()
    if options.dry_run:
        interpret()
        options.pages, options.layers = 2, 4
    program.require_device(parser, dry_run=options.dry_run)

    from bench.gpu.devices import Device

    device = Device(options.dry_run)
    results = program.Results("overlap", device.name, options)
    measure(device, options.pages, options.layers, results)
    print(table(results.of()))
    return results.finish(draw)


def measure(device: Any, pages: int, layers: int, results: program.Results) -> None:
    """One row per way of copying."""
    import torch

    from bench.gpu.overlap_layers import Layers

    with torch.inference_mode():
        work = Layers(device, pages, 64 if device.dry_run else WIDTH, layers)
        gemm_us = work.microseconds(None, multiply=True)
        for name, copy in work.copies((1, 3) if device.dry_run else PROGRAMS).items():
            alone, both = (work.microseconds(copy, multiply=m) for m in (False, True))
            row = {
                "way": name,
                "tokens": work.tokens,
                "gemm_us": gemm_us,
                "copy_us": alone,
                "both_us": both,
                "copy_gb_s": 1e-3 * work.bytes / alone,
                "longer_us": max(gemm_us, alone),
                "sum_us": gemm_us + alone,
                # 1: the shorter one costs nothing; 0: they add up.
                "overlap": (gemm_us + alone - both) / min(gemm_us, alone),
                "right": work.is_right(copy),
            }
            results.add(row, f"{name}, {work.tokens} tokens")
    device.release()


def table(rows: list[program.Row]) -> str:
    """One line per way; times in microseconds per layer."""
    heads = ("copied by", "GB/s", "copy", "product", "both", "longer", "sum", "overlap", "right")
    parts = ("way", "copy_gb_s", "copy_us", "gemm_us", "both_us", "longer_us", "sum_us")
    return markdown(heads, ([row[part] for part in (*parts, "overlap", "right")] for row in rows))


def draw(results: program.Row) -> Any:
    """Both together, against the longer one and the sum."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    figure = Figure(figsize=(8, 0.4 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row["both_us"] for row in rows], 0.6, color="#4477aa", label="both")
    for name, colour in (("longer_us", "#228833"), ("sum_us", "#ee6677")):
        label = name.removesuffix("_us")
        axes.plot(
            [row[name] for row in rows], places, "|", markersize=14, color=colour, label=label
        )
    axes.set_yticks(places, [row["way"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds per layer")
    axes.set_title(
        f"Copies beside matrix products, {rows[0]['tokens']} tokens, {results['device']}"
    )
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
