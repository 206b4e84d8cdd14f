"""Compiles launches ahead of time, and says what their kernels take of a multiprocessor."""

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hcache_kernels.launch import Launch
from tests.ptx.machine import decode
from tests.ptx.opcodes import TABLE
from tests.ptx.program import Fault, parse

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WORKERS = 2

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


class Usage(NamedTuple):
    """What a program of a kernel takes of a multiprocessor."""

    registers: int  # of a thread
    stack: int  # bytes of memory that a thread spills registers to
    shared: int  # bytes of shared memory
    loads: int  # bytes of the widest load of global memory; 0: there is none
    stores: int
    fused: int  # additions to a product of bf16 or fp16 that is not rounded before
    opcodes: frozenset[str]  # that compute in registers, as the emulator knows them; else a fault


class Job(NamedTuple):
    capability: tuple[int, int]  # of the device to compile for
    launch: Callable[[], Launch]  # a function of a module or a partial of one: for other processes


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
    launch, (major, minor) = job.launch(), job.capability
    compiled = triton.compile(
        source(launch.kernel, launch.arguments),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options=launch.options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", cubin.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found, done.stdout + done.stderr
    ptx = compiled.asm["ptx"]
    loads, stores = (_widest(way, ptx) for way in ("ld", "st"))
    taken = int(found[1]), int(found[2]), compiled.metadata.shared
    return Usage(*taken, loads, stores, fused(ptx), _opcodes(ptx))


def _opcodes(ptx: str) -> frozenset[str]:
    try:
        program = parse(ptx)
        decode(program)
    except Fault as fault:
        return frozenset([str(fault)])
    return frozenset(one.opcode for one in program.instructions) & TABLE.keys()


def _widest(way: str, ptx: str) -> int:
    """Bytes that one ``ld`` or ``st`` of global memory moves at most."""
    found = re.findall(rf"\b{way}\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)


def fused(ptx: str) -> int:
    """How often a product of bf16 or fp16 is added to something before it is rounded. On sm_80 sums
    and products of bf16 are such instructions, too: with a factor of one, or plus minus zero."""
    values = dict(re.findall(r"\bmov\.b16\s+(%rs\d+), (\w+);", ptx))
    found = re.findall(r"\bfma\.rn\.(?:bf16|f16)(?:x2)?\s+\S+ (\S+), (\S+), (\S+);", ptx)
    operands = ([values.get(register, register) for register in one] for one in found)
    return sum(
        not {"0x3F80", "0xBF80"} & {first, second} and added != "0x8000"
        for first, second, added in operands
    )


def source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """What Triton's launcher would specialise the kernel on; storages are aligned to 16 bytes."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        any_size = parameter.do_not_specialize
        one = isinstance(value, int) and value == 1 and not any_size
        if parameter.is_constexpr or value is None or one:
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            any_address = parameter.do_not_specialize_on_alignment
            if value.storage_offset() * value.element_size() % 16 == 0 and not any_address:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0 and not any_size:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes)
