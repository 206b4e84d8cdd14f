"""Whether copies over the bus run beside matrix products. Needs only torch and triton.

Layer by layer, hidden states of Llama-2-7B's width come from pages in pinned memory to one of three
buffers on one stream, and are multiplied by the weights of K and V on another, as in a restore.
Copies are done by:

- the product's gather kernel, by so many programs that go through the pages in turn
- the copy engine: all pages in one call, as the product does it, a copy a page, and in one piece
  (what no layout of pages allows)

Each is measured alone and with the products. Where they overlap, both together take as long as the
longer one; where they do not, as long as their sum. Then the product measures the same as a server
does at its start, and says in which way it would copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.program import Device, GpuProgram, GpuRun
from bench.gpu.shapes import HEADER_BYTES, PAGE
from bench.harness.program import Setting, at_least
from bench.harness.report import Column, Picture, Series, Table, columns

WIDTH = 4096
PROGRAMS = (2, 4, 8, 16, 32, 64, 132, 1024)
BUFFERS, SPARE_PAGES = 3, 8
HEAD_START = 0.02
"""Seconds that a stream is busy before what is measured: some hundred launches take less."""

TIMES = ("copy", "gemm", "both", "longer", "sum")

Copy = Callable[[int, torch.Tensor], object]
"""Launches the copy of a layer to a buffer."""


class Layers:
    """Pages in host memory, buffers and weights.

    Args:
        device: The GPU, or the CPU, which interprets the kernels.
        count: Pages.
        width: Values of a hidden state.
        layers: How many.

    Attributes:
        tokens: In all pages.
        bytes: Size of a layer.
    """

    def __init__(self, device: Device, count: int, width: int, layers: int) -> None:
        self._device, self._layers = device, layers
        self.tokens = count * PAGE
        self._segment = PAGE * width * 2
        self._pages = device.pinned(count + SPARE_PAGES, HEADER_BYTES + layers * self._segment)
        # Zeros would be faster than data.
        values = torch.randn(layers * self._segment // 2).bfloat16().view(torch.uint8)
        self._pages[:, HEADER_BYTES:] = values
        self._pages[:, HEADER_BYTES] = torch.arange(len(self._pages))  # tells pages apart
        self._order = torch.randperm(len(self._pages))[:count]
        self._ids = self._order.to(device.kind)
        self._plain = device.pinned(count, self._segment)
        self._plain.copy_(self._first_layer())
        kinds = {"device": device.kind, "dtype": device.dtype}
        size = (count, self._segment)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device.kind) for _ in range(BUFFERS)
        ]
        self._weights = [torch.randn(2 * width, width, **kinds) for _ in range(layers)]
        self._out = torch.empty(self.tokens, 2 * width, **kinds)
        self.bytes = self._plain.nbytes
        self._streams = [] if device.dry_run else [torch.cuda.Stream() for _ in range(2)]

    def copies(self, programs: Sequence[int]) -> dict[str, Copy]:
        """Ways to copy a layer; one for each number of programs."""
        return {
            **{f"gather kernel, {n} programs": partial(self._gather, n) for n in programs},
            **self._one_call_if_it_works(),
            "copy engine, a copy a page": self._engine,
            "copy engine, one copy": self._one_copy,
        }

    def _offset(self, layer: int) -> int:
        return HEADER_BYTES + layer * self._segment

    def _gather(self, programs: int, layer: int, buffer: torch.Tensor) -> None:
        from hcache_kernels.page_kernels import gather_launch

        gather_launch(self._pages, self._ids, self._offset(layer), buffer, programs).run()

    def _one_call_if_it_works(self) -> dict[str, Copy]:
        from hcache_kernels.copy_engine import NoCopyEngine

        try:
            self.is_right(self._one_call)
        except NoCopyEngine as error:
            print(f"copy engine, all pages in one call: left out: {error}", flush=True)
            return {}
        return {"copy engine, all pages in one call": self._one_call}

    def _one_call(self, layer: int, buffer: torch.Tensor) -> None:
        from hcache_kernels.pages import gather_pages

        gather_pages(self._pages, self._order, self._offset(layer), self._segment, buffer)

    def _engine(self, layer: int, buffer: torch.Tensor) -> None:
        at = self._offset(layer)
        for row, page in zip(buffer, self._order.tolist(), strict=True):
            row.copy_(self._pages[page, at : at + self._segment], non_blocking=True)

    def _one_copy(self, layer: int, buffer: torch.Tensor) -> None:
        buffer.copy_(self._plain, non_blocking=True)

    def speeds(self, seconds: float) -> Sequence[Any]:
        """What a server finds out about copies beside products, the way that it takes first."""
        from hcache_backend.plan.contention import PRODUCT_TOKENS, Contention

        row_bytes, device = self._segment // PAGE, torch.device(self._device.kind)
        rows = torch.randn(
            PRODUCT_TOKENS, self._weights[0].shape[1], device=device, dtype=self._device.dtype
        )
        product = partial(functional.linear, rows, self._weights[0])
        return Contention(device, row_bytes, product, seconds, self.tokens).measure()

    def most_programs(self) -> int:
        """Programs that a server's copies have on this device at most."""
        from hcache_kernels.launch import most_copy_programs

        return most_copy_programs(torch.device(self._device.kind))

    def _multiply(self, layer: int) -> None:
        rows = self._buffers[layer % BUFFERS].view(self._device.dtype).view(self.tokens, -1)
        torch.mm(rows, self._weights[layer].t(), out=self._out)

    def is_right(self, copy: Copy) -> bool:
        """Whether ``copy`` brings the first layer."""
        self._buffers[0].fill_(0)
        if self._streams:  # the copy engine takes no batch on the default stream
            self._streams[0].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._streams[0]):
                copy(0, self._buffers[0])
            torch.cuda.synchronize()
        else:
            copy(0, self._buffers[0])
        return torch.equal(self._buffers[0].cpu(), self._first_layer())

    def _first_layer(self) -> torch.Tensor:
        """What the pages hold of it, in their order, ``[pages, bytes]``."""
        return self._pages[self._order, HEADER_BYTES : HEADER_BYTES + self._segment]

    def microseconds(self, copy: Copy | None, *, multiply: bool) -> float:
        """Median time per layer of copies, products or both."""
        work = partial(self._run, copy, multiply=multiply)
        return 1e3 * self._device.milliseconds(work, 7, HEAD_START) / self._layers

    def _run(self, copy: Copy | None, *, multiply: bool) -> None:
        """Copies on one stream, products on another (a CPU does one after the other)."""

        def copy_layer(layer: int) -> None:
            if copy is not None:
                copy(layer, self._buffers[layer % BUFFERS])

        def multiply_layer(layer: int) -> None:
            if multiply:
                self._multiply(layer)

        if not self._streams:
            for layer in range(self._layers):
                copy_layer(layer)
                multiply_layer(layer)
            return
        current, free = torch.cuda.current_stream(), list[torch.cuda.Event]()
        copying, computing = self._streams
        copying.wait_stream(current)
        computing.wait_stream(current)
        for layer in range(self._layers):
            with torch.cuda.stream(copying):
                if multiply and layer >= BUFFERS:
                    copying.wait_event(free[layer - BUFFERS])
                copy_layer(layer)
                there = copying.record_event()
            with torch.cuda.stream(computing):
                computing.wait_event(there)
                multiply_layer(layer)
                free.append(computing.record_event())
        current.wait_stream(computing)
        current.wait_stream(copying)


