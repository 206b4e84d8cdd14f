"""Copies of layers from pages, and the products of their hidden states, on two streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.gpu.copies import gather_launch
from bench.gpu.devices import Device
from bench.gpu.kernels_transfers import HEADER_BYTES, PAGE_TOKENS
from hcache_kernels import pages

BUFFERS, SPARE_PAGES = 3, 8
HEAD_START = 0.02
"""Seconds that a stream is busy before what is measured: some hundred launches take less."""

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
        self.tokens = count * PAGE_TOKENS
        self._segment = PAGE_TOKENS * width * 2
        self._pages = device.pinned(count + SPARE_PAGES, HEADER_BYTES + layers * self._segment)
        # Zeros would be faster than data.
        values = torch.randn(layers * self._segment // 2).bfloat16().view(torch.uint8)
        self._pages[:, HEADER_BYTES:] = values
        self._pages[:, HEADER_BYTES] = torch.arange(len(self._pages))  # tells pages apart
        self._order = torch.randperm(len(self._pages))[:count]
        self._ids = self._order.to(device.kind)
        self._plain = device.pinned(count, self._segment)
        self._plain.copy_(self._pages[self._order, HEADER_BYTES : HEADER_BYTES + self._segment])
        kinds = {"device": device.kind, "dtype": device.dtype}
        size = (count, self._segment)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device.kind) for _ in range(BUFFERS)
        ]
        self._weights = [torch.randn(2 * width, width, **kinds) for _ in range(layers)]
        self._out = torch.empty(self.tokens, 2 * width, **kinds)
        self.bytes = self._plain.nbytes
        if not device.dry_run:
            self._copying, self._computing = torch.cuda.Stream(), torch.cuda.Stream()

    def copies(self, programs: Sequence[int]) -> dict[str, Copy]:
        """Ways to copy a layer; one for each number of programs."""
        few = {f"gather kernel, {n} programs": partial(self._few, n) for n in programs}
        return {
            "gather kernel of the product": self._gather,
            **few,
            "copy engine, a copy a page": self._engine,
            "copy engine, one copy": self._one_copy,
        }

    def _offset(self, layer: int) -> int:
        return HEADER_BYTES + layer * self._segment

    def _gather(self, layer: int, buffer: torch.Tensor) -> None:
        pages.gather_launch(self._pages, self._ids, self._offset(layer), buffer).run()

    def _few(self, programs: int, layer: int, buffer: torch.Tensor) -> None:
        gather_launch(self._pages, self._ids, self._offset(layer), buffer, programs).run()

    def _engine(self, layer: int, buffer: torch.Tensor) -> None:
        at = self._offset(layer)
        for row, page in zip(buffer, self._order.tolist(), strict=True):
            row.copy_(self._pages[page, at : at + self._segment], non_blocking=True)

    def _one_copy(self, layer: int, buffer: torch.Tensor) -> None:
        buffer.copy_(self._plain, non_blocking=True)

    def _multiply(self, layer: int, buffer: torch.Tensor) -> None:
        rows = buffer.view(self._device.dtype).view(self.tokens, -1)
        torch.mm(rows, self._weights[layer].t(), out=self._out)

    def is_right(self, copy: Copy) -> bool:
        """Whether ``copy`` brings the first layer."""
        self._buffers[0].fill_(0)
        copy(0, self._buffers[0])
        return torch.equal(self._buffers[0].cpu(), self._plain)

    def microseconds(self, copy: Copy | None, *, multiply: bool) -> float:
        """Median time per layer of copies, products or both."""
        run = self._run_here if self._device.dry_run else self._run
        work = partial(run, copy, multiply=multiply)
        return 1e3 * self._device.milliseconds(work, 7, HEAD_START) / self._layers

    def _run_here(self, copy: Copy | None, *, multiply: bool) -> None:
        for layer in range(self._layers):
            if copy:
                copy(layer, self._buffers[layer % BUFFERS])
            if multiply:
                self._multiply(layer, self._buffers[layer % BUFFERS])

    def _run(self, copy: Copy | None, *, multiply: bool) -> None:
        current, free = torch.cuda.current_stream(), []
        self._copying.wait_stream(current)
        self._computing.wait_stream(current)
        for layer in range(self._layers):
            buffer = self._buffers[layer % BUFFERS]
            with torch.cuda.stream(self._copying):
                if multiply and layer >= BUFFERS:
                    self._copying.wait_event(free[layer - BUFFERS])
                if copy:
                    copy(layer, buffer)
                there = self._copying.record_event()
            with torch.cuda.stream(self._computing):
                self._computing.wait_event(there)
                if multiply:
                    self._multiply(layer, buffer)
                free.append(self._computing.record_event())
        current.wait_stream(self._computing)
        current.wait_stream(self._copying)
