"""``bench/gpu/first.sh`` goes through, on the CPU, with what a machine with a GPU has installed.

One dry run of each program; tests look at what it wrote. Each step has its share of the budget, and
what it found is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench.gpu import capture, first, kernels, overlap, questions, restore, steps
from bench.gpu import tests as gpu_tests
from bench.gpu.steps import Step, rows_of, run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "first.sh"
IN_THE_SCRIPT = ("questions", "overlap", "capture")
# Their dry runs of all models take a minute: here they have those that the script has on a GPU.
BY_THEMSELVES = {"restore": ["Llama-2-7B"], "kernels": ["Llama-2-7B", "Qwen3-8B"]}
ABSENT = """
sglang matplotlib hypothesis pytest_timeout xdist pydantic prometheus_client typer rich
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
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class DryRun(NamedTuple):
    """The script's report, and the folder with the files of its steps."""

    report: dict[str, Any]
    folder: Path

    def content(self, name: str) -> dict[str, Any]:
        """What a program wrote; all of it must be right."""
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        assert found["dry_run"]
        kinds = [rows for rows in found.values() if isinstance(rows, list)]
        checked = [row for rows in kinds for row in rows]
        assert checked and all(row["right"] for row in checked if "skipped" not in row)
        return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that has only what machines with a GPU have."""
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "sitecustomize.py").write_text(HIDE.format(absent=ABSENT.split()))
    return {"PYTHONPATH": str(hidden), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture(scope="module")
def dry_run(bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    folder = tmp_path_factory.mktemp("results")
    commands = [[str(SCRIPT), "--budget", "3600", "--only", *IN_THE_SCRIPT]]
    for name, models in BY_THEMSELVES.items():
        commands.append([sys.executable, "-m", f"bench.gpu.{name}", "--models", *models])
    for command in commands:
        done = subprocess.run(
            [*command, "--dry-run", "--out", str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **bare},
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return DryRun(json.loads((folder / "first.json").read_text()), folder)


@needs_none
def test_every_step_is_done_and_in_the_report(dry_run: DryRun) -> None:
    report = dry_run.report
    assert report["device"] == "cpu" and report["versions"]["torch"]
    assert list(report["steps"]) == list(IN_THE_SCRIPT)
    assert all(step["outcome"] == "done" for step in report["steps"].values())
    with tarfile.open(dry_run.folder / "first.tar") as packed:
        assert {"first.json", "capture.json", "capture.log"} <= set(packed.getnames())
    assert not {"spans", "ways"} & rows_of(dry_run.content("restore"))["rows"][0].keys()


@needs_none
def test_tests_for_a_gpu_are_collected_with_nothing_more_installed(
    bare: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bare.items():
        monkeypatch.setenv(name, value)
    # Two processes in the place of one for each file: on a CPU every test is skipped.
    monkeypatch.setattr(gpu_tests, "files", lambda: map(Path, gpu_tests.FOLDERS))
    assert gpu_tests.PROGRAM.main(["--dry-run", "--out", str(tmp_path)]) == 0
    rows = {row["file"]: row for row in DryRun({}, tmp_path).content("tests")["rows"]}
    assert rows.keys() == set(gpu_tests.FOLDERS)
    assert all(row["skipped"] and not row["failed"] for row in rows.values())
    assert (tmp_path / "tests-gpu.log").exists()


@needs_none
def test_without_a_gpu_only_a_dry_run_is_possible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["first"])
    with pytest.raises(SystemExit, match="2"):
        first.main()
    assert "no CUDA device; --dry-run does without" in capsys.readouterr().err


@needs_none
def test_copies_are_timed_beside_products(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("overlap")
    ways = [f"gather kernel, {n}" for n in overlap.PROGRAMS]
    assert [row["way"] for row in content["speeds"]] == [*ways, "copy engine"]
    assert all(row["right"] and 0 < row["products"] <= 1 for row in content["speeds"])
    overlap.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_restore_goes_every_way(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("restore")
    rows = content["rows"]
    methods = {"recompute", "kv offload", "hidden", "hidden exp4"}
    methods |= {"hidden + kv", "hidden + recompute"}
    methods |= {"own pages", "own pages, copy engine"}  # plain ones need SGLang's kernel
    cases = {(row["model"], row["history"], row["slowed"]) for row in rows}
    assert len(cases) == 2 * 2
    assert len(rows) == len(cases) * len(methods)
    assert {row["method"] for row in rows} == methods
    mixed = {row["layers"] for row in rows if row["method"] == "hidden + recompute"}
    assert all("recompute" in layers and "hidden" in layers for layers in mixed)
    restore.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_capture_is_timed_in_every_step(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("capture")
    found = [(row["step"], row["tokens"]) for row in content["rows"][:4]]
    assert found == [("decode", 2), ("decode", 3), ("prefill graph", 32), ("prefill", 48)]
    assert all(row["ms"] > 0 and row["alone_ms"] > 0 for row in content["rows"])
    capture.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_kernels_are_measured_both_ways_and_checked(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("kernels")
    rows = content["projection"]
    assert [row["model"] for row in rows] == BY_THEMSELVES["kernels"]
    assert {way["way"] for row in rows for way in row["ways"]} == {"fused", "library"}
    assert {row["kind"] for row in content["transfers"]} == {"codec", "segments"}
    ways = ("encode", "decode", "copy")
    segments = [row for row in content["transfers"] if row["kind"] == "segments"]
    assert {row["codec"] for row in segments} == {"exp3", "exp4", "int8"}
    assert all(row[f"{way}_us"] > 0 for row in segments for way in ways)
    kernels.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_questions_have_answers(dry_run: DryRun) -> None:
    content = dry_run.content("questions")
    steps = ["digest of 2M values", "reference of exp3", "reference of exp4"]
    assert [row["step"] for row in content["start"]] == steps
    assert {row["codec"] for row in content["host"]} == set(questions.CODECS)
    assert all(0 < row[part] <= 1 for row in content["host"] for part in ("saves", "products"))
    assert content["register"][-1]["gb"] == 0.001


def test_a_failed_step_stops_no_other_and_is_told_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def fake(step: Step, folder: Path, limit: float, env: Mapping[str, str]) -> dict[str, Any]:
        limits[step.name] = limit
        written = json.loads((folder / "first.json").read_text())["steps"]
        assert len(written) == len(limits) - 1  # what was found before is on the disk
        return {"seconds": 0.0, "outcome": "failed, 1" if step.name == "tests" else "done"}

    tmp_path.joinpath("first.json").write_text('{"steps": {}}')
    monkeypatch.setattr(steps, "run", fake)
    monkeypatch.setattr(sys, "argv", ["first", "--dry-run", "--out", str(tmp_path)])
    assert first.main() == 1
    assert list(limits) == list(first.STEPS)
    assert limits.keys() == {"tests", *IN_THE_SCRIPT, *BY_THEMSELVES}
    assert limits["questions"] == pytest.approx(500 * 3 / 17, abs=1)
    assert limits["kernels"] == pytest.approx(500, abs=1)  # what others left is its own


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
