"""Steps of a script: each has its share of the budget, and what it found is kept."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import first, steps
from bench.gpu.steps import Step, rows_of, run


def a_step(folder: Path, code: str) -> tuple[Step, dict[str, str]]:
    """A step that runs ``code`` with ``folder`` set to that of the results; its environment."""
    (folder / "a_step.py").write_text(f"import sys\nfolder = sys.argv[2]\n{code}")
    return Step("it", "a_step", [], 1), {**os.environ, "PYTHONPATH": str(folder)}


PARTIAL = """
import os, time
open(folder + "/unfinished", "w").write('{"device": "x", "rows": [{"ms": 1}]}')
os.rename(folder + "/unfinished", folder + "/it.json")
time.sleep(600)
"""


def test_a_step_that_runs_out_of_time_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnceWritten(threading.Thread):
        """A timer that runs out when the step has its row."""

        def __init__(self, limit: float, end: Callable[[], None]) -> None:
            super().__init__(daemon=True)
            assert limit == 60.0
            self.end, self.cancel = end, lambda: None

        def run(self) -> None:
            while not (tmp_path / "it.json").exists():
                time.sleep(0.01)
            self.end()

    monkeypatch.setattr(steps.threading, "Timer", OnceWritten)
    step, environment = a_step(tmp_path, PARTIAL)
    found = run(step, tmp_path, 60.0, environment)
    assert found["seconds"] < 600
    assert found["outcome"] == "out of time"
    assert found["rows"] == {"rows": [{"ms": 1}]}


def test_a_step_that_fails_tells_the_end_of_its_traceback(tmp_path: Path) -> None:
    step, environment = a_step(tmp_path, 'raise RuntimeError("a test\'s fault")')
    (tmp_path / "it.json").write_text("of an earlier run")
    found = run(step, tmp_path, 600.0, environment)
    assert found["outcome"] == "failed, 1"
    assert found["output"][-1] == "RuntimeError: a test's fault"
    assert "rows" not in found


def test_a_failed_step_stops_no_other_and_is_told_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def fake(step: Step, folder: Path, limit: float, env: Mapping[str, str]) -> dict[str, Any]:
        limits[step.name] = limit
        written = json.loads((folder / "first.json").read_text())["steps"] if limits else {}
        assert len(written) == len(limits) - 1  # what was found before is on the disk
        return {"seconds": 0.0, "outcome": "failed, 1" if step.name == "tests" else "done"}

    tmp_path.joinpath("first.json").write_text('{"steps": {}}')
    monkeypatch.setattr(steps, "run", fake)
    monkeypatch.setattr(sys, "argv", ["first", "--dry-run", "--out", str(tmp_path)])
    assert first.main() == 1
    assert list(limits) == list(first.STEPS)
    assert limits["questions"] == pytest.approx(500 * 3 / 18, abs=1)
    assert limits["order"] == pytest.approx(500, abs=1)  # what others left is its own


def test_long_parts_of_rows_stay_in_the_files_of_the_steps() -> None:
    content = {"device": "x", "rows": [{"ms": 1, "spans": [1] * 100}], "torch": "2"}
    assert rows_of(content) == {"rows": [{"ms": 1}]}
