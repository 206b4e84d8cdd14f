"""The simulated figures of the paper: what they reproduce of it, and what they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.partition_ablations import MODELS
from bench.partition_figures import figure_11_ranges, figure_12_ranges, recompute_slowdown
from hcache_backend.partition.model_config import read_model

ROOT = Path(__file__).resolve().parents[3]


def load(path: Path) -> dict[str, Any]:
    """Four digits are what another machine's arithmetic agrees on, and more than is printed."""
    content: dict[str, Any] = json.loads(
        path.read_text(), parse_float=lambda text: float(f"{float(text):.4g}")
    )
    return content


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("figures")
    done = subprocess.run(
        [sys.executable, "-m", "bench.partition_figures", "--results", folder],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "partition_figures.png").stat().st_size > 0
    found = load(folder / "partition_figures.json")
    for reasons in found["reasons"].values():
        assert all(reason in done.stdout for reason in reasons)
    return found


def test_the_committed_figures_are_those_of_this_code(content: dict[str, Any]) -> None:
    assert load(ROOT / "bench" / "results" / "partition_figures.json") == content


def test_the_models_are_the_public_ones() -> None:
    for name, shape in MODELS.items():
        config = Path(__file__).parent / "configs" / f"{name.lower()}.json"
        assert shape == read_model(config)


def test_table_3(content: dict[str, Any]) -> None:
    for row in content["table_3"]:
        for method, layers in row["paper"].items():
            assert abs(row["ours"][method] - layers) <= 1
            assert abs(row["closed_form"][method] - layers) <= 1
        if row["paper_kv_bytes_of_ours"]:
            assert row["kv_bytes_of_ours"] == pytest.approx(row["paper_kv_bytes_of_ours"], rel=0.07)


def test_platforms_are_up_to_a_seventh_faster_than_the_papers(content: dict[str, Any]) -> None:
    ours = {row["setting"]: row["over_kv"] for row in content["figure_11"]["platforms"]}
    for row in content["figure_11"]["implied"]:
        assert 1 < ours[row["setting"]] / row["paper"] < 1.15
        assert row["compute_share"] < content["assumed"]["compute_share"]
    assert all(ratio > 1.25 for ratio in ours.values())


def test_ranges_of_figure_11(content: dict[str, Any]) -> None:
    paper, ours = content["paper"]["figure_11"], figure_11_ranges(content)
    for name in ("platforms, over KV", "SSDs, over KV"):
        assert 0.9 * paper[name][0] < ours[name][0]
        assert ours[name][1] < 1.2 * paper[name][1]
    assert ours["SSDs, over recomputation"][0] == pytest.approx(2.3, rel=0.02)
    # Not reproduced: the reasons say that the paper's recomputation is faster than its FLOPs allow.
    for name in ("platforms, over recomputation", "SSDs, over recomputation"):
        assert ours[name][1] > 1.3 * paper[name][1]


def test_recomputation_suffers_from_length_as_in_the_paper(content: dict[str, Any]) -> None:
    assert recompute_slowdown(content) == pytest.approx(0.28, abs=0.06)


def test_ablations_of_the_scheduler(content: dict[str, Any]) -> None:
    paper, ours = content["paper"]["figure_12"], figure_12_ranges(content)
    for name, (low, high) in paper.items():
        assert 0.98 * low < ours[name][0]
        assert ours[name][1] < 1.1 * high
    for row in content["figure_12"]:
        assert row["ms"]["hcache"] == min(row["ms"].values())


def test_splitting_by_tokens(content: dict[str, Any]) -> None:
    usual, balanced = content["figure_13"]
    for name, paper in content["paper"]["figure_13"].items():
        first, last = (
            balanced[order][name]["slower"] for order in ("recomputed first", "recomputed last")
        )
        assert first < paper < last
        assert abs(first - paper) < 0.03
        assert abs(last - paper) < 0.03
        assert usual["recomputed last"][name]["slower"] > 0.02
    assert balanced["layers"]["best"]["hidden"] == 31
    # Not as in the paper: with the share of the other figures, whole tiles split as well as layers.
    assert abs(usual["recomputed first"]["best"]["slower"]) < 0.01


def test_a_ring_of_few_segments_is_slower_even_if_planned_for(content: dict[str, Any]) -> None:
    for row in content["ring"]:
        assert row["slower"] >= row["best_slower"] >= 0
    shallow = [row for row in content["ring"] if row["ring"] == 3]
    assert all(row["best_slower"] > 0.1 for row in shallow)
    deep = [row for row in content["ring"] if row["ring"] == 24]
    assert all(row["slower"] < 0.001 for row in deep)
