"""A kernel launch as a value: what tests compile ahead of time is what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete.

    Attributes:
        kernel: The Triton function.
        grid: Programs.
        arguments: By name, compile-time ones included.
        warps: Warps of a program.
        stages: Depth of the software pipeline.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int

    def run(self) -> None:
        """Launch it on the current stream; a grid without programs is left alone."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)
