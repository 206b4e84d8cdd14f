"""These tests run on the stand-in, in a process that tests/cuda_standin/test_stand_in.py starts."""

import torch

from tests.cuda_standin import device


def pytest_ignore_collect() -> bool | None:
    return None if torch.cuda.Stream is device.Stream else True
