"""How default options compare with the better of two others, and the tables of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.hits.measure import compared
from bench.hits.report import draw, table_lines


def test_ours_is_compared_with_the_better_one_round_by_round() -> None:
    none, always = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [3.0] * 6
    ours = [each + 0.15 for each in none]
    found = compared(ours, none, always)
    assert found["of_better"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])


def test_few_rounds_have_no_interval() -> None:
    assert compared([1.0], [2.0], [4.0]) == {"of_better": 0.5, "interval": None}


def make_results() -> dict[str, Any]:
    point = {"ms": {"none": 1000.0, "always": 4000.0, "ours": 1020.0}, "interval": [1.0, 1.04]}
    load = {
        "speed": 0.5,
        "per_second": {"none": 0.9, "always": 0.5, "ours": 1.1},
        "first_token_s": {"none": 2.0, "always": 4.0, "ours": 1.5},
        "goodput_of_better": 1.2,
    }
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
                "loads": [load],
            }
        ],
    }


def test_the_tables_have_a_row_for_each_speed_and_each_load() -> None:
    lines = table_lines(make_results()).splitlines()
    assert "| GQA (K and V), 1,024 | 0.25 | 1,000 | 4,000 | 1,020 | 1.02 | 1.00 to 1.04 |" in lines
    assert "| GQA (K and V), 1,024 | 1,000 | 1,600 |" in lines
    assert (
        "| GQA (K and V), 1,024 | 0.5 | 0.90 (2.00) | 0.50 (4.00) | 1.10 (1.50) | 1.20 |" in lines
    )


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(make_results()).savefig(tmp_path / "hits.png")
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")
