"""Whether copies over the bus run beside matrix products. Needs only torch and triton.

The product's own measurement (``plan/contention.py``), as a server makes it at its start: hidden
states of Llama-2-7B's width are copied from pages in pinned memory while other rows are multiplied
by the weights of K and V. Copies are done by the gather kernel with 2 to 32 programs, and by the
copy engine. The way that a server takes comes first.

A way keeps its speed beside products if copies and products overlap. If they add up, both together
keep one half. ``of one copy`` compares a way alone with one large copy from pinned memory.
"""

from functools import partial

import torch
from torch.nn.functional import linear

from bench.gpu.program import GpuProgram, GpuRun
from bench.harness.program import Setting, at_least
from bench.harness.report import Picture, Series, Table

WIDTH = 4096


def measure(run: GpuRun) -> None:
    """A row for each way to copy."""
    # A dry run interprets these.
    from hcache_backend.plan.contention import PRODUCT_TOKENS, PROGRAMS, TOKENS, Contention
    from hcache_kernels.launch import most_copy_programs

    device, given = run.device, run.given
    width, tokens, seconds = (64, 128, 0.01) if device.dry_run else (WIDTH, TOKENS, given.seconds)
    kinds, at = {"device": device.kind, "dtype": device.dtype}, torch.device(device.kind)
    weight = torch.randn(2 * width, width, **kinds)
    product = partial(linear, torch.randn(PRODUCT_TOKENS, width, **kinds), weight)
    bus = device.copy_rate()
    speeds = Contention(at, width * device.dtype.itemsize, product, seconds, tokens).measure()
    every = {n for n in PROGRAMS if n <= most_copy_programs(at)}
    right = every <= {speed.programs for speed in speeds}  # a way that is wrong is left out
    for speed in speeds:
        way = "copy engine" if speed.programs is None else f"gather kernel, {speed.programs}"
        row = {"way": way, **speed._asdict(), "tokens": tokens, "bus": bus}
        row |= {f"{name}_gb_s": getattr(speed, name) / 1e9 for name in ("alone", "beside")}
        run.add(row | {"of_bus": speed.alone / bus, "right": right}, f"copies by {way}", "speeds")


PROGRAM = GpuProgram(
    name="overlap",
    doc=__doc__,
    measure=measure,
    interpreted=True,
    settings=(Setting("--seconds", at_least(0.1), 5.0, "for all ways together"),),
    tables=Table(
        "speeds",
        (
            "copied by = way | GB/s alone = alone_gb_s | of one copy = of_bus",
            "GB/s beside = beside_gb_s | products keep = products | right",
        ),
    ),
    draw=Picture(
        title=lambda results: f"Copies beside matrix products, {results['device']}",
        panels=lambda results: {f"{results['speeds'][0]['tokens']} tokens": results["speeds"]},
        x="way",
        x_label="copied by",
        y_label="GB/s",
        series=(
            Series("alone", "alone_gb_s", "ours, all read"),
            Series("beside products", "beside_gb_s", "ours"),
        ),
        bars="%.1f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
