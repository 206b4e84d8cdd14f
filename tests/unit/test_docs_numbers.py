"""Every table of results in the documentation is the one that its program makes of its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.record import PAGES, PROGRAMS, RESULTS, marked, record, refreshed
from bench.record import table as made

BLOCKS = [
    pytest.param(name, content, id=f"{page.name}-{name}")
    for page in PAGES
    for name, content in marked(page.read_text())
]


@pytest.mark.parametrize(("name", "content"), BLOCKS)
def test_a_table_says_what_the_results_say(name: str, content: str) -> None:
    assert content == made(name), f"run python -m bench.record --tables, or record {name} again"


def test_all_results_of_programs_have_a_table_in_the_documentation() -> None:
    recorded = {name for name in PROGRAMS if (RESULTS / f"{name}.json").exists()}
    assert {str(block.values[0]).removesuffix(" short") for block in BLOCKS} == recorded


def test_a_table_is_written_anew_between_its_marks_only() -> None:
    page = "before\n<!-- results: demo -->\nold\n<!-- end -->\nbehind\n"
    found = refreshed(page)
    assert found == f"before\n<!-- results: demo -->\n{made('demo')}\n<!-- end -->\nbehind\n"
    assert list(marked(found)) == [("demo", made("demo"))]


def test_marks_with_nothing_between_them_get_their_table() -> None:
    page = "<!-- results: eviction -->\n<!-- end -->\ntext\n<!-- results: paper -->\n<!-- end -->\n"
    assert [name for name, _ in marked(refreshed(page))] == ["eviction", "paper"]
    assert "\ntext\n" in refreshed(page)


def test_results_that_are_missing_end_the_program(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"demo\.json is missing"):
        record("demo", tmp_path)


def test_what_pages_say_of_the_judgement_of_hits_is_what_was_measured() -> None:
    cases = json.loads((RESULTS / "hits.json").read_text())["cases"]
    points = [point for case in cases for point in case["points"]]
    assert (len(points), f"{max(point['of_better'] for point in points):.2f}") == (60, "1.04")
    [slower] = [point for point in points if (point["interval"] or [0])[0] > 1]
    assert [f"{value:.2f}" for value in slower["interval"]] == ["1.02", "1.13"]
    for name in ("README.md", "CHANGELOG.md", "docs/serving.md"):
        said = " ".join((RESULTS.parents[1] / name).read_text().split())
        assert "of 60 " in said.lower() and "1.04 times" in said, name
