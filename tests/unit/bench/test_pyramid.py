"""Krul's pyramid beside the staircase of a restore, in the simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.pyramid import (
    MODEL,
    STEPS,
    TOKENS,
    Pyramids,
    compute,
    draw,
    profiles,
    pyramids,
    recomputation,
    table_lines,
)
from tests.unit.partition.pipelines import layer_costs

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "pyramid.json"


def test_the_staircase_is_at_least_as_fast_as_every_pyramid() -> None:
    rows = compute()
    assert len(rows) == 4
    for row in rows:
        for pyramid in ("flat_ms", "pyramid_ms", "best_pyramid_ms", "early_pyramid_ms"):
            assert row["staircase_ms"] <= row[pyramid], (row["machine"], pyramid)


def test_the_papers_split_ends_together_on_the_machine_that_has_it_in_balance() -> None:
    row = next(row for row in compute() if row["machine"] == "2:3 in balance")
    assert row["share"] == 1
    assert row["flat_ms"] == pytest.approx(0.6 * row["load_ms"], rel=1e-3)
    # No share of the tokens does better in every layer alike.
    profile = profiles()["2:3 in balance"]
    mean = np.arange(STEPS + 1) / STEPS
    every = Pyramids(mean, np.zeros_like(mean)).busy(profile)
    assert 1e3 * every.min() == pytest.approx(row["flat_ms"])


def test_pyramids_are_linear_and_have_their_share_of_the_tokens() -> None:
    tried = pyramids()
    assert len(tried.mean) == (STEPS + 1) ** 2
    assert tried.tokens.min() == 0
    assert tried.tokens.max() == TOKENS
    np.testing.assert_allclose(tried.tokens.mean(1) / TOKENS, tried.mean, atol=1e-3)
    steps = np.diff(tried.tokens, axis=1)
    assert (steps <= 0).all()
    assert (np.ptp(steps, axis=1) <= 2).all()  # whole tokens


def test_recomputation_of_all_tokens_is_that_of_the_cost_model() -> None:
    profile = profiles()["preset"]
    every = np.full((1, MODEL.layers), float(TOKENS))
    costs = layer_costs(profile, MODEL, TOKENS, l3="none", early_stop=True)
    for ends_early, layers in ((False, MODEL.layers * costs.c_tok), (True, None)):
        wanted = costs.recomputation(MODEL.layers) if layers is None else layers
        found = recomputation(profile, every, ends_early=ends_early).item()
        assert found == pytest.approx(wanted)


def test_committed_results_are_those_of_the_program(tmp_path: Path) -> None:
    rows = compute()
    for row, committed in zip(rows, json.loads(RESULTS.read_text()), strict=True):
        assert row == pytest.approx(committed)
    assert table_lines(rows).count("\n") == 2 + len(rows) - 1
    pytest.importorskip("matplotlib")
    draw(rows).savefig(tmp_path / "it.png")
