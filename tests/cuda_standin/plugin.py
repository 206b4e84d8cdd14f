"""pytest plugin: the whole run has the stand-in for its GPU. Triton interprets kernels, or they run
compiled on the emulator (``--ptx``).

For `pytest -p tests.cuda_standin.plugin`, without ``--ptx`` with `TRITON_INTERPRET=1`: see
`test_stand_in.py`.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.cuda_standin import device
from tests.kernels import interpreter

torch.set_num_threads(1)
_standing_in = device.stand_in()


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules ask whether there is a GPU."""
    if compiled_for := config.getoption("--ptx"):
        from tests.ptx import launches

        launches.emulate(int(compiled_for.removeprefix("sm_")), config.getoption("--ptx-seed"))
    else:
        interpreter.mend()
    _standing_in.__enter__()


def pytest_unconfigure() -> None:
    """What is left runs."""
    _standing_in.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What a test launched has run when the next one begins."""
    yield
    device.synchronize()
    device.launches.clear()
