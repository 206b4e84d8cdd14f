"""Settings of all tests."""

import os
import signal
from contextlib import suppress
from pathlib import Path

# Tiny tensors on few cores: threads only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

import bench.gpu  # noqa: F401  the kernels, where only the checkout is there
from tests.durations import Durations, longest_first

# A shell has its background jobs ignore it, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that waits for a busy machine is not a slow one; pytest's timeout ends those that hang.
with suppress(ImportError):  # machines with a GPU may lack it: bench/gpu/first.sh
    from hypothesis import settings

    settings.register_profile("busy machine", deadline=None)
    settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long-results",
        type=Path,
        metavar="FILE",
        help="JSON file that keeps what tests marked long found",
    )
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write how long each file of tests took to tests/durations.json",
    )
    parser.addoption(
        "--ptx",
        choices=("sm_80", "sm_90", "sm_100"),
        help="run the kernels of tests/kernels/operations compiled for this device (tests/ptx)",
    )
    parser.addoption(
        "--ptx-seed",
        type=int,
        metavar="SEED",
        help="with --ptx: warps in an order by chance, and races are faults",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # one process writes the files
    path = config.getoption("--long-results")
    if path is not None:
        from tests.long_results import LongResults

        config.pluginmanager.register(LongResults(path))
    if config.getoption("--write-durations"):
        config.pluginmanager.register(Durations())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        longest_first(items, config.getoption("--long-results"))
