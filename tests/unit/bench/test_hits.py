"""How default options compare with the better of two others, and the tables of that."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness.server import ServerError
from bench.hits import cases, load
from bench.hits.__main__ import PROGRAM
from bench.hits.cases import ALWAYS, MODELS, OURS
from bench.hits.measure import compared
from hcache_backend.server_report import ServerReport, write_report


def test_ours_is_compared_with_the_better_one_round_by_round() -> None:
    none, always = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [3.0] * 6
    ours = [each + 0.15 for each in none]
    found = compared(ours, none, always)
    assert found["of_better"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])


def test_few_rounds_have_no_interval() -> None:
    assert compared([1.0], [2.0], [4.0]) == {"of_better": 0.5, "interval": None}


@pytest.mark.parametrize("codec", ["exp4", "none", None])
def test_nothing_is_measured_whose_pages_are_in_another_codec(
    codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, dtype: str, tp: int) -> Any:
        server = SimpleNamespace(l3=tmp_path, server=SimpleNamespace(error=ServerError))
        return nullcontext(SimpleNamespace(servers={ALWAYS: server, OURS: server}, dtype=dtype))

    monkeypatch.setattr(cases, "taking_turns", started)
    if codec is not None:
        report = {"time": 0.0, "model": "m", "mode": "kv", "pages": "own", "reason": None}
        write_report(tmp_path, ServerReport(**report, codec=codec, projection=()))
    model = replace(MODELS["GQA-bf16"], build=lambda *_: tmp_path)
    wrong = pytest.raises(ServerError, match=f"by codec {codec or 'unknown'}, not by exp4")
    with nullcontext() if codec == "exp4" else wrong, model.turns(None, tmp_path, 256) as turns:  # type: ignore[arg-type]
        assert turns.dtype == "bfloat16"  # type: ignore[attr-defined]


def make_results() -> dict[str, Any]:
    point = {"ms": {"none": 1000.0, "always": 4000.0, "ours": 1020.0}, "interval": [1.0, 1.04]}
    return {
        "device": "a machine",
        "cases": [
            {
                "model": "GQA",
                "pages": "K and V",
                "tokens": 1024,
                "computing_ms": 1000.0,
                "stalled_ms": {"5 s, default options": 1600.0},
                "points": [{"speed": 0.25, "of_better": 1.02, **point}],
            }
        ],
    }


def test_the_tables_have_a_row_for_each_speed_and_each_stop() -> None:
    lines = PROGRAM.table(make_results()).splitlines()
    assert "| GQA (K and V), 1,024 | 0.25 | 1,000 | 4,000 | 1,020 | 1.02 | 1.00 to 1.04 |" in lines
    assert "| GQA (K and V), 1,024 | 1,000 | 1,600 |" in lines


def test_the_short_table_has_one_history_of_two_models() -> None:
    results = make_results()
    [case] = results["cases"]
    [point] = case["points"]
    point["ms"]["file"], point["mb_per_s"] = 4100.0, 2.25
    results["cases"] += [case | {"tokens": 4096}, case | {"model": "MLA"}]
    assert PROGRAM.table(results, "short").splitlines()[2:] == [
        "| GQA (K and V), 1,024 | 0.25 | 2.2 | 1,000 | 4,100 | 1,020 | 1.02 | 1.00 to 1.04 |"
    ]


def make_loads() -> dict[str, Any]:
    """Two bursts; default options are the fastest in both."""
    rates = {"none": [0.9, 1.0], "always": [0.5, 0.8], "ours": [1.08, 1.1]}
    waits = {"none": [2.0, 4.0], "always": [8.0, 5.0], "ours": [1.0, 4.4]}
    row = {"model": "GQA", "pages": "K and V", "tokens": 1024, "speed": 0.5}
    row |= {"rounds_first_token_s": waits, **load.compared(rates, waits)}
    return {"device": "a machine", "rows": [row]}


def test_bursts_are_compared_one_by_one() -> None:
    [line] = load.PROGRAM.table(make_loads()).splitlines()[2:]
    assert line == (
        "| GQA (K and V), 1,024 | 0.5 | 0.95 | 0.65 | 1.09 | 1.15 | 3.00 | 6.50 | 2.70 | 0.80 |"
    )
