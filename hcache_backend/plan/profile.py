"""The measured, or assumed, speed of a machine. An operation on one layer takes a fixed part, and
bytes (copies) or FLOPs over a rate."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hcache_backend.config import ConfigError
from hcache_backend.plan.model_shape import ModelShape

OPERATIONS = ("hidden_copy", "kv_load", "projection", "dense", "attention")
START_SECONDS = 0.2  # that a server's start takes for each operation, and to write and read L3


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


class Rate(BaseModel):
    """Time of one operation: ``seconds + amount / per_second``, in bytes or FLOPs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    per_second: float = Field(gt=0, allow_inf_nan=False)

    def time(self, amount: float) -> float:
        return self.seconds + amount / self.per_second


class Profile(BaseModel):
    """A machine: one device, its bus, and the L3 of the host. Each rate is that of an operation
    alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1  # of the file
    device: str
    date: str | None = None  # ISO 8601; None: assumed numbers
    source: str
    dtype: str
    # A tensor-parallel rank loads its share of every hidden state and gathers the rest at no cost
    # (NVLink; paper section 5). Otherwise each rank's bus carries all.
    gathers: bool = False
    l3: Rate | None  # bytes, all folders together; None: all pages are in host memory
    hidden_copy: Rate  # bytes of a layer from host memory to the device
    kv_load: Rate  # bytes of a layer from host memory to KV slots
    projection: Rate  # FLOPs from hidden states on the device to K and V in the pool
    dense: Rate  # FLOPs of a layer's forward pass without attention
    attention: Rate  # FLOPs; it makes recomputation quadratic
    model: ModelShape | None = None  # None: assumed numbers
    dirs: tuple[str, ...] = ()
    # Measured, for readers: operation -> (tokens, seconds).
    points: dict[str, tuple[tuple[int, float], ...]] = Field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n")


def load_profile(path: Path) -> Profile:
    """Read a saved profile; a ConfigError names every wrong field."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error}") from None
    except ValidationError as error:
        wrong = [f"{path}: make a new profile with `hcache profile --out FILE`"]
        for detail in error.errors():
            field = ".".join(map(str, detail["loc"]))
            shown = field and detail["type"] not in ("missing", "extra_forbidden")
            value = f" is {detail['input']!r}" if shown else ""
            wrong.append(f"field {field!r}{value}: {detail['msg']}" if field else detail["msg"])
        raise ConfigError("; ".join(wrong)) from None


# Machines by name: peak rates, and the assumed shares that a restore reaches (docs/planning.md)

COMPUTE_SHARE = 0.69
BUS_SHARE = 0.84
SSD_BYTES_PER_SECOND = 6.9e9  # as reached by a Samsung PM9A3, the paper's SSD (section 6.2.2)
_PCIE4, _PCIE5 = 32e9, 64e9
_TABLE_2 = "paper, Table 2"
_DATA_SHEET = "vendor's data sheet, dense, FP32 accumulation"


class Hardware(NamedTuple):
    """Peak rates of one accelerator: FLOP/s of a dense 16-bit GEMM, bytes per second from the host
    (PCIe x16); ``nvlink``: several are connected faster than by PCIe; ``memory``: its bytes."""

    name: str
    memory: float
    flops: float
    bus: float
    nvlink: bool
    source: str


PRESETS: dict[str, Hardware] = {
    "a100-40g": Hardware("A100-40G SXM4", 40e9, 312e12, _PCIE4, True, _TABLE_2),
    "a30": Hardware("A30", 24e9, 165e12, _PCIE4, False, _TABLE_2),
    # Table 2 has 330T, with FP16 accumulation. With FP32, as PyTorch and all of bf16, it is half.
    "rtx4090": Hardware("RTX 4090", 24e9, 165.2e12, _PCIE4, False, _DATA_SHEET),
    "l20": Hardware("L20", 48e9, 120e12, _PCIE4, False, _TABLE_2),
    "h800": Hardware("H800", 80e9, 990e12, _PCIE5, True, _TABLE_2),
    "a100-80g": Hardware("A100-80G SXM4", 80e9, 312e12, _PCIE4, True, _DATA_SHEET),
    "h100": Hardware("H100 SXM", 80e9, 989e12, _PCIE5, True, _DATA_SHEET),
    "h200": Hardware("H200 SXM", 141e9, 989e12, _PCIE5, True, _DATA_SHEET),
    "l40s": Hardware("L40S", 48e9, 362e12, _PCIE4, False, _DATA_SHEET),
    "rtx5090": Hardware("RTX 5090", 32e9, 209.5e12, _PCIE5, False, _DATA_SHEET),
    "mi300x": Hardware("MI300X", 192e9, 1307e12, _PCIE5, True, _DATA_SHEET),
}


def preset_profile(name: str, ssds: int = 0) -> Profile:
    """Profile of a machine of :data:`PRESETS`, with L3 on ``ssds`` SSDs or in host memory."""
    hardware = PRESETS[name]
    bus = Rate(per_second=hardware.bus * BUS_SHARE)
    compute = Rate(per_second=hardware.flops * COMPUTE_SHARE)
    rates: dict[str, Any] = dict.fromkeys(("hidden_copy", "kv_load"), bus)
    rates |= dict.fromkeys(("projection", "dense", "attention"), compute)
    return Profile(
        device=hardware.name,
        source=f"preset {name}: {hardware.source}",
        dtype="bfloat16",
        gathers=hardware.nvlink,
        l3=Rate(per_second=ssds * SSD_BYTES_PER_SECOND) if ssds else None,
        **rates,
    )
