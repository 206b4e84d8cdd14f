"""These tests run the kernels: on a GPU, or under Triton's interpreter in a process of their own.

Triton decides when a kernel is defined, from TRITON_INTERPRET, whether it is interpreted; that
must not reach other tests. So tests/kernels/test_interpreted.py starts a process with it.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hcache_kernels.launch import Launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tests.kernels import interpreter

    interpreter.mend()
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    skip = pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device; tests/kernels/test_interpreted.py runs it interpreted",
    )
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skip)


def host(*shape: int, value: int | None = None) -> torch.Tensor:
    """Bytes that the device can read and write; random ones without a ``value``."""
    memory = torch.randint(256, shape, dtype=torch.uint8)
    memory = memory if value is None else memory.fill_(value)
    return memory if INTERPRETED else memory.pin_memory()


def by(programs: int, launch: Launch) -> Launch:
    """The launch by at most so many programs: each has more to do than on other devices."""
    return replace(launch, grid=(min(programs, *launch.grid),))


def finish() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
