"""Compiling Triton kernels for GPUs that are not there, and what they would use of them."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import bench.gpu  # noqa: F401  in processes of their own too: the kernels, as in tests/conftest.py

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WORKERS = 2

SHARED_MEMORY = {(8, 0): 163, (8, 9): 99, (9, 0): 227}
"""Devices to compile for, by compute capability, and the KiB of shared memory of a program there
(CUDA programming guide)."""

if (TOOLS / "ptxas-blackwell").exists():
    SHARED_MEMORY[10, 0] = 227

IN_EVERY_RUN = ("sm_90 ", "sm_80 fused bfloat16 head 96 ")
"""How the names of jobs begin that are compiled in every run: all of one device, and of another
what leaves the fewest registers. The others are compiled in long runs only."""

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Usage:
    """What a program of a kernel takes of a multiprocessor.

    Attributes:
        registers: A thread's.
        stack: Bytes of memory that a thread spills registers to.
        shared: Bytes of shared memory.
    """

    registers: int
    stack: int
    shared: int


class Launch(Protocol):
    """A kernel with everything that its compilation depends on."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int
    stages: int


@dataclass(frozen=True)
class Job:
    """A launch to compile.

    Attributes:
        capability: For which device.
        launch: Makes the launch, in another process: a function of a module, or a partial of one.
    """

    capability: tuple[int, int]
    launch: Callable[[], Launch]


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor that has no memory: all that a compilation asks of it."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def device_name(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def cases(jobs: Mapping[str, Job]) -> list[Any]:
    """The names of jobs, as parameters of a test."""
    return [
        pytest.param(name, marks=() if name.startswith(IN_EVERY_RUN) else pytest.mark.long)
        for name in jobs
    ]


def compile_all(jobs: Mapping[str, Job]) -> dict[str, Usage]:
    """Compile every job, without Triton's cache, in a few processes."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "interpreted kernels do not compile"
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="hcache-triton-") as cache,
        ProcessPoolExecutor(WORKERS, spawn, _use_cache, (cache,)) as pool,
    ):
        return dict(zip(jobs, pool.map(_compile, jobs.values()), strict=True))


def _use_cache(path: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = path


def _compile(job: Job) -> Usage:
    launch = job.launch()
    return compile_kernel(
        launch.kernel, launch.arguments, job.capability, launch.warps, launch.stages
    )


def compile_kernel(
    kernel: Any, arguments: dict[str, Any], capability: tuple[int, int], warps: int, stages: int
) -> Usage:
    """Compile a kernel as its launch with these arguments would, for another device.

    Args:
        kernel: A ``triton.jit`` function, in a process without TRITON_INTERPRET.
        arguments: By name, compile-time ones included; tensors may be on the ``meta`` device and
            count as aligned to 16 bytes.
        capability: The device's.
        warps: Warps of a program.
        stages: Depth of the software pipeline.
    """
    major, minor = capability
    compiled = triton.compile(
        _source(kernel, arguments),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        done = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found, done.stdout + done.stderr
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared)


def _source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """What Triton's launcher would specialise the kernel on."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        one = isinstance(value, int) and value == 1
        if parameter.is_constexpr or value is None or one:
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes)
