"""Runs the tests of tests/engine/in_process, which import SGLang, in their own interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env

pytestmark = [pytest.mark.engine, pytest.mark.versions]


def test_classes_against_sglangs_own(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "in_process"],
        cwd=Path(__file__).parent,
        env={**os.environ, **cpu_engine_env(), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
