"""The kernel benchmark runs through where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_dry_run_measures_checks_and_writes(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu.kernels", "--dry-run", "--out", tmp_path],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    content = json.loads((tmp_path / "kernels.json").read_text())
    rows = content["projection"]
    assert len({row["model"] for row in rows}) == 5
    assert all(row["right"] for row in rows)
    assert {way["way"] for row in rows for way in row["ways"]} == {"fused", "library"}
    kinds = {row["kind"] for row in content["transfers"]}
    assert kinds == {"codec", "gather", "scatter", "restore"}
    assert all(row["right"] for row in content["transfers"])
    assert (tmp_path / "kernels.png").stat().st_size > 0
