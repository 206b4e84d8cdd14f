"""The measured, or assumed, speed of a machine.

An operation on one layer takes a fixed part, and bytes (copies) or FLOPs over a rate. So a profile
also plans other models of about the measured size.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hcache_backend.plan.model_shape import ModelShape


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


class ProfileError(ValueError):
    """An unusable profile; the message names file, field, value and what is right."""


class Rate(BaseModel):
    """Time of one operation: ``seconds + amount / per_second``, in bytes or FLOPs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    per_second: float = Field(gt=0, allow_inf_nan=False)

    def time(self, amount: float) -> float:
        return self.seconds + amount / self.per_second


class CopyWay(BaseModel):
    """A way to copy hidden states to the device, measured beside matrix products: bytes per second
    ``alone`` and ``beside``, and the share of their speed that ``products`` keep. ``programs`` are
    those of the copying kernel; None: the copy engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    programs: int | None = Field(default=None, gt=0)
    alone: float = Field(gt=0, allow_inf_nan=False)
    beside: float = Field(gt=0, allow_inf_nan=False)
    products: float = Field(gt=0, le=1)

    @property
    def name(self) -> str:
        return "copy engine" if self.programs is None else f"kernel, {self.programs} programs"

    def describe(self) -> str:
        return (
            f"{self.name}: {self.beside / 1e9:,.1f} GB/s beside matrix products "
            f"({self.alone / 1e9:,.1f} alone), which keep {self.products:.0%} of their speed"
        )


class Profile(BaseModel):
    """A machine: one device, its bus, and the L3 of the host.

    Copies and projections run at the same time: if ``copies`` were measured, ``hidden_copy``,
    ``kv_load`` and ``projection`` are rates beside each other.

    Attributes:
        format: Version of the file.
        date: ISO 8601; ``date`` and ``model`` are None for assumed numbers.
        gathers: A tensor-parallel rank loads its share of every hidden state and gathers the rest
            at no cost (NVLink; paper section 5). Otherwise each rank's bus carries all.
        l3: Bytes from L3, all folders together; None: all pages are in host memory.
        hidden_copy, kv_load: Bytes of a layer from host memory to the device, to KV slots.
        projection: FLOPs from hidden states on the device to K and V in the pool.
        dense, attention: FLOPs of a layer's forward pass; attention makes recomputation quadratic.
        copies: Ways to copy hidden states, the used one first; none on a CPU or if assumed.
        points: Measured, for readers: operation -> (tokens, seconds), each alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1
    device: str
    date: str | None = None
    source: str
    dtype: str
    gathers: bool = False
    l3: Rate | None
    hidden_copy: Rate
    kv_load: Rate
    projection: Rate
    dense: Rate
    attention: Rate
    model: ModelShape | None = None
    dirs: tuple[str, ...] = ()
    copies: tuple[CopyWay, ...] = ()
    points: dict[str, tuple[tuple[int, float], ...]] = Field(default_factory=dict)

    @property
    def recompute_slowdown(self) -> float:
        """Factor on recomputation while other layers are copied."""
        return 1 / self.copies[0].products if self.copies else 1.0

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n")


def load_profile(path: Path) -> Profile:
    """Read a saved profile; a ProfileError names every wrong field."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the profile {path}: {error}") from None
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            field = ".".join(str(part) for part in detail["loc"])
            if not field:
                lines.append(f"{path}: no profile: {detail['msg']}")
            elif detail["type"] in ("missing", "extra_forbidden"):
                lines.append(f"{path}: field {field!r}: {detail['msg']}")
            else:
                lines.append(f"{path}: field {field!r} is {detail['input']!r}: {detail['msg']}")
        hint = "; make a new one with `hcache profile --out FILE`"
        raise ProfileError("; ".join(lines) + hint) from None