def measure(run: GpuRun) -> None:
    """One row per way of copying."""
    device = run.device
    pages, layers = (2, 4) if device.dry_run else (run.given.pages, run.given.layers)
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
        run.add(row, f"{name}, {work.tokens} tokens")
    speeds = work.speeds(0.01 if device.dry_run else 2.0)
    every = {n for n in (2, 4, 8, 16, 32) if n <= work.most_programs()}
    right = every <= {speed.programs for speed in speeds}  # what is wrong is left out
    for speed in speeds:
        how = "copy engine" if speed.programs is None else f"{speed.programs} programs"
        row = {"way": how, **speed._asdict(), "right": right}
        run.add(row, f"as a server does it: {how}", "speeds")
    device.release()


PROGRAM = GpuProgram(
    name="overlap",
    module="bench.gpu.overlap",
    doc=__doc__,
    measure=measure,
    interpreted=True,
    settings=(
        Setting("--pages", at_least(1), 64, "of the history, 64 tokens each"),
        Setting("--layers", at_least(1), 12, "of the model"),
    ),
    tables={
        "table": (
            Table(
                "rows",
                (
                    *columns("copied by = way | GB/s = copy_gb_s"),
                    *(Column(f"{name}, us", f"{name}_us") for name in TIMES),
                    *columns("overlap | right"),
                ),
            ),
            Table(
                "speeds",
                (
                    Column("as a server measures it", "way"),
                    Column("GB/s alone", lambda row: row["alone"] / 1e9),
                    Column("GB/s beside", lambda row: row["beside"] / 1e9),
                    Column("products keep", "products"),
                ),
            ),
        )
    },
    draw=Picture(
        title=lambda results: f"Copies beside matrix products, {results['device']}",
        panels=lambda results: {f"{results['rows'][0]['tokens']} tokens": results["rows"]},
        x="way",
        x_label="copied by",
        y_label="microseconds per layer",
        series=(
            Series("both", "both_us", "ours"),
            Series("the longer one", "longer_us", "computed"),
            Series("their sum", "sum_us", "file"),
        ),
        bars="%.0f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
