"""What copies over the bus take of a GPU's multiprocessors, beside a tile of a matrix product.

    python -m bench.occupancy [--out FOLDER]

Minutes, no GPU: kernels are compiled for each device, and what they take is read from the binaries.
A program of a copy waits for the bus on its multiprocessor, so there are few of them: even with one
on each, they are on a quarter of the multiprocessors at most. Where programs fit beside a tile of a
product, that multiprocessor goes on with the product. Prints a table; writes occupancy.json.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bench.compiled import Job, Usage, compile_all
from bench.harness.report import OUT, markdown, write_json
from hcache_kernels.launch import MOST_COPY_PROGRAMS, Launch
from hcache_kernels.pages.kernel import gather_launch, gather_planes_launch
from hcache_kernels.staging import save_launch

PAGE, PAGES, WIDTH, LAYERS = 64, 128, 8192, 32
"""Tokens of a page, pages, bytes of a hidden state (and of K, and of V), layers: Llama-2-7B."""
TILE = (128, 256)
_REGISTERS = 65536
_THREADS = 128
"""Threads of a program of a copy."""
_RESERVED = 1024
"""Bytes of shared memory that the system takes of each program."""


class Gpu(NamedTuple):
    """One multiprocessor, and how many there are (CUDA programming guide, data sheets).

    Attributes:
        name: A GPU of this compute capability.
        shared: KiB of shared memory of a multiprocessor.
        threads: Threads that it holds.
        depth: What a step of the product's tile multiplies; half where memory is small.
        stages: Steps of the product that are on their way.
    """

    name: str
    processors: int
    shared: int
    threads: int
    depth: int
    stages: int


GPUS = {
    (8, 0): Gpu("A100", 108, 164, 2048, 64, 3),
    (8, 9): Gpu("L40S", 142, 100, 1536, 32, 3),
    (9, 0): Gpu("H100", 132, 228, 2048, 64, 3),
    (10, 0): Gpu("B200", 148, 228, 2048, 64, 3),
}


def _empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ids(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int64)


def gather() -> Launch:
    """Hidden states of a layer to the device."""
    memory = _empty(PAGES, 4096 + LAYERS * PAGE * WIDTH)
    return gather_launch(memory, _ids(PAGES), 4096, _empty(PAGES, PAGE * WIDTH))


def gather_planes() -> Launch:
    """K and V of a layer to their slots."""
    memory, plane = _empty(PAGES, 4096 + 2 * LAYERS * PAGE * WIDTH), _empty(PAGES, PAGE, 1, WIDTH)
    return gather_planes_launch(memory, _ids(PAGES), 4096, [plane, plane], _ids(PAGES))


def scatter() -> Launch:
    """K or V of a layer to its pages in host memory."""
    memory = _empty(PAGES, 4096 + 2 * LAYERS * PAGE * WIDTH)
    rows = _empty(PAGES, PAGE * WIDTH)
    return gather_launch(memory, _ids(PAGES), 4096, rows, save=True)


def save() -> Launch:
    """Hidden states of all layers of a step to their pages in host memory."""
    arena = _empty(PAGES, 4096 + LAYERS * PAGE * WIDTH)
    staged = _empty(LAYERS, PAGE, WIDTH)
    return save_launch(staged, _ids(PAGE), _ids(PAGES), arena, _ids(LAYERS), PAGE, range(PAGE))


COPIES: dict[str, Callable[[], Launch]] = {
    "gather": gather,
    "K and V to slots": gather_planes,
    "K or V to pages": scatter,
    "save": save,
}


def product(gpu: Gpu) -> Launch:
    """A matrix product in bfloat16 by tiles of :data:`TILE`."""
    size = 4096
    rows, columns = TILE
    factors = {name: _empty(size, size, dtype=torch.bfloat16) for name in ("a", "b", "out")}
    sizes = {"N": size, "ROWS": rows, "COLUMNS": columns, "DEPTH": gpu.depth}
    grid = (size // rows, size // columns)
    return Launch(product_kernel, grid, {**factors, **sizes}, 8, gpu.stages)


@triton.jit
def product_kernel(
    a,  # [N, N]
    b,  # [N, N]
    out,  # [N, N]
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, N, DEPTH):
        at = start + tl.arange(0, DEPTH)
        left = tl.load(a + row[:, None] * N + at[None, :])
        right = tl.load(b + column[None, :] * N + at[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * N + column[None, :], total.to(tl.bfloat16))


def jobs() -> dict[tuple[tuple[int, int], str], Job]:
    """What is compiled, by compute capability and name."""
    found = {}
    for capability, gpu in GPUS.items():
        found[capability, "product"] = Job(capability, partial(product, gpu))
        for name, launch in COPIES.items():
            found[capability, name] = Job(capability, launch)
    return found


def beside(gpu: Gpu, tile: Usage, tile_threads: int, copy: Usage) -> int:
    """How many programs of a copy fit on a multiprocessor beside a tile of a product."""

    def registers(usage: Usage, threads: int) -> int:
        return threads * -(-usage.registers // 8) * 8

    return max(
        0,
        min(
            (_REGISTERS - registers(tile, tile_threads)) // registers(copy, _THREADS),
            (gpu.shared * 1024 - tile.shared - _RESERVED) // (copy.shared + _RESERVED),
            (gpu.threads - tile_threads) // _THREADS,
        ),
    )


def most_programs(gpu: Gpu) -> int:
    """Programs of a copy on this GPU, as ``hcache_kernels.launch.most_copy_programs`` has it."""
    return min(MOST_COPY_PROGRAMS, gpu.processors // 4)


def compute() -> dict[str, list[dict[str, Any]]]:
    usages = compile_all({str(key): job for key, job in jobs().items()})
    rows = []
    for capability, gpu in GPUS.items():
        tile = usages[str((capability, "product"))]
        for name in COPIES:
            copy, programs = usages[str((capability, name))], most_programs(gpu)
            row = {
                "device": f"{gpu.name} (sm_{capability[0]}{capability[1]})",
                "copy": name,
                "registers": copy.registers,
                "shared": copy.shared,
                "tile_registers": tile.registers,
                "tile_shared": tile.shared,
                "beside_a_tile": beside(gpu, tile, 8 * 32, copy),
                "programs": programs,
                "of_multiprocessors": programs / gpu.processors,
            }
            rows.append(row)
    return {"rows": rows, "triton": [{"version": triton.__version__}]}


def table_lines(results: dict[str, list[dict[str, Any]]]) -> str:
    """One line per copy and device."""
    heads = (
        "device",
        "copy",
        "registers",
        "shared memory, bytes",
        f"registers of a {TILE[0]} x {TILE[1]} tile",
        "its shared memory, KiB",
        "programs beside a tile",
        "programs at most",
        "of the multiprocessors",
    )
    lines = [
        [
            row["device"],
            row["copy"],
            row["registers"],
            row["shared"],
            row["tile_registers"],
            row["tile_shared"] // 1024,
            row["beside_a_tile"],
            row["programs"],
            f"{row['of_multiprocessors']:.0%}",
        ]
        for row in results["rows"]
    ]
    return markdown(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for occupancy.json")
    out = parser.parse_args().out
    results = compute()
    write_json(out / "occupancy.json", results)
    print(table_lines(results))


if __name__ == "__main__":
    main()
