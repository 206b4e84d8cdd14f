"""Restoring a history by every method, against the floor. Needs only torch and triton.

    python -m bench.gpu.restore [--models Llama-2-7B ...] [--tokens 4096 4x4096 ...] [--rates 0 14]

Layers of the models' shapes with random weights; their histories stand in pinned host memory:

- recompute: the layers' own forward pass with flash attention, prefill chunks of 8192 tokens
- kv offload: the better of one bulk copy and of layer-wise copies by SGLang's transfer kernel (a
  kernel of the same kind where SGLang is not installed)
- hidden, hidden exp4: hidden states, exact and encoded without loss
- hidden + kv, hidden + recompute: as many layers by the other method as the measured times ask for

Each through the restore pipeline that the server uses. The floor is ``max(bytes / measured copy
rate, FLOPs / measured GEMM rate)``. OPT-30B/TP4 is one of four ranks: it reads a quarter of the
hidden states, and a device copy stands for the all-gather of the rest; recomputation is without its
all-reduces, and measured once, since it copies nothing. ``--rates`` in GB/s slow the copy down as a
slower bus or L3 would; 0 is the bus as it is. K and V are compared with those of the forward pass
after every method.

Prints a table and writes ``out/DEVICE/restore.json`` (row by row) and
``restore.png`` (a timeline of the streams). ``--dry-run`` runs it on tiny shapes on the CPU: its
times mean nothing, and it writes nothing unless ``--out`` names a folder.
"""

from __future__ import annotations

import sys

import torch

from bench.gpu import program
from bench.gpu.devices import Device
from bench.gpu.program import Results
from bench.gpu.restore_methods import History, Ways
from bench.gpu.restore_models import SHAPES, build
from bench.gpu.restore_report import draw, table

TOKENS = ("1024", "2048", "4096", "8192", "16384", "4x4096")
RATES = (0.0, 28.0, 14.0, 7.0)


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--tokens", nargs="*", default=TOKENS, help="histories, 4x4096: a batch")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="GB/s; 0: the bus")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    device = Device(options.dry_run)
    if options.dry_run:
        options.tokens, options.rates = ["128", "2x128"], [0.0, 14.0]
    results = Results("restore", device.name, options)
    measure(device, options.models, options.tokens, options.rates, results)
    print(table(results.of()))
    return results.finish(draw)


def measure(
    device: Device,
    models: list[str] | None,
    tokens: list[str],
    rates: list[float],
    results: Results,
) -> None:
    """One row per model, history, copy rate and method."""
    bus = device.copy_rate()
    for full in SHAPES:
        if models and full.name not in models:
            continue
        shape = full.tiny() if device.dry_run else full
        with torch.inference_mode():
            layers = build(shape, device.kind, device.dtype)
            for text in tokens:
                lengths = lengths_of(text)
                history = History(device, shape, layers, lengths)
                gemm = device.gemm_rate(sum(lengths), shape.hidden, 2 * shape.width)
                ways = Ways(history, bus)
                for rate in rates:
                    copy = min(bus, rate * 1e9) if rate else bus
                    for way in ways.at(copy):
                        floor = 1e3 * max(way.bytes / copy, way.flops / gemm)
                        spans = [] if way.report is None else way.report.spans
                        results.add(
                            {
                                "model": shape.name,
                                "history": text,
                                "tokens": sum(lengths),
                                "copy_gb_s": copy / 1e9,
                                "slowed": bool(rate),
                                "gemm_tflops": gemm / 1e12,
                                "method": way.method,
                                "layers": way.layers,
                                "ms": way.milliseconds,
                                "tokens_per_s": 1e3 * sum(lengths) / way.milliseconds,
                                "bytes": way.bytes,
                                "floor_ms": floor,
                                "share_of_floor": floor / way.milliseconds,
                                "copy_idle_ms": way.report and way.report.idle_ms("copy"),
                                "compute_idle_ms": way.report and way.report.idle_ms("compute"),
                                "right": way.right,
                                "spans": [span._asdict() for span in spans],
                            },
                            f"{shape.name}, {text} tokens, {copy / 1e9:.1f} GB/s, {way.method}",
                        )
                del history
                device.release()


def lengths_of(text: str) -> list[int]:
    """``4096`` is one history, ``4x4096`` four in one batch."""
    count, _, length = text.rpartition("x")
    return [int(length)] * int(count or 1)


if __name__ == "__main__":
    sys.exit(main())
