"""The kernels against the limits of the device. Needs only torch and triton.

- projection: ``project_kv`` both ways, the bare GEMM of the same shape (the faster of both weight
  layouts) and the same operation composed of torch's; medians of CUDA events, cold L2 cache
- codecs: kernels_transfers.py
- correctness of both ways on the same random data, against float64
"""

from collections.abc import Callable, Iterator, Sequence

from bench.gpu.program import GpuProgram, GpuRun, Row, models
from bench.gpu.shapes import LLAMA_7B, LLAMA_13B, OLMO_7B, OPT_30B, QWEN_8B
from bench.harness.program import Setting
from bench.harness.report import Column, Picture, Results, Series, Table, by

SHAPES = (LLAMA_7B, LLAMA_13B, OPT_30B, QWEN_8B, OLMO_7B)


def measure(run: GpuRun) -> None:
    from bench.gpu import kernels_projection, kernels_transfers

    shapes = [shape for shape in SHAPES if shape.name in run.given.models]
    kernels_projection.measure(run, shapes, run.given.rows)
    kernels_transfers.measure(run, run.given.rows)


def gemm_us(row: Row) -> float:
    """Of the faster layout of the weights."""
    return float(min(row["gemm_us"].values()))


def of_kind(kind: str) -> Callable[[Results], Sequence[Row]]:
    return lambda results: [row for row in results["transfers"] if row["kind"] == kind]


def missed(row: Row) -> str:
    return ", ".join(row["missed"]) or "none"


def shares(results: Results) -> Iterator[Row]:
    """Shares of the bare GEMM's speed."""
    for row in results["projection"]:
        composed = gemm_us(row) / row["composed_us"]
        yield {**row, "tokens": str(row["n"]), "composed_share": composed}


def _speeds(*names: str) -> list[Column]:
    return [Column(name.replace("_", " "), f"{name}_gbs") for name in names]


_RIGHT = (Column("goals missed", missed), Column("right", "right"))
PROGRAM = GpuProgram(
    name="kernels",
    doc=__doc__,
    measure=measure,
    interpreted=True,
    settings=(
        models(SHAPES),
        Setting("--rows", int, None, "only these numbers of tokens", {"nargs": "*"}),
    ),
    tables=(
        Table(
            "projection",
            (
                "project_kv, us = model | tokens = n",
                Column("GEMM", gemm_us),
                "TFLOP/s = gemm_tflops | fused = fused_us | of GEMM = fused_share | "
                "library = library_us | of it = library_share | composed = composed_us | "
                "times = times_composed | right",
            ),
        ),
        Table(
            of_kind("codec"),
            (Column("codec, GB/s", "what"), *_speeds("encode", "decode", "copy"), *_RIGHT),
        ),
        Table(
            of_kind("segments"),
            (Column("K and V, GB/s", "what"), *_speeds("encode", "decode", "copy"), *_RIGHT),
        ),
    ),
    draw=Picture(
        title=lambda results: f"K and V from hidden states, {results['device']}",
        panels=by("model", shares),
        x="tokens",
        x_label="tokens",
        y_label="share of the bare GEMM's speed",
        series=(
            Series("fused", "fused_share", "ours"),
            Series("library", "library_share", "file", "s-"),
            Series("composed of torch operations", "composed_share", "computed", "^:"),
        ),
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
