"""`make test-long` finds its tests: nothing else runs it in every change."""

import subprocess
from pathlib import Path


def test_the_long_tests_are_found() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["make", "test-long", "ARGS=--collect-only -q tests/engine/test_soak.py tests/order"],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/engine/test_soak.py::" in done.stdout
    assert "tests/order/test_engine.py::" in done.stdout
