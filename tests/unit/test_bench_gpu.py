"""``bench/gpu/first.sh`` goes through, on the CPU, with what a machine with a GPU has installed.

One dry run of all its programs; tests look at what each of them wrote. Each step has its share of
the budget, and what it found is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from bench.gpu import (
    capture,
    first,
    kernels,
    kernels_transfers,
    overlap,
    questions,
    restore,
    steps,
)
from bench.gpu.first import STEPS
from bench.gpu.program import Device, GpuProgram, GpuRun
from bench.gpu.steps import Step, run

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "first.sh"
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
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    hidden, folder = tmp_path_factory.mktemp("hidden"), tmp_path_factory.mktemp("results")
    (hidden / "sitecustomize.py").write_text(HIDE.format(absent=ABSENT.split()))
    done = subprocess.run(
        [SCRIPT, "--dry-run", "--out", folder, "--budget", "3600"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(hidden),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
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
    steps = report["steps"]
    assert list(steps) == list(STEPS)
    assert all(step["outcome"] == "done" for step in steps.values())
    tests = steps["tests"]["rows"]["rows"]
    assert any(row["file"].startswith("tests/gpu/") for row in tests)
    assert sum(row["skipped"] for row in tests) > 100  # collected, each with its reason
    assert not any(row["failed"] for row in tests)
    with tarfile.open(dry_run.folder / "first.tar") as packed:
        assert {"first.json", "tests.json", "kernels.log", "tests-kernels-test_pages.log"} <= set(
            packed.getnames()
        )
    assert "spans" not in steps["restore"]["rows"]["rows"][0]
    assert len(steps["capture"]["rows"]["rows"]) == len(dry_run.content("capture")["rows"])


@needs_none
def test_copies_are_timed_beside_products(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("overlap")
    assert {row["programs"] for row in content["speeds"]} == {2, 4, 8, 16, 32, None}
    overlap.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_restore_goes_every_way_on_every_shape(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("restore")
    rows = content["rows"]
    methods = {"recompute", "kv offload", "hidden", "hidden exp4"}
    methods |= {"hidden + kv", "hidden + recompute"}
    methods |= {"own pages", "own pages, copy engine"}  # plain ones need SGLang's kernel
    cases = {(row["model"], row["history"], row["slowed"]) for row in rows}
    assert len(cases) == 3 * 2 * 2
    assert len(rows) == len(cases) * len(methods)
    assert {row["method"] for row in rows} == methods
    mixed = {row["layers"] for row in rows if row["method"] == "hidden + recompute"}
    assert all("recompute" in layers and "hidden" in layers for layers in mixed)
    restore.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_capture_is_timed_in_every_step(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("capture")
    steps = [(row["step"], row["tokens"]) for row in content["rows"][:4]]
    assert steps == [("decode", 2), ("decode", 3), ("prefill graph", 32), ("prefill", 48)]
    assert all(row["ms"] > 0 and row["alone_ms"] > 0 for row in content["rows"])
    capture.PROGRAM.draw(content).savefig(tmp_path / "it.png")


@needs_none
def test_kernels_are_measured_both_ways_and_checked(dry_run: DryRun, tmp_path: Path) -> None:
    content = dry_run.content("kernels")
    rows = content["projection"]
    assert len({row["model"] for row in rows}) == 5
    assert {way["way"] for row in rows for way in row["ways"]} == {"fused", "library"}
    kinds = {row["kind"] for row in content["transfers"]}
    assert kinds == {"codec", "segments"}
    ways = ("encode", "decode", "copy", "saved", "loaded", "uncoded_save", "uncoded_load")
    segments = [row for row in content["transfers"] if row["kind"] == "segments"]
    assert {row["codec"] for row in segments} == {"exp3", "exp4", "int8", "fp8"}
    assert all(row[f"{way}_us"] > 0 for row in segments for way in ways)
    kernels.PROGRAM.draw(content).savefig(tmp_path / "it.png")


def test_rows_of_codecs_name_the_goals_that_they_miss() -> None:
    times = {"encode": 3.0, "decode": 1.0, "saved": 20.0, "loaded": 20.0}
    times |= {"uncoded_save": 20.0, "uncoded_load": 26.0}
    met = kernels_transfers.speeds(times, 10**6)
    assert met["encode_gbs"] == pytest.approx(333.3, abs=0.1) and met["missed"] == []
    slower = times | {"encode": 4.0, "decode": 1.1, "saved": 21.0}
    missed = kernels_transfers.speeds(slower, 10**6)["missed"]
    assert missed == ["encode", "decode", "saved"]
    hidden = {name: slower[name] for name in ("encode", "decode")}
    assert kernels_transfers.speeds(hidden, 10**6)["missed"] == ["encode", "decode"]
    assert kernels.missed({"missed": missed}) == "encode, decode, saved"
    assert kernels.missed({"missed": []}) == "none"


@needs_none
def test_questions_have_answers(dry_run: DryRun) -> None:
    content = dry_run.content("questions")
    found = {(row["model"], row["rows"]) for row in content["slices"]}
    assert found == {(name, n) for name in ("Llama-2-7B", "Llama-3-8B") for n in questions.ROWS}
    assert all(row["slice_us"] > 0 and row["qkv_us"] > 0 for row in content["slices"])
    assert {row["codec"] for row in content["host"]} == set(questions.CODECS)
    assert all(row["save_host_us"] > 0 and row["load_host_us"] > 0 for row in content["host"])
    assert content["register"][-1]["gb"] == 0.001


def test_less_memory_is_registered_where_less_is_free_and_none_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "REGISTERED_GB", (0.001, 0.002))
    cpu = Device(dry_run=True)
    rows = list(questions.register(cpu, 50, 25, 0.006e9))
    assert [row["gb"] for row in rows] == [0.001, 0.002, 0.003]
    assert [row.get("said") for row in rows] == [
        *(None, None),
        "less than 50 GB: half of what is free here",
    ]
    [first, second] = questions.register(cpu, 0.002, 0, 1e9)
    assert first["gb_s"] > 0 and second["skipped"].endswith("s predicted, 0 allowed")


def make_run(out: Path | None, *, dry_run: bool) -> GpuRun:
    run = GpuRun("it", Namespace(dry_run=dry_run, out=out), ArgumentParser())
    run.device = SimpleNamespace(name="a GPU")  # type: ignore[assignment]
    return run


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_a_wrong_result_ends_a_program_with_status_1(
    right: bool, status: int, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    def measure(run: GpuRun) -> None:
        for row in ({"right": True}, {"skipped": "why"}, {"right": right}):
            run.add(row, "a row")

    program = GpuProgram(
        name="it", doc="It.", measure=measure, draw=lambda _: Figure(), tables={"table": ()}
    )
    assert program.main(["--dry-run", "--out", str(tmp_path)]) == status
    assert (tmp_path / "it.png").stat().st_size > 0


def test_a_dry_run_only_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert make_run(None, dry_run=True).folder is None
    assert make_run(None, dry_run=False).folder == tmp_path / "a-gpu"


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
    assert limits["questions"] == pytest.approx(500 * 3 / 17, abs=1)
    assert limits["kernels"] == pytest.approx(500, abs=1)  # what others left is its own
