"""Runs what needs a GPU on the stand-in, in a process whose kernels are interpreted."""

from pathlib import Path

import pytest

from tests.inner_pytest import run_pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["tests/cuda_standin/on_device", "tests/gpu"])
def test_on_the_stand_in(folder: str, tmp_path: Path) -> None:
    arguments = ["-m", "not long", "-p", "tests.cuda_standin.plugin", folder]
    env = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    said = run_pytest(*arguments, cwd=ROOT, env=env)
    assert " skipped" not in said.splitlines()[-1]
