"""Restoring a history by every method, against the floor. Needs only torch and triton.

Layers have the models' shapes and random weights; their histories stand in pinned host memory:

- recompute: the layers' own forward pass with flash attention, prefill chunks of 8192 tokens
- kv offload: one bulk copy and a scatter a layer; with SGLang installed, the better of that and of
  layer-wise copies by its transfer kernel
- plain pages: K and V of every layer by that kernel, with SGLang installed
- own pages: K and V of whole pages; own pages, copy engine: by copies straight to the pool's slots
- hidden, hidden exp4: hidden states, exact and encoded without loss
- hidden + kv, hidden + recompute: as many layers by the other method as the measured times ask for

Each goes through the restore pipeline that the server uses. The floor is ``max(bytes / measured
copy
rate, FLOPs / measured GEMM rate)``. OPT-30B/TP4 is one of four ranks: it reads a quarter of the
hidden states, and a device copy stands for the all-gather of the rest; recomputation is without its
all-reduces, and measured once. ``--rates`` in GB/s slow the copy down as a slower bus or L3 would;
0
is the bus as it is. K and V are compared with those of the forward pass after every method.
"""

from collections.abc import Iterator
from itertools import groupby

from bench.gpu.program import GpuProgram, GpuRun, Row, models
from bench.gpu.restore_methods import History, Ways
from bench.gpu.restore_models import SHAPES, build, chosen
from bench.harness.program import Setting
from bench.harness.report import Picture, Results, Series, Table

DRAWN = ("Llama-2-7B", "4096")
TOKENS = ("1024", "2048", "4096", "8192", "16384", "4x4096")
RATES = (0.0, 28.0, 14.0, 7.0)


def measure(run: GpuRun) -> None:
    device, dry = run.device, run.device.dry_run
    tokens, rates = (("128", "2x128"), (0.0, 14.0)) if dry else (run.given.tokens, run.given.rates)
    bus = device.copy_rate()
    for shape in chosen(run.given.models, dry_run=dry):
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
                    row = {
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
                    }
                    said = f"{shape.name}, {text} tokens, {copy / 1e9:.1f} GB/s, {way.method}"
                    run.add(row, said)
            del history
            device.release()


def lengths_of(text: str) -> list[int]:
    """``4096`` is one history, ``4x4096`` four in one batch."""
    count, _, length = text.rpartition("x")
    return [int(length)] * int(count or 1)


def compared(results: Results) -> list[Row]:
    """Every measurement with its ratios to KV offload and recomputation of the same case."""
    found = []
    for case in _cases(results["rows"]):
        base = {row["method"]: row["ms"] for row in case}
        found += [
            {
                **row,
                "ktokens_s": row["tokens_per_s"] / 1e3,
                "of_kv": base["kv offload"] / row["ms"],
                "of_recompute": base["recompute"] / row["ms"],
            }
            for row in case
        ]
    return found


def panels(results: Results) -> dict[str, list[Row]]:
    cases = list(_cases(results["rows"]))
    case = next((c for c in cases if (c[0]["model"], c[0]["history"]) == DRAWN), cases[0])
    named = [{**row, "name": row["method"].replace(" ", ", ", 1)} for row in case]
    return {f"{case[0]['model']}, copies at {case[0]['copy_gb_s']:.0f} GB/s": named}


def _cases(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows of the same model, history and copy rate."""
    names = ("model", "history", "slowed", "copy_gb_s")
    for _, case in groupby(rows, lambda row: tuple(row[name] for name in names)):
        yield list(case)


PROGRAM = GpuProgram(
    name="restore",
    doc=__doc__,
    measure=measure,
    settings=(
        models(SHAPES),
        Setting("--tokens", str, TOKENS, "histories, 4x4096: a batch", {"nargs": "*"}),
        Setting("--rates", float, RATES, "GB/s; 0: the bus", {"nargs": "*"}),
    ),
    tables=Table(
        compared,
        "model | history | GB/s = copy_gb_s | method | ms | ktokens/s = ktokens_s | "
        "x KV = of_kv | x recompute = of_recompute | of floor = share_of_floor | "
        "copy idle, ms = copy_idle_ms | compute idle = compute_idle_ms | right | layers",
    ),
    draw=Picture(
        title=lambda results: f"Restores by method on {results['device']}",
        panels=panels,
        x="name",
        x_label="method",
        y_label="milliseconds",
        series=(Series("restore", "ms", "ours"), Series("floor", "floor_ms", "limit")),
        bars="%.1f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
