"""What the parts of a comparison have in common."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.machine import Machine
from bench.harness.methods import METHODS, server_options
from bench.harness.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class Part:
    """Servers of one model that are asked alike.

    Attributes:
        model: A folder, or a name that SGLang knows.
        vocabulary: Random tokens are below it.
        server_args: More arguments of SGLang.
        folder: For L3, logs and traces; a folder below it for each server.
    """

    machine: Machine
    model: str
    vocabulary: int
    server_args: Sequence[str]
    folder: Path
    seed: int = 1

    def server(self, method: str, name: str, pool_tokens: int, **options: Any) -> ServerOptions:
        """The server of a method, in the folder ``name``; options as of ``server_options``."""
        return server_options(
            METHODS[method],
            self.machine,
            self.model,
            self.folder / name,
            pool_tokens=pool_tokens,
            extra_args=self.server_args,
            **options,
        )

    def histories(self, number: int, tokens: int) -> list[list[int]]:
        """Random tokens of ``number`` histories."""
        source = random.Random(self.seed)
        return [[source.randrange(self.vocabulary) for _ in range(tokens)] for _ in range(number)]
