"""Which way of ``project_kv`` is the faster one: measured once on a device, kept in a file.

The file is ``hcache/project_kv-DEVICE.json`` under ``$XDG_CACHE_HOME`` (default ``~/.cache``).
Where nothing was measured the library way is taken: its product is tuned for every device.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from ..timing import gpu_microseconds
from .configs import FusedConfig, LayerKind, fused_configs, kind_of
from .fused import project_kv_fused
from .library import fits_epilogue, project_kv_library
from .spec import KVPool, KVProjection

logger = logging.getLogger(__name__)

FORMAT = 1
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens that are measured unless the caller says otherwise."""


@dataclass(frozen=True)
class Choice:
    """A way to run ``project_kv`` on a GPU: fused, with its configuration, or library (None)."""

    config: FusedConfig | None

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        projection: KVProjection,
        pool: KVPool,
    ) -> None:
        """As :func:`hcache_kernels.project_kv.project_kv`, arguments unchecked."""
        if self.config is None:
            project_kv_library(hidden, positions, slots, projection, pool)
        else:
            project_kv_fused(hidden, positions, slots, projection, pool, self.config)


LIBRARY = Choice(None)


@lru_cache
def choices(
    kind: LayerKind, pool_type: torch.dtype, capability: tuple[int, int]
) -> tuple[Choice, ...]:
    """The ways that a device can run a layer, the default first; none: only torch can."""
    # Triton converts to e4m3 only where the hardware does.
    oldest = (8, 9) if pool_type == torch.float8_e4m3fn else (8, 0)
    if capability < oldest or not fits_epilogue(kind):
        return ()
    return (LIBRARY, *map(Choice, fused_configs(kind, capability)))


class ChoiceTable:
    """The measured choices of one device.

    Args:
        path: The file. What cannot be read counts as not measured.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._choices: dict[LayerKind, dict[int, Choice]] = {}
        self._records: list[dict[str, Any]] = []
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']} is not {FORMAT}")
            for record in content["measured"]:
                self._take(record)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("%s is unreadable and will be measured again: %r", path, error)
            self._choices, self._records = {}, []

    def measured(self, kind: LayerKind) -> set[int]:
        """The numbers of tokens that were measured for a kind of layer."""
        return set(self._choices.get(kind, ()))

    def pick(self, kind: LayerKind, n: int) -> Choice | None:
        """The faster way at the measured number of tokens nearest to ``n``; None: unmeasured."""
        measured = self._choices.get(kind)
        if not measured:
            return None
        return measured[min(measured, key=lambda rows: abs(math.log2(rows / n)))]

    def add(self, kind: LayerKind, rows: int, microseconds: dict[Choice, float]) -> None:
        """Note how long each way took; takes the place of what was measured before."""
        key = {**asdict(kind), "dtype": str(kind.dtype).removeprefix("torch."), "rows": rows}
        self._records = [r for r in self._records if any(r[name] != key[name] for name in key)]
        ways = [
            {"config": asdict(choice.config) if choice.config else None, "microseconds": time}
            for choice, time in sorted(microseconds.items(), key=lambda item: item[1])
        ]
        self._take({**key, "ways": ways})

    def save(self) -> None:
        """Write the file at once or not at all. A failure is logged: one can measure again."""
        content = json.dumps({"format": FORMAT, "measured": self._records}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)
        except OSError as error:
            logger.warning("cannot keep measurements in %s: %s", self.path, error)
            return
        try:
            with os.fdopen(handle, "w") as file:
                file.write(content)
            Path(name).replace(self.path)
        except OSError as error:
            logger.warning("cannot keep measurements in %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                Path(name).unlink()

    def _take(self, record: dict[str, Any]) -> None:
        names = [field.name for field in fields(LayerKind)]
        kind = LayerKind(
            **{name: record[name] for name in names if name != "dtype"}
            | {"dtype": getattr(torch, record["dtype"])}
        )
        best = record["ways"][0]["config"]
        rows = record["rows"]
        if not (isinstance(rows, int) and rows > 0):
            raise ValueError(f"rows: {rows!r} is not a positive number")
        choice = Choice(FusedConfig(**best)) if best is not None else LIBRARY
        self._choices.setdefault(kind, {})[rows] = choice
        self._records.append(record)


@lru_cache
def device_table(index: int) -> ChoiceTable:
    """The table of a CUDA device, read once a process."""
    return ChoiceTable(table_path(torch.cuda.get_device_name(index)))


def table_path(device_name: str) -> Path:
    """Where the table of a kind of device is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Path(cache) / "hcache" / f"project_kv-{slug}.json"


def choose(kind: LayerKind, pool_type: torch.dtype, n: int, device: torch.device) -> Choice | None:
    """How a CUDA device projects ``n`` tokens of a layer; None: in torch."""
    possible = choices(kind, pool_type, torch.cuda.get_device_capability(device))
    if not possible:
        return None
    measured = device_table(device.index).pick(kind, n)
    # A file of another version may name a configuration that is gone.
    return measured if measured in possible else possible[0]


def measure_choice(
    projection: KVProjection,
    pool_type: torch.dtype,
    rows: Iterable[int] = ROWS,
    again: bool = False,
    microseconds: Callable[[Callable[[], object]], float] = gpu_microseconds,
) -> None:
    """Time every way for a layer on its CUDA device, on random hidden states, and keep the times.

    It compiles every configuration, which takes seconds, and allocates the hidden states, K and V
    of the largest number of tokens.

    Args:
        projection: A layer; others of its kind (:class:`LayerKind`) need no measurement.
        pool_type: Type of the pool.
        rows: Numbers of tokens.
        again: Measure also what the table has.
        microseconds: Times one call.
    """
    device = projection.weight.device
    kind = kind_of(projection)
    table = device_table(device.index)
    known = set() if again else table.measured(kind)
    todo = [n for n in rows if n not in known]
    possible = choices(kind, pool_type, torch.cuda.get_device_capability(device))
    if not possible or not todo:
        return
    for n in todo:
        arguments = _random_call(projection, pool_type, n)
        table.add(kind, n, {c: microseconds(partial(c.run, *arguments)) for c in possible})
    table.save()


def _random_call(projection: KVProjection, pool_type: torch.dtype, n: int) -> tuple[Any, ...]:
    weight, rotary = projection.weight, projection.rotary
    device = weight.device
    hidden = torch.randn(n, weight.shape[1], device=device).to(weight.dtype)
    positions = torch.arange(n, device=device)
    if rotary is not None:
        positions %= len(rotary.cos_sin)
    shape = (n, projection.kv_heads, projection.head_dim)
    k, v = (torch.empty(shape, dtype=pool_type, device=device) for _ in "kv")
    return hidden, positions, torch.randperm(n, device=device), projection, KVPool(k, v)
