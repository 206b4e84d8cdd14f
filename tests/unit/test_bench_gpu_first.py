"""``bench/gpu/first.sh`` goes through, on the CPU, with what a machine with a GPU has installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import first
from bench.gpu.first import STEPS, Step, rows_of, run

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "first.sh"
ABSENT = """
sglang lmdb matplotlib hypothesis pytest_timeout xdist pydantic prometheus_client typer rich
aiohttp kvikio
"""
# Imported by every Python that has its folder in PYTHONPATH: finders do not see what is absent.
HIDE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_dry_run_goes_through_every_step(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(absent=ABSENT.split()))
    done = subprocess.run(
        [SCRIPT, "--dry-run", "--out", tmp_path / "results", "--budget", "600"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads((tmp_path / "results" / "first.json").read_text())
    assert content["device"] == "cpu" and content["versions"]["torch"]
    steps = content["steps"]
    assert list(steps) == [step.name for step in STEPS]
    assert all(step["outcome"] == "done" for step in steps.values())
    ways = {row["way"] for row in steps["overlap"]["rows"]["rows"]}
    assert {"gather kernel of the product", "copy engine, a copy a page"} <= ways
    assert "skipped" in steps["tests"]["output"][-1]  # collected, each with its reason
    assert "error" not in steps["tests"]["output"][-1]
    assert "spans" not in steps["restore"]["rows"]["rows"][0]
    assert {row["step"] for row in steps["capture"]["rows"]["rows"]} == {
        "decode",
        "prefill",
        "prefill graph",
    }
    restores = [row for row in steps["kernels"]["rows"]["transfers"] if row["kind"] == "restore"]
    assert all(row["gather_us"] > 0 and row["product_us"] > 0 for row in restores)
    skipped = [row["skipped"] for row in steps["order"]["rows"]["rows"] if "skipped" in row]
    assert len(skipped) == 2 and all(skipped)


def a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Step:
    """A step that runs ``code`` with ``folder`` set to that of the results."""
    (tmp_path / "a_step.py").write_text(f"import sys\nfolder = sys.argv[2]\n{code}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Step("it", "a_step", "", 1, "")


PARTIAL = 'open(folder + "/it.json", "w").write(\'{"device": "x", "rows": [{"ms": 1}]}\')\n'


def test_a_step_that_runs_out_of_time_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_step(tmp_path, monkeypatch, f"{PARTIAL}import time\ntime.sleep(60)")
    begin = time.monotonic()
    found = run(step, tmp_path, 2.0, dry_run=True)
    assert time.monotonic() - begin < 30
    assert found["outcome"] == "out of time"
    assert found["rows"] == {"rows": [{"ms": 1}]}


def test_a_step_that_fails_tells_the_end_of_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_step(tmp_path, monkeypatch, 'raise RuntimeError("a test\'s fault")')
    (tmp_path / "it.json").write_text("of an earlier run")
    found = run(step, tmp_path, 60.0, dry_run=True)
    assert found["outcome"] == "failed, 1"
    assert found["output"][-1] == "RuntimeError: a test's fault"
    assert "rows" not in found


def test_a_failed_step_stops_no_other_and_is_told_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def fake(step: Step, folder: Path, limit: float, dry_run: bool) -> dict[str, Any]:
        limits[step.name] = limit
        written = json.loads((folder / "first.json").read_text())["steps"] if limits else {}
        assert len(written) == len(limits) - 1  # what was found before is on the disk
        return {"seconds": 0.0, "outcome": "failed, 1" if step.name == "tests" else "done"}

    tmp_path.joinpath("first.json").write_text('{"steps": {}}')
    monkeypatch.setattr(first, "run", fake)
    monkeypatch.setattr(sys, "argv", ["first", "--dry-run", "--out", str(tmp_path)])
    assert first.main() == 1
    assert list(limits) == [step.name for step in STEPS]
    assert limits["overlap"] == pytest.approx(600 * 2 / 19, abs=1)
    assert limits["order"] == pytest.approx(600, abs=1)  # what others left is its own


def test_long_parts_of_rows_stay_in_the_files_of_the_steps() -> None:
    content = {"device": "x", "rows": [{"ms": 1, "spans": [1] * 100}], "torch": "2"}
    assert rows_of(content) == {"rows": [{"ms": 1}]}
