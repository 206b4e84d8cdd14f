"""Machines by name: peak rates of data sheets, and the assumed shares that a restore reaches.
docs/planning.md has the reasons; ``hcache profile`` measures."""

from __future__ import annotations

from dataclasses import dataclass

from hcache_backend.plan.profile import Profile, Rate

COMPUTE_SHARE = 0.69
BUS_SHARE = 0.84

SSD_BYTES_PER_SECOND = 6.9e9  # as reached by a Samsung PM9A3, the paper's SSD (section 6.2.2)

_PCIE4, _PCIE5 = 32e9, 64e9
_TABLE_2 = "paper, Table 2"
_DATA_SHEET = "vendor's data sheet, dense, FP32 accumulation"


@dataclass(frozen=True)
class Hardware:
    """Peak rates of one accelerator: FLOP/s of a dense 16-bit GEMM, bytes per second from the host
    (PCIe x16); ``nvlink``: several are connected faster than by PCIe."""

    name: str
    flops: float
    bus: float
    nvlink: bool
    source: str


PRESETS: dict[str, Hardware] = {
    "a100-40g": Hardware("A100-40G SXM4", 312e12, _PCIE4, True, _TABLE_2),
    "a30": Hardware("A30", 165e12, _PCIE4, False, _TABLE_2),
    # Table 2 has 330T: the rate with FP16 accumulation, which bf16 does not have and PyTorch does
    # not use by default. With FP32 accumulation it is half.
    "rtx4090": Hardware("RTX 4090", 165.2e12, _PCIE4, False, _DATA_SHEET),
    "l20": Hardware("L20", 120e12, _PCIE4, False, _TABLE_2),
    "h800": Hardware("H800", 990e12, _PCIE5, True, _TABLE_2),
    "a100-80g": Hardware("A100-80G SXM4", 312e12, _PCIE4, True, _DATA_SHEET),
    "h100": Hardware("H100 SXM", 989e12, _PCIE5, True, _DATA_SHEET),
    "h200": Hardware("H200 SXM", 989e12, _PCIE5, True, _DATA_SHEET),
    "l40s": Hardware("L40S", 362e12, _PCIE4, False, _DATA_SHEET),
    "rtx5090": Hardware("RTX 5090", 209.5e12, _PCIE5, False, _DATA_SHEET),
    "mi300x": Hardware("MI300X", 1307e12, _PCIE5, True, _DATA_SHEET),
}


def preset_profile(name: str, ssds: int = 0) -> Profile:
    """Profile of a machine of :data:`PRESETS`, with L3 on ``ssds`` SSDs or in host memory."""
    hardware = PRESETS[name]
    bus = Rate(per_second=hardware.bus * BUS_SHARE)
    compute = Rate(per_second=hardware.flops * COMPUTE_SHARE)
    return Profile(
        device=hardware.name,
        source=f"preset {name}: {hardware.source}",
        dtype="bfloat16",
        gathers=hardware.nvlink,
        l3=Rate(per_second=ssds * SSD_BYTES_PER_SECOND) if ssds else None,
        hidden_copy=bus,
        kv_load=bus,
        projection=compute,
        dense=compute,
        attention=compute,
    )
