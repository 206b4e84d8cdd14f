"""``bench/gpu/serve.sh``: servers with shapes of real models, as far as it goes without a GPU."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.serve import METHODS
from bench.gpu.serve_models import MODELS
from bench.gpu.serve_requests import DRY_LOADS, RECOMPUTATION

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "serve.sh"
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def dry_run(out: Path, *arguments: str) -> dict[str, Any]:
    """The steps of the report; nothing else is left behind."""
    with tempfile.TemporaryDirectory() as short:  # names of sockets in it have a limit
        done = subprocess.run(
            [SCRIPT, "--dry-run", "--out", out, "--budget", "3600", *arguments],
            env={**os.environ, "PYTHON": sys.executable, "TMPDIR": short},
            capture_output=True,
            text=True,
            check=False,
        )
        assert list(Path(short).iterdir()) == []
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps: dict[str, Any] = json.loads((out / "serve.json").read_text())["steps"]
    assert all(step["outcome"] == "done" for step in steps.values())
    return steps


@needs_none
@pytest.mark.long
def test_the_dry_run_serves_in_hidden_mode_and_restores_what_was_asked(tmp_path: Path) -> None:
    steps = dry_run(tmp_path, "--model", "Llama-2-7B", "--methods", "hcache-hidden")
    found = steps["serve-Llama-2-7B-hcache-hidden"]["rows"]["rows"]
    start, recomputation, *rows, alone, beside = found
    assert recomputation == {"step": RECOMPUTATION, "refused": None, "right": True}
    assert start["said"].startswith("hidden mode")
    [projected] = start["exactness"]["projection"]
    assert "% equal" in projected["exactness"]
    names = (load.name for load in DRY_LOADS)
    assert [row["step"] for row in rows] == [
        step for name in names for step in (name, f"{name}, restored")
    ]
    assert all(row["ttft_ms"] > 0 and row["gap_ms"] > 0 for row in rows)
    for load, row in zip(DRY_LOADS, rows[1::2], strict=True):
        assert row["from_l3"] == load.requests * load.history
        assert row["same_tokens"] == row["of_tokens"] == load.requests * load.after
        assert row["l3_ms"] > 0 and row["load_ms"] > 0
    assert (alone["step"], beside["step"]) == ("decode, few", "a hit beside them")
    assert beside["from_l3"] > 0 and beside["recomputed_tokens"] == 0  # it restores layer-wise
    assert alone["gap_ms"] > 0 and beside["gap_ms"] > 0


@pytest.mark.long
@needs_none
def test_the_dry_run_serves_all_models_by_all_methods(tmp_path: Path) -> None:
    for name in MODELS:
        steps = dry_run(tmp_path / name, "--model", name)
        methods = METHODS.get(name, METHODS["Llama-2-7B"])
        served = [f"serve-{name}-{method}" for method in methods]
        assert list(steps) == [f"weights-{name}", *served]
        restored = {
            method: [row["from_l3"] for row in step["rows"]["rows"] if "same_tokens" in row]
            for method, step in steps.items()
            if method in served
        }
        whole = [load.requests * load.history for load in DRY_LOADS]
        assert restored.pop(f"serve-{name}-recompute", [0, 0]) == [0, 0]
        assert all(tokens == whole for tokens in restored.values())
