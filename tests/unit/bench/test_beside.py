"""How restores that recompute beside reads compare with each alone, and with the floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.beside import PROGRAM, compared, kept_rows
from bench.harness.machine import MachineError


def results() -> dict[str, Any]:
    """The machine gets slower from round to round."""
    rounds = range(1, 8)
    seconds = {"none": [1.0 * n for n in rounds], "alone": [1.1 * n for n in rounds]}
    seconds["both"] = [0.6 * n for n in rounds]
    row = {"tokens": 2048, "speed": 1.0, "model": {"layers": 12}, **compared(seconds, 1.0, 0.0)}
    return {"device": "a CPU", "rows": [row]}


def test_rounds_are_compared_with_those_of_the_others() -> None:
    [row] = results()["rows"]
    assert row["of_alone"] == pytest.approx(0.6 / 1.1)
    assert row["of_best"] == pytest.approx(0.6)  # computing is sooner than L3 alone
    assert row["of_floor"] == pytest.approx(1.2)
    assert row["of_floor_interval"] == pytest.approx((1.2, 1.2))


def test_the_floor_has_the_question_behind_what_is_done_at_once() -> None:
    seconds = {"none": [2.2], "alone": [1.0], "both": [1.5]}
    found = compared(seconds, 2.2, 0.2)  # L3 takes 1.0 s, the history 2.0 s
    assert found["of_floor"] == pytest.approx(1.5 / (0.2 + 2 / 3))


def test_the_table_has_a_row_for_each_speed() -> None:
    assert PROGRAM.table(results()).splitlines()[2:] == [
        "| 2,048 | 1 | 4,000 | 4,400 | 2,400 | 0.55 | 0.55 to 0.55 "
        "| 0.60 | 0.60 to 0.60 | 1.20 | 1.20 to 1.20 |"
    ]


def test_rows_of_other_histories_are_kept_of_the_same_machine(tmp_path: Path) -> None:
    path, found = tmp_path / "beside.json", results()
    path.write_text(json.dumps({**found, "date": "then"}))
    [row] = kept_rows(path, [8192, 32768], "a CPU")
    assert row == {"date": "then", **json.loads(json.dumps(found["rows"][0]))}
    assert kept_rows(path, [2048], "a CPU") == []
    with pytest.raises(MachineError, match="was measured on a CPU, this is another"):
        kept_rows(path, [8192], "another")
