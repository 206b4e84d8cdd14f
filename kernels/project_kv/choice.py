"""Which way of ``project_kv`` is the fastest one: measured once on a device, kept in a file.

The file is ``hcache/project_kv-DEVICE.json`` under ``$XDG_CACHE_HOME`` (default ``~/.cache``).
Where nothing was measured the library way is taken: its product is tuned for every device.

``triton.autotune`` cannot choose here: the library way is not a configuration of the kernel, and
autotuning measures at the first call of each size, which is in the middle of a restore.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import torch

from ..launch import gpu_microseconds
from .spec import KVPool, KVProjection, LayerKind, ProjectionCall, kind_of
from .ways import TileConfig, Way, possible_ways

logger = logging.getLogger(__name__)

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Numbers of tokens that are measured."""


class ChoiceTable:
    """The fastest way of each kind of layer and number of tokens that was measured on one device.

    A file that cannot be read counts as not measured.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fastest: dict[str, dict[int, Way]] = {}
        try:
            self._fastest = {
                kind: {int(rows): _way(config) for rows, config in configs.items()}
                for kind, configs in json.loads(path.read_text()).items()
            }
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is unreadable and will be measured again: %r", path, error)

    def measured(self, kind: LayerKind) -> set[int]:
        """The numbers of tokens that were measured for a kind of layer."""
        return set(self._fastest.get(str(kind), ()))

    def pick(self, kind: LayerKind, n: int) -> Way | None:
        """The fastest way at the measured number of tokens nearest to ``n``; None: unmeasured."""
        measured = self._fastest.get(str(kind))
        if not measured:
            return None
        return measured[min(measured, key=lambda rows: abs(math.log2(rows / n)))]

    def add(self, kind: LayerKind, rows: int, microseconds: dict[Way, float]) -> None:
        """Note which way was the fastest; takes the place of what was measured before."""
        fastest = min(microseconds, key=microseconds.__getitem__)
        self._fastest.setdefault(str(kind), {})[rows] = fastest

    def save(self) -> None:
        """Write the file at once or not at all. A failure is logged: one can measure again."""
        configs = {
            kind: {rows: way.config and asdict(way.config) for rows, way in ways.items()}
            for kind, ways in self._fastest.items()
        }
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(configs, indent=1))
            draft.replace(self.path)
        except OSError as error:
            logger.warning("cannot keep measurements in %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                draft.unlink()


def _way(config: dict[str, int] | None) -> Way:
    return Way(config if config is None else TileConfig(**config))


@lru_cache
def device_table(index: int) -> ChoiceTable:
    """The table of a CUDA device, read once a process."""
    return ChoiceTable(table_path(torch.cuda.get_device_name(index)))


def table_path(device_name: str) -> Path:
    """Where the table of a kind of device is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Path(cache) / "hcache" / f"project_kv-{slug}.json"


def choose(kind: LayerKind, pool_type: torch.dtype, n: int, device: torch.device) -> Way | None:
    """How a CUDA device projects ``n`` tokens of a layer; None: in torch."""
    possible = possible_ways(kind, pool_type, torch.cuda.get_device_capability(device))
    if not possible:
        return None
    measured = device_table(device.index).pick(kind, n)
    # A file of another version may name a configuration that is gone.
    return measured if measured in possible else possible[0]


def ways_in_use(projection: KVProjection, pool_type: torch.dtype) -> list[Way | None]:
    """How a layer is projected, whatever the number of tokens; None: in torch."""
    device, kind = projection.weight.device, kind_of(projection)
    if device.type != "cuda":
        return [None]
    return [*{choose(kind, pool_type, n, device) for n in ROWS}]


def measure_choice(projection: KVProjection, pool_type: torch.dtype) -> None:
    """Time every way for a layer on its CUDA device, on random hidden states, unless the device's
    table has that kind of layer. It compiles every configuration, which takes seconds, and
    allocates the hidden states, K and V of the largest number of tokens."""
    device = projection.weight.device
    kind = kind_of(projection)
    table = device_table(device.index)
    todo = [n for n in ROWS if n not in table.measured(kind)]
    possible = possible_ways(kind, pool_type, torch.cuda.get_device_capability(device))
    if not possible or not todo:
        return
    for n in todo:
        call = _random_call(projection, pool_type, n)
        table.add(kind, n, {way: gpu_microseconds(partial(way.run, call)) for way in possible})
    table.save()


def _random_call(projection: KVProjection, pool_type: torch.dtype, n: int) -> ProjectionCall:
    weight, rotary = projection.weight, projection.rotary
    device = weight.device
    hidden = torch.randn(n, weight.shape[1], device=device).to(weight.dtype)
    positions = torch.arange(n, device=device)
    if rotary is not None:
        positions %= len(rotary.cos_sin)
    shape = (n, projection.kv_heads, projection.head_dim)
    k, v = (torch.empty(shape, dtype=pool_type, device=device) for _ in "kv")
    slots = torch.randperm(n, device=device)
    return ProjectionCall(hidden, positions, slots, projection, KVPool(k, v))
