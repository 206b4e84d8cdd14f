"""Memory of a launch: what it was given, at its real addresses, and shared memory of its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from .numbers import UNSIGNED, Array
from .program import Fault

POISON = 0xFF
"""Of shared memory: NaN in every type."""


class Span(NamedTuple):
    """Bytes from one address to another."""

    start: int
    end: int
    name: str

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Span:
        last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return Span(tensor.data_ptr(), tensor.data_ptr() + size, name)


class _Bytes:
    """Memory from an address on. Nothing is read or written before ``check``."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self._words = start, {}
        for n, dtype in UNSIGNED.items():
            made = {
                "data": (start, False),
                "shape": (size // n,),
                "typestr": dtype.str,
                "version": 3,
            }
            self._words[n] = np.asarray(type("", (), {"__array_interface__": made})())

    def read(self, addresses: Array, size: int, count: int) -> list[Array]:
        at = (addresses - self.start) // size
        return [self._words[size][at + i] for i in range(count)]

    def write(self, addresses: Array, values: list[Array]) -> None:
        size = values[0].itemsize
        words, at = self._words[size], (addresses - self.start) // size
        for i, value in enumerate(values):
            words[at + i] = value
            if (words[at + i] != value).any():
                raise Fault("two threads write different values to one address")

    def add(self, addresses: Array, values: Array) -> None:
        at = (addresses - self.start) // values.itemsize
        np.add.at(self._words[values.itemsize], at, values)


class Global(_Bytes):
    """The spans of a launch, and nothing between them."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = _united(spans) or [Span(16, 16, "nothing")]
        self._starts = np.array([span.start for span in self.spans], dtype="i8")
        self._ends = np.array([span.end for span in self.spans], dtype="i8")
        first = self.spans[0].start // 16 * 16
        super().__init__(first, self.spans[-1].end + 16 - first)
        self._before = np.cumsum([0, *(self._ends - self._starts)])
        self.size = int(self._before[-1])

    def check(self, lanes: Array, addresses: Array, size: int) -> Array:
        """Addresses of ``size`` bytes that the launch was given."""
        _check_alignment(addresses, size)
        at = np.searchsorted(self._starts, addresses, "right") - 1
        if (bad := (at < 0) | (addresses + size > self._ends[at])).any():
            wrong = int(addresses[bad][0])
            near = min(self.spans, key=lambda span: abs(span.start - wrong))
            where = f"{wrong - near.start} bytes from the start of {near.name}"
            raise Fault(f"{size} bytes that are in no tensor of the launch, {where}")
        return addresses

    def number(self, addresses: Array) -> Array:
        """Of bytes, as if the spans followed each other."""
        at = np.searchsorted(self._starts, addresses, "right") - 1
        return addresses - self._starts[at] + self._before[at]

    def name(self, number: int) -> str:
        at = int(np.searchsorted(self._before, number, "right")) - 1
        return f"byte {number - self._before[at]} of {self.spans[at].name}"


class Shared(_Bytes):
    """Shared memory of some blocks; each begins at a multiple of 1024 bytes, as swizzles want."""

    def __init__(self, blocks: int, size: int, threads: int) -> None:
        self._size, self._threads = size, threads
        self._stride = -(-max(size, 1) // 1024) * 1024
        self.size = blocks * self._stride
        self._memory = np.full(self.size, POISON, dtype="u1")
        super().__init__(self._memory.ctypes.data, self.size)

    def check(self, lanes: Array, addresses: Array, size: int) -> Array:
        _check_alignment(addresses, size)
        # A block has whole 16 bytes: vectors read behind the last value, and do not use it.
        if (wrong := (addresses < 0) | (addresses + size > -(-self._size // 16) * 16)).any():
            found = int(addresses[wrong][0])
            raise Fault(f"{size} bytes at {found:#x} of {self._size} bytes of shared memory")
        return addresses + lanes // self._threads * self._stride + self.start

    def number(self, addresses: Array) -> Array:
        return addresses - self.start

    def name(self, number: int) -> str:
        return f"byte {number % self._stride} of shared memory"


def _check_alignment(addresses: Array, size: int) -> None:
    if (wrong := addresses % size != 0).any():
        raise Fault(f"{size} bytes at {int(addresses[wrong][0]):#x}: not aligned")


def _united(spans: Iterable[Span]) -> list[Span]:
    """Sorted, and those that overlap as one: K and V of a slot may lie side by side."""
    found: list[Span] = []
    for span in sorted(span for span in spans if span.end > span.start):
        if found and span.start < found[-1].end:
            last = found.pop()
            name = last.name if span.name in last.name else f"{last.name}, {span.name}"
            found.append(Span(last.start, max(last.end, span.end), name))
        else:
            found.append(span)
    return found
