"""What launches of a layer and page take of a GPU, counted on the emulator.

    python -m tests.ptx.costs [--write] [MODEL ...]

Prints a table, or writes it to docs/research/launches.md. The models are bench.gpu.kernels'.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu.kernels import SHAPES
from bench.gpu.kernels_projection import random_projection
from bench.gpu.shapes import PAGE, Shape
from hcache_backend.format.units import units_per_group
from hcache_backend.plan.profile import BUS_SHARE, COMPUTE_SHARE, PRESETS
from hcache_kernels.codecs import Cut, make_codec, make_segment_codec
from hcache_kernels.launch import Launch
from hcache_kernels.pages.kernel import gather_launch, gather_planes_launch
from hcache_kernels.project_kv import KVPool, ProjectionCall
from hcache_kernels.project_kv.ways import epilogue_launch
from hcache_kernels.staging import StagedRows, save_launch, stage_launch
from tests.kernels.compiled import TOOLS
from tests.ptx import launches
from tests.ptx.memory import Span
from tests.ptx.watchers import SECTOR, Costs

HEADER_BYTES = 4096  # before a page's first segment
DOCS = Path(__file__).resolve().parents[2] / "docs" / "research" / "launches.md"
GPU = PRESETS["h100"]
MEMORY, ISSUED = 3.35e12, 132 * 4 * 1.98e9
"""An H100 SXM by its data sheet: bytes a second of its memory, instructions of warps a second."""
CODECS = ("exp3", "exp4", "int8")


class Case(NamedTuple):
    what: str
    launch: Launch
    host: str | None  # the argument that is in host memory
    allowed: float | None = None  # seconds that the cost model of a restore has for it


def cases(shape: Shape) -> Iterator[Case]:
    """Of a page of one layer."""
    torch.manual_seed(0)
    width, row = shape.width, 2 * shape.hidden
    hidden, ids = torch.randn(PAGE, shape.hidden).bfloat16(), torch.arange(PAGE)
    one, bus = torch.tensor([0]), GPU.bus * BUS_SHARE
    at_peak = 2 * PAGE * shape.hidden * 2 * width / GPU.flops  # seconds of the projection's product
    memory = torch.zeros(1, HEADER_BYTES + PAGE * max(row, 4 * width), dtype=torch.uint8)
    staged = StagedRows(torch.zeros(1, PAGE, row, dtype=torch.uint8), torch.zeros(1, PAGE).long())
    yield Case("stage hidden states", stage_launch(hidden, ids, one, staged, 0), None)
    at = torch.tensor([HEADER_BYTES])
    save = save_launch(staged.rows, ids, one, memory, at, PAGE, range(PAGE))
    yield Case("save hidden states", save, "arena")
    rows = torch.zeros(1, PAGE * row, dtype=torch.uint8)
    load = gather_launch(memory, one, HEADER_BYTES, rows)
    yield Case("load hidden states", load, "pages", PAGE * row / bus)
    planes = [torch.randn(PAGE, shape.kv_heads, shape.head_dim).bfloat16() for _ in "kv"]
    pool = [plane.view(torch.uint8).view(1, PAGE, 1, 2 * width) for plane in planes]
    for what, saves in (("load", False), ("save", True)):
        copy = gather_planes_launch(memory, one, HEADER_BYTES, pool, one, save=saves)
        yield Case(f"{what} K and V", copy, "pages", None if saves else PAGE * 4 * width / bus)
    for name in CODECS:
        pieces = units_per_group(PAGE, width)
        cut = Cut(width, PAGE // pieces, 1, pieces)  # as one rank stores it
        codec = make_segment_codec(name, cut, shape.head_dim, torch.bfloat16)
        fits = torch.zeros(1, codec.flags, dtype=torch.bool)
        segment = torch.zeros(1, codec.segment_bytes, dtype=torch.uint8)
        encode = codec.encode_launch(planes, one, segment, None, 0, fits)
        yield Case(f"encode {name} K and V", encode, None)
        save = gather_launch(memory, one, HEADER_BYTES, segment, save=True)
        yield Case(f"save {name} K and V", save, "pages")
        decode = codec.decode_launch(segment, planes, one)
        yield Case(f"decode {name} K and V", decode, None, codec.segment_bytes / bus)
    rows_codec = make_codec("exp4", shape.hidden, torch.bfloat16)
    encoded = torch.zeros(PAGE, rows_codec.row_bytes, dtype=torch.uint8)
    flags = torch.zeros(PAGE, dtype=torch.bool)
    encode = rows_codec.encode_launch((hidden,), None, encoded, None, 0, flags)
    yield Case("encode exp4 hidden states", encode, None)
    projection = random_projection(shape, _Device())
    half = torch.zeros(PAGE, 2 * width, dtype=torch.bfloat16)
    call = ProjectionCall(hidden, ids, ids, projection, KVPool(*planes))
    left = at_peak / COMPUTE_SHARE - at_peak
    yield Case("norm, RoPE, scatter", epilogue_launch(half, call), None, left)


class _Device(NamedTuple):
    """What :func:`random_projection` asks for."""

    kind: str = "cpu"
    scaled_dtype: torch.dtype = torch.bfloat16


def row_of(shape: Shape, case: Case) -> str:
    launch, host = case.launch, []
    if case.host:
        host = [Span.of(case.host, launch.arguments[case.host])]
    costs = Costs(host)
    kernel = launches.run(launch, 90, [costs]).kernel
    sectors = Counter[str]()
    for name, number in costs.sectors.items():
        sectors[name.split()[0]] += number
    host_ways = [name for name in costs.narrowest if "host" in name]
    narrowest = " ".join(f"{name.split()[1]} {costs.narrowest[name]}" for name in host_ways)
    whole = sum(costs.bytes[name] for name in host_ways) / (SECTOR * sectors["host"] or 1)
    bound = max(
        SECTOR * sectors["host"] / GPU.bus,
        SECTOR * sectors["device"] / MEMORY,
        costs.instructions / ISSUED,
    )
    cells = [shape.name, case.what, f"{costs.instructions / PAGE:.0f}"]
    cells += [f"{sectors[where]:,}" for where in ("device", "host")]
    cells += [narrowest or "-", f"{whole:.0%}" if host_ways else "-", f"{costs.bank_conflicts:,}"]
    cells += [f"{registers_of(kernel)}", f"{kernel.metadata.shared:,}"]
    allowed = "-" if case.allowed is None else f"{1e6 * case.allowed:.2f}"
    cells += [" x ".join(map(str, launch.grid)), f"{1e6 * bound:.2f}", allowed]
    return f"| {' | '.join(cells)} |"


def registers_of(kernel: Any) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", cubin.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"REG:(\d+)", said.stdout + said.stderr)[1])


COLUMNS = (
    *("model", "launch", "warp instructions per token", "device sectors", "host sectors"),
    *("bytes a thread, host", "of host sectors", "bank conflicts", "registers", "shared bytes"),
    *("programs", "bound, us", "cost model, us"),
)


def main() -> None:
    given = sys.argv[1:]
    chosen = [name for name in given if name != "--write"]
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for shape in SHAPES:
        for case in cases(shape) if not chosen or shape.name in chosen else ():
            rows.append(row_of(shape, case))
            print(rows[-1], flush=True)
    if "--write" in given:
        before, mark, _ = DOCS.read_text().partition("<!-- counted -->\n")
        DOCS.write_text(before + mark + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
