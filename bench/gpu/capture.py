"""What capture adds to decode steps and to prefill. Needs only torch and triton.

    python -m bench.gpu.capture [--models Llama-2-7B ...] [--batches 1 16 64 256]

Layers of Llama-2-7B's shape with random weights (attention over 1024 tokens per request; without
embedding and LM head, so shares are of a little less than the real step):

- none: the step alone
- staged: two-stage capture as the server does it: one copy kernel per layer, recorded in the graph,
  and one transfer to the shadow pages per step, on its own stream
- direct: the paper's DirectIO variant: every layer's rows go straight to the pages in host memory,
  on the step's own stream (paper section 4.2.2)

Decode steps replay a CUDA graph; prefill of 8192 tokens runs eagerly, and prefill of 2048 also
replays a graph (staged, all its rows wait in staging at once). Also decode steps of other
requests while restores of 4096 tokens run. After each run the shadow pages are compared with what
the last step's projections received.
"""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

import torch

from bench.gpu import program
from bench.gpu.capture_steps import Decode, Prefill, decode_during_restores
from bench.gpu.program import Device, Results, Row
from bench.gpu.restore_models import SHAPES, build, chosen
from bench.gpu.shapes import Shape
from bench.harness.report import markdown

BATCHES = (1, 16, 64, 256)
PREFILL, GRAPH_PREFILL = 8192, 2048
WAYS = ("none", "staged", "direct")


def main() -> int:
    parser = program.parser(__doc__)
    program.add_models(parser, SHAPES, default=["Llama-2-7B"])
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="decode batches")
    options, device, results = program.start(parser, "capture")
    batches = [2, 3] if options.dry_run else options.batches
    measure(device, options.models, batches, results)
    print(table(results.of()))
    return results.finish(draw)


def measure(device: Device, models: list[str], batches: list[int], results: Results) -> None:
    """One row per model, kind of step and way of saving."""
    eager, recorded = (48, 32) if device.dry_run else (PREFILL, GRAPH_PREFILL)
    for shape in chosen(models, dry_run=device.dry_run):

        def add(
            step: str, tokens: int, way: str, ms: float, right: bool | None, shape: Shape = shape
        ) -> None:
            row = {"model": shape.name, "step": step, "tokens": tokens, "way": way, "ms": ms}
            results.add({**row, "right": right}, f"{shape.name}, {step} of {tokens}, {way}")

        with torch.inference_mode():
            layers = build(shape, device.kind, device.dtype)
            for batch in batches:
                for way in WAYS:
                    add("decode", batch, way, *Decode(device, shape, layers, batch).run(way))
            for way in WAYS:
                step = Prefill(device, shape, layers, recorded, graph=True)
                add("prefill graph", recorded, way, *step.run(way))
            for way in WAYS:
                add("prefill", eager, way, *Prefill(device, shape, layers, eager).run(way))
            for batch in batches:
                alone, during, right = decode_during_restores(device, shape, layers, batch)
                add("decode", batch, "alone", alone, None)
                add("decode", batch, "during restores", during, right)


def overhead(rows: list[Row], row: Row) -> float | None:
    """Share that ``row`` takes longer than the same step with nothing beside it.

    None where that is the row itself.
    """
    base = "alone" if row["way"] in ("alone", "during restores") else "none"
    if row["way"] == base:
        return None
    names = ("model", "step", "tokens")
    (alone,) = (
        other["ms"]
        for other in rows
        if other["way"] == base and all(other[name] == row[name] for name in names)
    )
    return float(row["ms"] / alone - 1)


def table(rows: list[Row]) -> str:
    """One line per measurement."""
    heads = ("model", "step", "tokens", "saving", "ms", "adds, %", "right")
    lines = []
    for row in rows:
        added = overhead(rows, row)
        shown = (row[name] for name in ("model", "step", "tokens", "way", "ms"))
        lines.append((*shown, added and 100 * added, row["right"]))
    return markdown(heads, lines)


def draw(results: Row) -> Any:
    """What every way adds, by step."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    figure = Figure(figsize=(8, 4), constrained_layout=True)
    axis = figure.subplots()
    colours = {"staged": "#4477aa", "direct": "#ee6677", "during restores": "#ccbb44"}
    shown = [row for row in rows if row["way"] in colours]
    labels, place = [], 0.0
    for (model, step, tokens), group in groupby(
        sorted(shown, key=lambda row: (row["model"], row["step"], row["tokens"])),
        lambda row: (row["model"], row["step"], row["tokens"]),
    ):
        first = place
        for row in group:
            axis.bar(place, 100 * (overhead(rows, row) or 0.0), 0.8, color=colours[row["way"]])
            place += 1
        labels.append(((first + place - 1) / 2, f"{step}\n{tokens}\n{model}"))
        place += 0.7
    axis.set_xticks([at for at, _ in labels], [text for _, text in labels], fontsize=8)
    axis.set_ylabel("added to the step, %")
    axis.axhline(0, color="black", linewidth=0.8)
    for way, colour in colours.items():
        axis.bar(0, 0, color=colour, label=way)
    axis.legend(frameon=False)
    axis.set_title(f"What saving and restoring add to steps on {results['device']}")
    return figure


if __name__ == "__main__":
    sys.exit(main())
