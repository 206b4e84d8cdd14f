"""Runs what needs a GPU on the stand-in, in a process whose kernels are interpreted."""

from pathlib import Path

from tests.inner_pytest import run_pytest

ROOT = Path(__file__).resolve().parents[2]


def test_on_the_stand_in(tmp_path: Path) -> None:
    folders = ["tests/cuda_standin/on_device", "tests/gpu"]
    # Rounds on the CPU run without the stand-in, too.
    arguments = ["-m", "not long", "-k", "not cpu-", "-p", "tests.cuda_standin.plugin", *folders]
    env = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    said = run_pytest(*arguments, cwd=ROOT, env=env)
    assert " skipped" not in said.splitlines()[-1]
