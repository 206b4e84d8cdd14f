"""What the checker passes over, and why: every silence stands here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tests.order.clocks import Frame

_TORCH = str(Path(torch.__file__).parent) + os.sep
_CHECKER = str(Path(__file__).parent) + os.sep
_TRANSPARENT = ("/contextlib.py", "/hcache_cpu_engine/plugin.py")
_ROOTS = ("/hcache_backend/", "/kernels/", "/hcache_kernels/", "/sglang/", "/tests/")


@cache  # asked of every frame of every access
def is_machinery(file: str) -> bool:
    """Frames that say nothing: torch's, the checker's, context managers', and those of the CPU
    engine around torch's factories, behind which it would not show that a tensor is the host's."""
    if file.startswith(_CHECKER):
        return not Path(file).name.startswith(("test_", "scenario"))
    return file.startswith(_TORCH) or file.endswith(_TRANSPARENT)


def short(file: str) -> str:
    """A path below the root of its package."""
    for root in _ROOTS:
        if root in file:
            return root[1:] + file.rsplit(root, 1)[1]
    return file


class Silence(NamedTuple):
    """Files (or functions in them) that something does not apply to."""

    reason: str
    files: tuple[str, ...]
    functions: tuple[str, ...] = ()

    def covers(self, frame: Frame) -> bool:
        """Whether the rule is about the function that a frame is in."""
        name = frame.code.co_filename
        return any(part in name for part in self.files) and (
            not self.functions or frame.code.co_name in self.functions
        )


KERNEL_REFERENCES = (
    Silence(
        "Torch references of Triton kernels read lengths and indices on the host (.item(), "
        "nonzero); the kernels read them on the stream. Counted as waits of the host they would "
        "order things that nothing orders on a GPU.",
        ("/kernels/", "/hcache_kernels/"),  # in the checkout, and installed
    ),
    Silence(
        "SGLang asks for slots and attends by kernels; the CPU engine has loops over requests.",
        ("/mem_cache/allocator/paged.py", "/hcache_cpu_engine/"),
    ),
    Silence(
        "The attention backend for CPUs reads the longest request's length on the host.",
        ("/intel_amx_backend.py", "/cuda_graph_buffer_registry.py"),
    ),
    Silence(
        "SGLang's experts in torch read on the host how many tokens each one has. So all that a "
        "layer with experts wrote would be known to the host, and a backup behind it in order.",
        ("/moe/fused_moe_native.py",),
    ),
    Silence(
        "Torch stand-ins of SGLang's own kernels.",
        ("/forward_batch_info.py",),
        ("compute_position_torch",),
    ),
)

HOST_MEMORY = Silence(
    "Host pools and L3 backends name their device in a variable; it is the host's memory.",
    ("/mem_cache/pool_host/", "/mem_cache/hicache_storage", "/hcache_backend/store/"),
)

READ_ONCE = Silence(
    "GPU backends turn req_to_token into page tables once, at the begin of a step, and translate "
    "them to slots of windows. SGLang's barrier is behind that, and its scheduler waits for it "
    "before it frees windows or writes req_to_token. Here the barrier may be before the whole "
    "step, and the backend for CPUs reads both again in every layer. Plain HiCache is reported, "
    "too.",
    ("/hcache_cpu_engine/attention.py", "/hcache_cpu_engine/dsa.py", "/intel_amx_backend.py"),
)
PAGE_TABLES = ("req_to_token", "full_to_swa")


def is_kernel_reference(where: Sequence[Frame]) -> bool:
    """Whether the host does something there that a kernel does on its stream."""
    return any(
        silence.covers(frame)
        for frame in where[:3]
        for silence in KERNEL_REFERENCES
        if "sglang" not in frame.code.co_filename or silence is not KERNEL_REFERENCES[0]
    )


def is_silent(memory: str, how: str, where: Sequence[Frame]) -> bool:
    """Whether an access is one that a GPU's backend does not make there."""
    reads = memory in PAGE_TABLES and how == "read"
    # SGLang's function that translates slots is between.
    return reads and any(READ_ONCE.covers(frame) for frame in where[:2])
