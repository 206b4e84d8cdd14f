"""Runs tests/kernels/operations under Triton's interpreter, in a process of its own."""

from pathlib import Path

import pytest

from tests.inner_pytest import run_pytest

FOLDER = Path(__file__).resolve().parent / "operations"
ROOT = FOLDER.parents[2]


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_interpreted(which: str) -> None:
    # Tiles are small: threads would only wait for each other.
    env = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    said = run_pytest("-m", which, str(FOLDER), cwd=ROOT, env=env)
    assert " skipped" not in said.splitlines()[-1]
