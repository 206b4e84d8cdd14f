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

Prints a table and writes ``out/DEVICE/capture.json`` and
``capture.png``. ``--dry-run`` runs it on tiny shapes on the CPU, without graphs: its times mean
nothing, and it writes nothing unless ``--out`` names a folder.
"""

from __future__ import annotations

import sys

import torch

from bench.gpu import program
from bench.gpu.capture_report import draw, table
from bench.gpu.capture_steps import Decode, Prefill, decode_during_restores
from bench.gpu.devices import Device
from bench.gpu.program import Results
from bench.gpu.restore_models import SHAPES, Shape, build

BATCHES = (1, 16, 64, 256)
PREFILL, GRAPH_PREFILL = 8192, 2048
WAYS = ("none", "staged", "direct")


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--models", nargs="*", default=["Llama-2-7B"], help="shapes")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="decode batches")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    device = Device(options.dry_run)
    results = Results("capture", device.name, options)
    batches = [2, 3] if options.dry_run else options.batches
    measure(device, options.models, batches, results)
    print(table(results.of()))
    return results.finish(draw)


def measure(device: Device, models: list[str], batches: list[int], results: Results) -> None:
    """One row per model, kind of step and way of saving."""
    eager, recorded = (48, 32) if device.dry_run else (PREFILL, GRAPH_PREFILL)
    for full in SHAPES:
        if full.name not in models:
            continue
        shape = full.tiny() if device.dry_run else full

        def add(
            step: str, tokens: int, way: str, ms: float, right: bool, shape: Shape = shape
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
                add("decode", batch, "alone", alone, True)
                add("decode", batch, "during restores", during, right)


if __name__ == "__main__":
    sys.exit(main())
