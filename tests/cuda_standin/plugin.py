"""pytest plugin: the whole run has the stand-in for its GPU, and Triton interprets kernels.

For `pytest -p tests.cuda_standin.plugin` with `TRITON_INTERPRET=1`, see `test_stand_in.py`.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.cuda_standin import device
from tests.kernels import interpreter

interpreter.mend()
torch.set_num_threads(1)


_standing_in = device.stand_in()
_standing_in.__enter__()  # before test modules ask whether there is a GPU


def pytest_unconfigure() -> None:
    """What is left runs."""
    _standing_in.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What a test launched has run when the next one begins."""
    yield
    device.synchronize()
    device.launches.clear()
