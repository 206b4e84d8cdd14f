"""Runs what needs a GPU on the stand-in, in a process of its own.

Kernels are compiled for Hopper and run on the emulator of tests/ptx, or are interpreted.
"""

from pathlib import Path

import pytest

from tests.inner_pytest import run_pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("how", ["compiled", pytest.param("interpreted", marks=pytest.mark.long)])
def test_on_the_stand_in(how: str, tmp_path: Path) -> None:
    folders = ["tests/cuda_standin/on_device", "tests/gpu"]
    # Rounds on the CPU run without the stand-in, too.
    arguments = ["-m", "not long", "-k", "not cpu-", "-p", "tests.cuda_standin.plugin", *folders]
    env = {"OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    if how == "compiled":
        arguments += ["--ptx", "sm_90"]
    else:
        env["TRITON_INTERPRET"] = "1"
    said = run_pytest(*arguments, cwd=ROOT, env=env)
    assert " skipped" not in said.splitlines()[-1]
