"""The time that capture adds to decode steps and to prefill. Needs only torch and triton.

Layers of Llama-2-7B's shape with random weights attend to 1024 tokens per request. They have no
embedding and LM head, so shares are of a little less than the real step.

- none: the step alone
- staged: two-stage capture as the server does it: one copy kernel per layer, recorded in the graph,
  and one transfer to the shadow pages per step, on its own stream

Decode steps replay a CUDA graph; prefill of 8192 tokens runs eagerly, and prefill of 2048 also
replays a graph, so all its rows wait in staging at once. Decode steps of other requests run beside
restores of 4096 tokens. After each run the shadow pages are compared with the inputs of the last
step's projections.
"""

from itertools import product

from bench.gpu.capture_steps import decode, decode_during_restores, prefill
from bench.gpu.program import GpuProgram, GpuRun, Row, models
from bench.gpu.restore_models import SHAPES, build, chosen
from bench.gpu.shapes import Shape
from bench.harness.program import Setting
from bench.harness.report import Picture, Results, Series, Table

BATCHES = (1, 16, 64, 256)
PREFILL, GRAPH_PREFILL = 8192, 2048
WAYS = ("none", "staged")


def measure(run: GpuRun) -> None:
    device = run.device
    eager, recorded = (48, 32) if device.dry_run else (PREFILL, GRAPH_PREFILL)
    batches = [2, 3] if device.dry_run else run.given.batches
    for shape in chosen(run.given.models, dry_run=device.dry_run):
        made = (device, shape, build(shape, device.kind, device.dtype))

        def add(
            step: str, tokens: int, way: str, ms: float, right: bool | None, shape: Shape = shape
        ) -> None:
            row = {"model": shape.name, "step": step, "tokens": tokens, "way": way, "ms": ms}
            run.add({**row, "right": right}, f"{shape.name}, {step} of {tokens}, {way}")

        for batch, way in product(batches, WAYS):
            add("decode", batch, way, *decode(*made, batch).run(way))
        for way in WAYS:
            add("prefill graph", recorded, way, *prefill(*made, recorded, graph=True).run(way))
        for way in WAYS:
            add("prefill", eager, way, *prefill(*made, eager).run(way))
        for batch in batches:
            alone, during, right = decode_during_restores(*made, batch)
            add("decode", batch, "alone", alone, None)
            add("decode", batch, "during restores", during, right)


def overheads(results: Results) -> list[Row]:
    """Rows with their addition to the same step with nothing beside it, in percent."""
    alone = {_step(row): row["ms"] for row in results["rows"] if row["way"] in ("none", "alone")}
    return [
        {**row, "adds": None if row["right"] is None else 100 * (row["ms"] / alone[_step(row)] - 1)}
        for row in results["rows"]
    ]


def _step(row: Row) -> tuple[object, ...]:
    restores = row["way"] in ("alone", "during restores")
    return (*(row[name] for name in ("model", "step", "tokens")), restores)


def panels(results: Results) -> dict[str, list[Row]]:
    found: dict[str, dict[tuple[object, ...], Row]] = {}
    for row in overheads(results):
        steps = found.setdefault(row["model"], {})
        step = steps.setdefault(_step(row)[:3], {"name": f"{row['step']}, {row['tokens']}"})
        step[row["way"]] = row["adds"]
    return {model: list(steps.values()) for model, steps in found.items()}


PROGRAM = GpuProgram(
    name="capture",
    doc=__doc__,
    measure=measure,
    settings=(
        models(SHAPES, ["Llama-2-7B"]),
        Setting("--batches", int, BATCHES, "decode batches", {"nargs": "*"}),
    ),
    tables=Table(overheads, "model | step | tokens | saving = way | ms | adds, % = adds | right"),
    draw=Picture(
        title=lambda results: f"What saving and restoring add to steps on {results['device']}",
        panels=panels,
        x="name",
        x_label="step, tokens",
        y_label="added to the step, %",
        series=(
            Series("saving", "staged", "ours"),
            Series("during restores", "during restores", "ours, all read"),
        ),
        bars="%.1f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
