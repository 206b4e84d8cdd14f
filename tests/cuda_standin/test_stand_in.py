"""Runs what needs a GPU on the stand-in, in a process whose kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["tests/cuda_standin/on_device", "tests/gpu"])
def test_on_the_stand_in(folder: str, tmp_path: Path) -> None:
    plugin = ["-p", "no:cacheprovider", "-p", "tests.cuda_standin.plugin"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not long", *plugin, folder],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert " skipped" not in run.stdout.splitlines()[-1]
