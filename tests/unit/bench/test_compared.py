"""How programs compare methods: with another row than their own, round by round, burst by burst."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import beside, codecs
from bench.harness.machine import MachineError
from bench.harness.reference import Agreement, OwnReference, Scores, agreement, reference_of
from bench.harness.server import ServerError
from bench.hits import cases, load, measure
from bench.hits.cases import ALWAYS, MODELS, OURS
from hcache_backend.server_report import ServerReport, write_report


def test_a_row_is_not_compared_with_its_own_run() -> None:
    run = Scores([1], [0.0])
    with pytest.raises(OwnReference, match="row 'exp4' is the row's own run"):
        reference_of("exp4", run, run)
    with pytest.raises(OwnReference, match="'none'"):
        codecs.compared("none", run, run)
    assert reference_of("exp4", run, again := replace(run)) is again


def test_agreement_counts_tokens_and_measures_log_probabilities() -> None:
    run, reference = (
        Scores([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0]),
        Scores([1, 2, 3, 5], [-1.0] * 4),
    )
    assert agreement("int8", run, reference) == Agreement(4, 3, 1.5, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        agreement("int8", run, Scores([1], [0.0]))


def test_int8_loses_less_than_fp8_until_some_channels_stand_out() -> None:
    alike, unlike = codecs.standing_out(1), codecs.standing_out(50)
    assert alike["int8"] < alike["fp8"] / 2
    assert unlike["fp8"] < unlike["int8"] / 2


def test_ours_is_compared_with_the_better_one_round_by_round() -> None:
    none, always = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [3.0] * 6
    ours = [each + 0.15 for each in none]
    found = measure.compared(ours, none, always)
    assert found["of_better"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])
    few = measure.compared([1.0], [2.0], [4.0])
    assert few == {"of_better": 0.5, "interval": None}


@pytest.mark.parametrize("codec", ["exp4", "none", None])
def test_nothing_is_measured_whose_pages_are_in_another_codec(
    codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, dtype: str, **_options: Any) -> Any:
        server = SimpleNamespace(l3=tmp_path, server=SimpleNamespace(error=ServerError))
        return nullcontext(SimpleNamespace(servers={ALWAYS: server, OURS: server}, dtype=dtype))

    monkeypatch.setattr(cases, "taking_turns", started)
    if codec is not None:
        report = {"time": 0.0, "model": "m", "mode": "kv", "pages": "own", "reason": None}
        write_report(tmp_path, ServerReport(**report, codec=codec, projection=()))
    model = replace(MODELS["MHA-bf16"], build=lambda *_: tmp_path)
    wrong = pytest.raises(ServerError, match=f"by codec {codec or 'unknown'}, not by exp4")
    with nullcontext() if codec == "exp4" else wrong, model.turns(None, tmp_path, 256) as turns:  # type: ignore[arg-type]
        assert turns.dtype == "bfloat16"  # type: ignore[attr-defined]


def test_bursts_are_compared_one_by_one() -> None:
    rates = {"none": [0.9, 1.0], "always": [0.5, 0.8], "ours": [1.08, 1.1]}
    waits = {"none": [2.0, 4.0], "always": [8.0, 5.0], "ours": [1.0, 4.4]}
    found = load.compared(rates, waits)
    assert found["goodput_of_better"] == pytest.approx((1.2 + 1.1) / 2)
    assert found["wait_of_better"] == pytest.approx((0.5 + 1.1) / 2)
    assert found["per_second"]["ours"] == pytest.approx(1.09)
    assert found["first_token_s"]["always"] == 6.5


def test_a_restore_beside_a_read_is_compared_with_each_alone_and_with_the_floor() -> None:
    """The machine gets slower from round to round."""
    seconds = {
        name: [share * n for n in range(1, 8)]
        for name, share in {"none": 1.0, "alone": 1.1, "both": 0.6}.items()
    }
    row = beside.compared(seconds, 1.0, 0.0)
    assert row["of_alone"] == pytest.approx(0.6 / 1.1)
    assert row["of_best"] == pytest.approx(0.6)  # computing is sooner than L3 alone
    assert row["of_floor"] == pytest.approx(1.2)
    assert row["of_floor_interval"] == pytest.approx((1.2, 1.2))
    # L3 takes 1.0 s, the history 2.0 s; the question comes after both.
    found = beside.compared({"none": [2.2], "alone": [1.0], "both": [1.5]}, 2.2, 0.2)
    assert found["of_floor"] == pytest.approx(1.5 / (0.2 + 2 / 3))


def test_rows_of_other_histories_are_kept_of_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "beside.json"
    path.write_text(json.dumps({"device": "a CPU", "date": "then", "rows": [{"tokens": 2048}]}))
    assert beside.kept_rows(path, [8192], "a CPU") == [{"date": "then", "tokens": 2048}]
    assert beside.kept_rows(path, [2048], "a CPU") == []
    with pytest.raises(MachineError, match="was measured on a CPU, this is another"):
        beside.kept_rows(path, [8192], "another")
