"""A short run of ``bench.accuracy``, with a model that is trained the first time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.accuracy.__main__ import PROGRAM
from bench.fixtures.text import VALUES

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HIDDEN, KV_HEADS, HEAD_DIM = 4, 256, 2, 64
pytestmark = pytest.mark.engine


@pytest.mark.long  # the first time the model is trained
@pytest.mark.timeout(1200)
def test_what_each_method_changes_is_measured_beside_a_run_without_a_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.accuracy", "--out", str(tmp_path), "--model", "gqa"]
    command += ["--quick", "--texts", "4", "--history", "256", "--turn", "96"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--dtype", "float32"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "accuracy_gqa.json").read_text())
    assert (tmp_path / "accuracy_gqa.png").exists()
    whole = {row["method"]: row for row in results["methods"]}
    assert list(whole) == ["exact", "recomputed", "hidden, none", "hidden, int8"]
    assert [row["bytes_per_token"] for row in whole.values()][:3] == [
        2 * LAYERS * KV_HEADS * HEAD_DIM * 4,
        0,
        LAYERS * HIDDEN * 4,
    ]
    assert not any(row["not_kept"] for row in results["methods"])
    # float32: what loses nothing differs by rounding, what loses something by more.
    for name in ("exact", "recomputed", "hidden, none"):
        assert whole[name]["kl"] < 1e-7
        assert whole[name]["same"] == whole[name]["tokens"] == 4 * 95
    assert "k_error" not in whole["exact"]  # it would be compared with itself
    assert whole["recomputed"]["k_error"] < 1e-4
    assert whole["hidden, none"]["k_error"] < 1e-4
    lossy = whole["hidden, int8"]
    assert lossy["bytes_per_token"] < 0.3 * whole["exact"]["bytes_per_token"]
    assert 1e-6 < lossy["kl"] < lossy["largest_kl"]
    assert 1e-3 < lossy["k_error"] < 0.1
    # The model has learned its text, and recalls what the history said.
    assert results["reference"]["nll"] < 4.5
    hits, asked = map(sum, zip(*results["reference"]["recall"].values(), strict=True))
    assert asked >= 4
    assert hits > 0.5 * asked > asked / len(VALUES)
    assert "\nhidden, int8 " in done.stdout
    # Every server says how exact its K and V are; so does this one.
    [projected] = results["exactness"]["projected"]
    assert projected["layers"] == [*range(LAYERS)]
    assert "% equal" in projected["exactness"]
    assert "% equal" in results["exactness"]["recomputed"]


def test_a_history_of_parts_of_pages_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        PROGRAM.main(["--model", "gqa", "--history", "100"])
    assert "--history 100 must be a whole number of 64" in capsys.readouterr().err
