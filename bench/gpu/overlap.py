"""Whether copies over the bus run beside matrix products. Needs only torch and triton.

Hidden states of Llama-2-7B's width are copied from pages in pinned memory while other rows are
multiplied by the weights of K and V. Copies are done by the gather kernel with 2 to 32 programs,
of which the product takes 16, and by the copy engine, with a call for each page.

A way keeps its speed beside products if copies and products overlap. If they add up, both together
keep one half. ``of one copy`` compares a way alone with one large copy from pinned memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.nn.functional import linear

from bench.gpu.program import GpuProgram, GpuRun
from bench.harness.program import Setting, at_least
from bench.harness.report import Picture, Series, Table

WIDTH = 4096
PROGRAMS = (2, 4, 8, 16, 32)
TOKENS, PAGE, PRODUCT_TOKENS = 2048, 64, 8192  # of a copy, a page, a product
COLD_BYTES = 64 << 20
LEAST, MOST = 4, 1000  # repetitions of one measurement

Work = tuple[Any, Callable[[], object]]  # on which stream
Loop = tuple[Any, Callable[[], object], int]  # and how often


def together(device: torch.device, loops: Sequence[Loop]) -> list[float]:
    """Seconds of loops that begin together, each on its stream, launched so that all progress."""
    from hcache_backend.streams import current_stream

    start = current_stream(device).record(timed=True)
    for stream, _, _ in loops:
        stream.wait(start)
    turns = [((n + 1) / loop[2], i) for i, loop in enumerate(loops) for n in range(loop[2])]
    for _, index in sorted(turns):
        stream, work, _ = loops[index]
        stream.run(work)
    ends = [stream.record(timed=True) for stream, _, _ in loops]
    for end in ends:
        end.synchronize()
    return [max(start.elapsed_time(end), 1e-3) / 1e3 for end in ends]


def kept(times: int, alone: float, took: float, both: float) -> float:
    """Share of its own speed that a loop of ``times`` works kept while ``both`` loops worked. The
    slower loop worked alone after the other's end."""
    done = times * alone - (took - both)
    return min(1.0, max(done, alone / 2) / both)  # noise must not look like a standstill


def alone(device: torch.device, work: Work, share: float) -> float:
    """Seconds of one undisturbed ``work``, of which the first one compiles; in about ``share``."""
    first = min(*together(device, [(*work, 1)]), *together(device, [(*work, 1)]))
    times = min(MOST, max(LEAST, round(share / first)))
    return together(device, [(*work, times)])[0] / times


def beside(
    device: torch.device, works: Sequence[Work], ones: Sequence[float], share: float
) -> list[float]:
    """Share of its own speed that each of ``works`` keeps while all are done; ``ones`` are seconds
    of one alone, ``share`` those of all."""
    times = [max(LEAST, round(share / one)) for one in ones]
    took = together(device, [(*work, n) for work, n in zip(works, times, strict=True)])
    return [*map(kept, times, ones, took, [min(took)] * len(times))]


def measure(run: GpuRun) -> None:
    """A row for each way to copy."""
    # A dry run interprets these.
    from hcache_backend.streams import host_tensor, new_stream
    from hcache_kernels.pages.kernel import gather_launch

    device, given = run.device, run.given
    width, tokens, seconds = (64, 128, 0.01) if device.dry_run else (WIDTH, TOKENS, given.seconds)
    kinds, at = {"device": device.kind, "dtype": device.dtype}, torch.device(device.kind)
    weight = torch.randn(2 * width, width, **kinds)
    product = partial(linear, torch.randn(PRODUCT_TOKENS, width, **kinds), weight)
    bus, segment = device.copy_rate(), PAGE * width * device.dtype.itemsize
    pages = tokens // PAGE
    sets = 1 + COLD_BYTES // (pages * segment)
    memory = host_tensor((sets * pages, 2 * segment), torch.uint8, at).random_(0, 256)
    here = torch.randperm(sets * pages).view(sets, pages)
    out = torch.zeros((pages, segment), dtype=torch.uint8, device=at)
    copying, computing = new_stream(at, "copy"), (new_stream(at, "compute"), product)
    share = seconds / (2 * len(PROGRAMS) + 3)  # a way is measured alone and beside

    def by_kernel(programs: int) -> Callable[[], object]:
        turns, grid = cycle(here.to(at)), (programs,)
        return lambda: replace(gather_launch(memory, next(turns), segment, out), grid=grid).run()

    def by_engine() -> Callable[[], object]:
        rows = list(out)
        turns = cycle([[memory[page, segment:] for page in ids] for ids in here])
        return lambda: torch._foreach_copy_(rows, next(turns), non_blocking=True)

    one_product = alone(at, computing, share)
    ways = {f"gather kernel, {programs}": by_kernel(programs) for programs in PROGRAMS}
    for way, copy in {**ways, "copy engine": by_engine()}.items():
        out.zero_()
        together(at, [(copying, copy, 1)])
        right = torch.equal(out.cpu(), memory[here[0], segment:])
        one_copy = alone(at, (copying, copy), share)
        both: list[Work] = [(copying, copy), computing]
        copies, products = beside(at, both, [one_copy, one_product], share)
        rate = out.nbytes / one_copy
        row = {"way": way, "tokens": tokens, "bus": bus, "right": right, "products": products}
        row |= {"alone_gb_s": rate / 1e9, "beside_gb_s": rate * copies / 1e9, "of_bus": rate / bus}
        run.add(row, f"copies by {way}", "speeds")


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
