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

from bench.gpu.program import finish

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
    rows = [{"right": True}, {"skipped": "why"}, {"right": right}]
    options = Namespace(dry_run=True, out=None)
    assert finish("it", "a GPU", options, {"rows": rows}, lambda results: None) == status


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
        *(("decode", way) for way in ("none", "staged", "direct", "alone", "during restores")),
        *(("prefill", way) for way in ("none", "staged", "direct")),
    }
