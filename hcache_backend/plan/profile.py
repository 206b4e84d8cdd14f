"""The measured, or assumed, speed of a machine.

A profile says how long an operation on one layer takes, as a fixed part and a rate: bytes for
copies, FLOPs for computation. So it also plans other models of about the measured size.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hcache_backend.plan.model_shape import ModelShape


def processor_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


class ProfileError(ValueError):
    """A profile that cannot be used. The message names file, field, value and what is right."""


class Rate(BaseModel):
    """Time of one operation: ``seconds + amount / per_second``, in bytes or FLOPs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    per_second: float = Field(gt=0, allow_inf_nan=False)

    def time(self, amount: float) -> float:
        """Seconds for ``amount`` bytes or FLOPs of one layer."""
        return self.seconds + amount / self.per_second


class CopyWay(BaseModel):
    """One way to copy hidden states to the device, measured beside matrix products.

    Attributes:
        programs: Programs of the kernel that copies; None: the copy engine.
        alone: Bytes per second with nothing beside.
        beside: Bytes per second beside products.
        products: Share of their speed that products keep beside such copies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    programs: int | None = Field(default=None, gt=0)
    alone: float = Field(gt=0, allow_inf_nan=False)
    beside: float = Field(gt=0, allow_inf_nan=False)
    products: float = Field(gt=0, le=1)

    @property
    def name(self) -> str:
        return "copy engine" if self.programs is None else f"kernel, {self.programs} programs"

    def describe(self) -> str:
        """The way and its speeds in words."""
        return (
            f"{self.name}: {self.beside / 1e9:,.1f} GB/s beside matrix products "
            f"({self.alone / 1e9:,.1f} alone), which keep {self.products:.0%} of their speed"
        )


class Profile(BaseModel):
    """A machine: one device, its bus, and the L3 of the host.

    Copies to the device and projections run at the same time. So where ``copies`` were measured,
    ``hidden_copy``, ``kv_load`` and ``projection`` are what each reaches beside the other.

    Attributes:
        format: Version of the file.
        date: When it was measured (ISO 8601); None for assumed numbers.
        source: Where the numbers come from.
        dtype: Data type that was computed with.
        gathers: Whether each tensor-parallel rank loads a share of every hidden state and gathers
            the rest at no cost (NVLink; paper section 5). Without it each rank's bus carries all.
        l3: Reading from L3, all folders together, bytes; None: everything is in host memory.
        hidden_copy: Host memory to device, the hidden states of one layer, bytes.
        kv_load: Host memory to the slots of the KV pool, K and V of one layer, bytes.
        projection: Hidden states on the device to K and V in the pool, FLOPs.
        dense: A layer's forward pass without attention, FLOPs.
        attention: Its attention, FLOPs: what makes recomputation quadratic.
        model: The shape that was measured; None for assumed numbers.
        dirs: Folders of L3 that were measured.
        copies: Ways to copy hidden states, the one that is used first; none on a CPU, and for
            assumed numbers.
        points: What was measured, for readers: operation -> (tokens, seconds), each alone.
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
        """How much longer a layer is recomputed while others are copied."""
        return 1 / self.copies[0].products if self.copies else 1.0

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n")


def load_profile(path: Path) -> Profile:
    """Read what :meth:`Profile.save` wrote; the ProfileError names every wrong field."""
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
