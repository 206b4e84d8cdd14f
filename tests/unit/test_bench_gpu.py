"""The benchmarks of restore and capture run through where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.capture import WAYS
from bench.gpu.program import Results

ROOT = Path(__file__).resolve().parents[2]


def dry_run(name: str, folder: Path) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", f"bench.gpu.{name}", "--dry-run", "--out", folder],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert (folder / f"{name}.png").stat().st_size > 0
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert content["dry_run"]
    assert all(row["right"] for row in content["rows"])
    return content


@pytest.mark.parametrize(("right", "status"), [(True, 0), (False, 1)])
def test_a_wrong_result_ends_a_program_with_status_1(right: bool, status: int) -> None:
    results = Results("it", "a GPU", Namespace(dry_run=True, out=None))
    for row in ({"right": True}, {"skipped": "why"}, {"right": right}):
        results.add(row, "a row")
    assert results.finish(lambda content: None) == status


def test_rows_are_in_the_file_before_the_next_one_is_measured(tmp_path: Path) -> None:
    results = Results("it", "a GPU", Namespace(dry_run=False, out=tmp_path))
    for count in (1, 2):
        results.add({"number": count, "right": True}, "a row", "some")
        content = json.loads((tmp_path / "it.json").read_text())
        assert [row["number"] for row in content["some"]] == [1, 2][:count]


def test_restore_goes_every_way_on_every_shape(tmp_path: Path) -> None:
    rows = dry_run("restore", tmp_path)["rows"]
    methods = {"recompute", "kv offload", "hidden", "hidden exp4"}
    methods |= {"hidden + kv", "hidden + recompute"}
    cases = {(row["model"], row["history"], row["slowed"]) for row in rows}
    assert len(cases) == 3 * 2 * 2
    assert len(rows) == len(cases) * len(methods)
    assert {row["method"] for row in rows} == methods
    mixed = {row["layers"] for row in rows if row["method"] == "hidden + recompute"}
    assert all("recompute" in layers and "hidden" in layers for layers in mixed)


def test_capture_goes_every_way(tmp_path: Path) -> None:
    rows = dry_run("capture", tmp_path)["rows"]
    assert {(row["step"], row["way"]) for row in rows} == {
        *(("decode", way) for way in (*WAYS, "alone", "during restores")),
        *((step, way) for step in ("prefill", "prefill graph") for way in WAYS),
    }
