"""The paper: costs and machines as it counts them, and its figures, reproduced and not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.paper import MODELS
from hcache_backend.plan.profile import BUS_SHARE, COMPUTE_SHARE, PRESETS, preset_profile
from hcache_backend.plan.restore import Partition, search, simulate
from tests.unit.partition.pipelines import layer_costs, public_model


@pytest.mark.parametrize("tokens", [64, 1024, 16384])
def test_a_layer_costs_what_the_paper_counts(tokens: int) -> None:
    """Section 3.2: MHA, and an MLP of two matrices of 4 D."""
    model, profile = public_model("opt-30b"), preset_profile("a100-40g")
    costs = layer_costs(profile, model, tokens)
    flops, bus, width = 312e12 * COMPUTE_SHARE, 32e9 * BUS_SHARE, model.hidden
    assert costs.io_h == pytest.approx(tokens * width * 2 / bus)
    assert costs.io_kv == pytest.approx(2 * costs.io_h)
    assert costs.c_h == pytest.approx(4 * tokens * width**2 / flops)
    # The paper counts N^2 D for attention; scores and values of the causal half are 2 N^2 D.
    assert costs.c_tok == pytest.approx((24 * tokens * width**2 + 2 * tokens**2 * width) / flops)
    assert costs.c_tok / costs.c_h == pytest.approx(6 + tokens / (2 * width))


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b", "opt-30b"])
@pytest.mark.parametrize("preset", PRESETS)
def test_hidden_states_pay_for_mha_on_every_machine(preset: str, name: str) -> None:
    model = public_model(name)
    costs = layer_costs(preset_profile(preset), model, 1024)
    found = search(costs, model.layers)
    assert found.hidden > 0
    kv_only = simulate(costs, Partition(0, 0, model.layers))
    assert kv_only / simulate(costs, found) > 1.15


def test_the_papers_machines_have_the_rates_of_its_table_2() -> None:
    table_2 = {"a100-40g": (312, 32), "a30": (165, 32), "l20": (120, 32), "h800": (990, 64)}
    for name, (teraflops, bus) in table_2.items():
        assert (PRESETS[name].flops, PRESETS[name].bus) == (teraflops * 1e12, bus * 1e9)
    # 330 in the paper, with FP16 accumulation
    assert PRESETS["rtx4090"].flops == pytest.approx(330e12 / 2, rel=0.01)
    assert [preset_profile(name).gathers for name in ("h800", "l20")] == [True, False]  # NVLink
    l3 = preset_profile("a100-40g", ssds=4).l3
    assert l3 is not None and l3.per_second == pytest.approx(27.6e9)
    assert preset_profile("a100-40g").l3 is None


ROOT = Path(__file__).resolve().parents[3]


def load(path: Path) -> dict[str, Any]:
    """Four digits are what another machine's arithmetic agrees on, and more than is printed."""
    content: dict[str, Any] = json.loads(
        path.read_text(), parse_float=lambda text: float(f"{float(text):.4g}")
    )
    return content


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("paper")
    done = subprocess.run(
        [sys.executable, "-m", "bench.paper", "--out", folder],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "paper.png").stat().st_size > 0
    assert "the paper's closed form" in done.stdout
    return load(folder / "paper.json")


def ranges(content: dict[str, Any]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    return {(row["figure"], row["ratio"]): row for row in content["ranges"]}


def test_the_committed_figures_are_those_of_this_code(content: dict[str, Any]) -> None:
    assert load(ROOT / "bench" / "results" / "paper.json") == content


def test_the_models_are_the_public_ones() -> None:
    for name, shape in MODELS.items():
        assert shape == public_model(name.lower())


def test_table_3(content: dict[str, Any]) -> None:
    """Ours and the closed form, with one compute share and one bus share for all rows.

    Four SSDs give 27.6 GB/s, more than the bus does, 26.9: the 7B and 13B rows are bound by the
    bus, the 30B row (on four GPUs) and the single SSD by the SSDs.
    """
    for row in content["table_3"]:
        for method, layers in row["paper"].items():
            assert abs(row["ours"][method] - layers) <= 1
            assert abs(row["closed_form"][method] - layers) <= 1
        if row["paper_kv_over_stored"]:
            assert row["kv_over_stored"] == pytest.approx(row["paper_kv_over_stored"], rel=0.07)


def test_copies_by_few_programs_keep_most_of_what_adding_up_loses(content: dict[str, Any]) -> None:
    rows = content["contention"]
    assert [row["setting"] for row in rows] == [row["setting"] for row in content["platforms"]]
    for row in rows:
        ideal, few, added = (row[f"{n}_over_kv"] for n in ("ideal", "few_programs", "added_up"))
        assert row["multiprocessors_left"] >= 0.75
        assert added < few <= ideal
        assert few >= 0.85 * ideal
        assert row["added_up_hidden_only_over_kv"] <= added
        assert ideal - few < few - added


def test_platforms_are_up_to_a_seventh_faster_than_the_papers(content: dict[str, Any]) -> None:
    ours = {row["setting"]: row["over_kv"] for row in content["platforms"]}
    for row in content["implied"]:
        assert 1 < ours[row["setting"]] / row["paper"] < 1.15
        assert row["compute_share"] < COMPUTE_SHARE
    assert all(ratio > 1.25 for ratio in ours.values())


def test_ranges_of_figure_11(content: dict[str, Any]) -> None:
    for part in ("platforms", "SSDs"):
        over_kv, over_recompute = (
            ranges(content)[part, f"over_{method}"] for method in ("kv", "recompute")
        )
        assert 0.9 * over_kv["paper"][0] < over_kv["ours"][0]
        assert over_kv["ours"][1] < 1.2 * over_kv["paper"][1]
        # Not reproduced: docs/paper.md says that the paper's recomputation is faster than its FLOPs
        # allow.
        assert over_recompute["ours"][1] > 1.3 * over_recompute["paper"][1]
    assert over_recompute["ours"][0] == pytest.approx(2.3, rel=0.02)


def test_recomputation_suffers_from_length_as_in_the_paper(content: dict[str, Any]) -> None:
    """Section 6.2.3: 7B recomputes tokens of 16K more slowly than those of 1K."""
    rows = [row for row in content["lengths"] if "7B" in row["setting"]]
    speeds = {row["tokens"]: row["tokens"] / row["recompute_ms"] for row in rows}
    assert 1 - speeds[16384] / speeds[1024] == pytest.approx(0.28, abs=0.06)


def test_ablations_of_the_scheduler(content: dict[str, Any]) -> None:
    for (figure, _), row in ranges(content).items():
        if figure in ("ablations", "skewed"):
            (low, high), ours = row["paper"], row["ours"]
            assert 0.98 * low < ours[0]
            assert ours[1] < 1.1 * high
    for row in content["ablations"]:
        assert all(ratio >= 1 for name, ratio in row.items() if name.startswith("over_"))
