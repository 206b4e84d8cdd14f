"""The checker as one object: clocks, memory, stand-ins for the device, and a report."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.order import watch
from tests.order.clocks import HOST, Clocks, Query, site
from tests.order.memory import Finding, Kind, Memory
from tests.order.stand_ins import stand_ins


class Checker:
    """Watches what the calling thread does, within :meth:`watching`."""

    def __init__(self, query: Query = Query.LAZY, seed: int = 0) -> None:
        self.clocks = Clocks(query, seed)
        self.memory = Memory(self.clocks)
        self.stack = ExitStack()
        self.stand_ins = stand_ins(self.memory)

    def on_device(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        self.memory.register(tensor, Kind.DEVICE, name)
        return tensor

    def pinned(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        self.memory.register(tensor, Kind.PINNED, name)
        return tensor

    def stream(self, name: str) -> Any:
        return self.stand_ins["Stream"](actor=self.clocks.new_stream(name))

    def on(self, stream: Any) -> Any:
        return self.stand_ins["StreamContext"](stream)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the calling thread's memory is known, and after :meth:`begin` its order
        is checked."""
        try:
            with watch.streams_are_kept(self.memory), watch.Watch(self.memory):
                yield
        finally:
            self.memory.watching = False

    def begin(self) -> None:
        """Set-up is over: everything so far is done, and what comes is checked."""
        self.clocks.join_all()
        self.memory.watching = True

    def touch_pages(self, pages: npt.NDArray[np.int64], stride: int, length: int, how: str) -> None:
        """The host reads or writes the first ``length`` bytes of physical pages of the arena by
        NumPy: torch does not show it."""
        for block in self.memory.named("arena"):
            first = pages * stride // block.cell
            cells = (first[:, None] + np.arange(-(-length // block.cell))).ravel()
            step = self.clocks.step(HOST, site())
            self.memory.access(block, cells, HOST, step, how)

    def host_joins(self) -> None:
        """The program ends: what dies from now on was waited for."""
        self.clocks.join_all()

    @property
    def findings(self) -> list[Finding]:
        return list(self.memory.findings.values())

    def report(self) -> str:
        return "\n\n".join(
            f"[{count} times] {self.memory.findings[key]}"
            for key, count in self.memory.counts.items()
        )
