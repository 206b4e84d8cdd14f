"""These tests run the kernels: on a GPU, under Triton's interpreter, or compiled and emulated
(``--ptx sm_90``).

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
ON_CPU = INTERPRETED  # interpreted or emulated; decided before tests are imported
_HOPPER = (9, 0)
_emulated: list[tuple[int, int]] = []

if INTERPRETED:
    from tests.kernels import interpreter

    interpreter.mend()
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    global ON_CPU  # noqa: PLW0603  what tests import
    if device := config.getoption("--ptx"):
        from tests.ptx import launches

        ON_CPU = True
        number = int(device.removeprefix("sm_"))
        _emulated.append(divmod(number, 10))
        launches.emulate(number, config.getoption("--ptx-seed"))
        torch.set_num_threads(1)


def capability() -> tuple[int, int]:
    """Of the device that runs the kernels; interpreted ones run as on Hopper."""
    if _emulated or ON_CPU:
        return _emulated[0] if _emulated else _HOPPER
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CPU:
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
    return memory if ON_CPU else memory.pin_memory()


def by(programs: int, launch: Launch) -> Launch:
    """The launch by at most so many programs: each has more to do than on other devices."""
    return replace(launch, grid=(min(programs, *launch.grid),))


def finish() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


@pytest.fixture
def device() -> str:
    return "cpu" if ON_CPU else "cuda"
