"""pytest in a process of its own: for tests that need another environment from the start."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_pytest(*arguments: str, cwd: Path, env: Mapping[str, str]) -> str:
    """Run tests, of which some must pass and none may fail, with ``env`` beside this process' own.

    Returns:
        What pytest printed.
    """
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    return run.stdout
